"""What is nested deeper than we can read, place or render is refused, never a failure of ours."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.proxy.engines import Engine
from tests.proxy.world import World

SCHEMA = {"type": "object", "properties": {}}


def deep(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


def anthropic_call(depth: int) -> tuple[str, dict[str, Any]]:
    call = {"type": "tool_use", "id": "t", "name": "f", "input": deep(depth)}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "r"}
    return "/v1/messages", {
        "max_tokens": 9,
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ],
    }


def anthropic_tool(depth: int) -> tuple[str, dict[str, Any]]:
    tools = [{"name": "f", "input_schema": deep(depth)}]
    return "/v1/messages", {"max_tokens": 9, "tools": tools, "messages": [{"role": "user", "content": "hi"}]}


def completions_call(depth: int) -> tuple[str, dict[str, Any]]:
    call = {"id": "t", "type": "function", "function": {"name": "f", "arguments": json.dumps(deep(depth))}}
    return "/v1/chat/completions", {
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "t", "content": "r"},
        ],
    }


def responses_call(depth: int) -> tuple[str, dict[str, Any]]:
    call = {"type": "function_call", "call_id": "t", "name": "f", "arguments": json.dumps(deep(depth))}
    output = {"type": "function_call_output", "call_id": "t", "output": "r"}
    return "/v1/responses", {"input": [{"role": "user", "content": "hi"}, call, output]}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asked", [anthropic_call, anthropic_tool, completions_call, responses_call])
async def test_any_depth_is_answered_or_refused(world: World, engine: Engine, asked: Any, stream: bool) -> None:
    for depth in (50, 200, *range(300, 960, 33)):
        path, body = asked(depth)
        async with world.post({"model": "policy", "stream": stream, **body}, path=path) as response:
            said = await response.text()
            assert response.status == 200 or (response.status == 400 and "nested too deeply" in said), (depth, said)
