"""A conversation of several turns with tools in each wire format, by the vendors' own clients; half of the turns streamed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import anthropic
import openai

from examples.quickstart.conversation import MAIN_SYSTEM, MAIN_TOOLS
from examples.quickstart.make_tasks import INSTRUCTION
from tests.proxy.world import World

Between = Callable[[], Awaitable[None]]

RESULT = "ada,red,3"
ON = "Go on."

TURNS = 4


async def nothing() -> None:
    pass


class Talk(Protocol):
    async def __call__(self, world: World, execution: str, midway: Between = ...) -> int:
        """The conversation of one execution; returns how many calls of tools there were. `midway` comes after half of
        the turns."""


def token(world: World, execution: str) -> str:
    return world.headers(execution)["authorization"].removeprefix("Bearer ")


async def messages(world: World, execution: str, midway: Between = nothing) -> int:
    asked: dict[str, Any] = {"model": "policy", "max_tokens": 64, "system": MAIN_SYSTEM, "tools": MAIN_TOOLS}
    history: list[Any] = [{"role": "user", "content": INSTRUCTION}]
    called = 0
    async with anthropic.AsyncAnthropic(base_url=world.url, auth_token=token(world, execution), api_key=None) as client:
        for turn in range(TURNS):
            if turn == TURNS // 2:
                await midway()
            if turn % 2:
                async with client.messages.stream(messages=history, **asked) as stream:
                    answer = await stream.get_final_message()
            else:
                answer = await client.messages.create(messages=history, **asked)
            calls = [block.id for block in answer.content if block.type == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": call, "content": RESULT} for call in calls]
            history.append({"role": "assistant", "content": answer.content})
            history.append({"role": "user", "content": results or ON})
            called += len(calls)
    return called


async def chat_completions(world: World, execution: str, midway: Between = nothing) -> int:
    tools: list[Any] = [{"type": "function", "function": function(tool)} for tool in MAIN_TOOLS]
    asked: dict[str, Any] = {"model": "policy", "max_completion_tokens": 64, "tools": tools}
    history: list[Any] = [{"role": "system", "content": MAIN_SYSTEM}, {"role": "user", "content": INSTRUCTION}]
    called = 0
    async with gpt(world, execution) as client:
        for turn in range(TURNS):
            if turn == TURNS // 2:
                await midway()
            if turn % 2:
                async with client.chat.completions.stream(messages=history, **asked) as stream:
                    answer: Any = (await stream.get_final_completion()).choices[0].message
            else:
                answer = (await client.chat.completions.create(messages=history, **asked)).choices[0].message
            calls = [call.id for call in answer.tool_calls or ()]
            history.append(answer.model_dump(exclude_none=True, exclude={"parsed"}))
            history += [{"role": "tool", "tool_call_id": call, "content": RESULT} for call in calls]
            history += [] if calls else [{"role": "user", "content": ON}]
            called += len(calls)
    return called


async def responses(world: World, execution: str, midway: Between = nothing) -> int:
    tools = [{"type": "function", "strict": False, **function(tool)} for tool in MAIN_TOOLS]
    asked: dict[str, Any] = {"model": "policy", "max_output_tokens": 64, "tools": tools, "store": False}
    history: list[Any] = [{"role": "user", "content": INSTRUCTION}]
    called = 0
    async with gpt(world, execution) as client:
        for turn in range(TURNS):
            if turn == TURNS // 2:
                await midway()
            if turn % 2:
                async with client.responses.stream(input=history, instructions=MAIN_SYSTEM, **asked) as stream:
                    answer: Any = None
                    async for event in stream:
                        if event.type in ("response.completed", "response.incomplete"):
                            answer = event.response
            else:
                answer = await client.responses.create(input=history, instructions=MAIN_SYSTEM, **asked)
            calls = [item.call_id for item in answer.output if item.type == "function_call"]
            history += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in answer.output]
            history += [{"type": "function_call_output", "call_id": call, "output": RESULT} for call in calls]
            history += [] if calls else [{"role": "user", "content": ON}]
            called += len(calls)
    return called


def gpt(world: World, execution: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=world.url + "/v1", api_key=token(world, execution))


def function(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool of Anthropic Messages as OpenAI's formats say it."""
    return {"name": tool["name"], "description": tool["description"], "parameters": tool["input_schema"]}
