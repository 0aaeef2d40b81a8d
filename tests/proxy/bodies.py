"""Anthropic Messages as tests write and read them: requests, the text of a call, a stream's events and their message."""

from __future__ import annotations

import json
from typing import Any


def call_text(name: str, arguments: Any) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


def parse_events(data: bytes) -> list[dict[str, Any]]:
    """Events of a stream, each framed as `event: TYPE`, one `data:` line and an empty line."""
    events = []
    for frame in data.decode().split("\n\n")[:-1]:
        name, line = frame.split("\n")
        event = json.loads(line.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def assemble(events: list[dict[str, Any]]) -> dict[str, Any]:
    """A message from its events, strict about their order."""
    assert events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop"
    message = events[0]["message"]
    opened: str | None = None
    for event in events[1:-1]:
        match event["type"]:
            case "ping":
                assert opened is None
            case "content_block_start":
                assert opened is None and event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                opened = ""
            case "content_block_delta":
                assert opened is not None and event["index"] == len(message["content"]) - 1
                delta, block = event["delta"], message["content"][-1]
                if delta["type"] == "input_json_delta":
                    assert block["type"] == "tool_use" and block["input"] == {}
                    opened += delta["partial_json"]
                else:
                    field = delta["type"].removesuffix("_delta")
                    assert block["type"] == field
                    block[field] += delta[field]
            case "content_block_stop":
                if message["content"][-1]["type"] == "tool_use":
                    message["content"][-1]["input"] = json.loads(opened or "{}")
                opened = None
            case "message_delta":
                assert opened is None
                message.update(event["delta"])
                message["usage"] = event["usage"]
            case other:
                raise AssertionError(f"unexpected {other}")
    return message


TOOLS = [{"name": "bash", "description": "Run.", "input_schema": {"type": "object", "properties": {}}}]


def body_of(*messages: Any, system: Any = "You are.", stream: bool = False, **more: Any) -> dict[str, Any]:
    """A request; strings alternate between user and assistant."""
    roles = ("user", "assistant")
    listed = [
        m if isinstance(m, dict) and "role" in m else {"role": roles[i % 2], "content": m}
        for i, m in enumerate(messages)
    ]
    extra = {"stream": True} if stream else {}
    return {"model": "policy", "max_tokens": 300, "system": system, "tools": TOOLS, "messages": listed, **extra, **more}


def result_of(call: dict[str, Any], text: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call["id"], "content": text}
