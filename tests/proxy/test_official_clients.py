"""The vendors' own Python clients over a whole proxy: every form of call that they have, and the errors that they know."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from schemas.records import CallRecord
from services.proxy.refusal import Refused
from tests.proxy.bodies import call_text
from tests.proxy.engines import Engine
from tests.proxy.world import World, until

anthropic = pytest.importorskip("anthropic")
openai = pytest.importorskip("openai")

SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}
TWO = "Both.\n" + call_text("bash", {"command": "a", "n": 5000.0}) + "\n" + call_text("bash", {"command": "b"})


def token(world: World) -> str:
    return world.headers()["authorization"].removeprefix("Bearer ")


def claude(world: World, **more: Any) -> Any:
    return anthropic.AsyncAnthropic(base_url=world.url, auth_token=token(world), api_key=None, **more)


def gpt(world: World, **more: Any) -> Any:
    return openai.AsyncOpenAI(base_url=world.url + "/v1", api_key=token(world), **more)


async def calls_of(world: World) -> list[CallRecord]:
    return [record for record in await world.records() if isinstance(record, CallRecord)]


def is_a_chain(records: list[CallRecord]) -> bool:
    return [record.parent for record in records] == [None, *(record.call for record in records[:-1])]


async def test_messages(world: World, engine: Engine) -> None:
    engine.script += [engine.say(TWO), engine.say("<think>\nhm\n</think>\n\ndone")]
    tools = [{"name": "bash", "description": "Run.", "input_schema": SCHEMA}]
    asked: dict[str, Any] = {"model": "policy", "max_tokens": 300, "system": "You are.", "tools": tools}
    history: list[Any] = [{"role": "user", "content": "task"}]
    async with claude(world) as client:
        async with client.messages.stream(messages=history, **asked) as stream:
            assert "".join([text async for text in stream.text_stream]) == "Both."
            first = await stream.get_final_message()
        assert first.stop_reason == "tool_use" and [block.type for block in first.content][1:] == ["tool_use"] * 2
        results = [{"type": "tool_result", "tool_use_id": b.id, "content": b.id} for b in reversed(first.content[1:])]
        history += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
        counted = await client.messages.count_tokens(messages=history, model="policy", system="You are.", tools=tools)
        second = await client.messages.create(messages=history, **asked)
        assert [block.type for block in second.content] == ["thinking", "text"] and second.stop_reason == "end_turn"
        assert second.usage.input_tokens == counted.input_tokens
        assert [model.id async for model in client.models.list()] == ["policy"]
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: [0-9]+ tokens > 4096 maximum"):
            await client.messages.create(messages=[{"role": "user", "content": "x" * 5000}], **asked)
    assert is_a_chain(await calls_of(world))


async def test_chat_completions(world: World, engine: Engine) -> None:
    engine.script += [engine.say(TWO), engine.say("done"), engine.say("bye")]
    tools = [{"type": "function", "function": {"name": "bash", "description": "Run.", "parameters": SCHEMA}}]
    asked: dict[str, Any] = {"model": "policy", "tools": tools}
    history: list[Any] = [{"role": "system", "content": "You are."}, {"role": "user", "content": "task"}]
    async with gpt(world) as client:
        async with client.chat.completions.stream(
            messages=history, stream_options={"include_usage": True}, **asked
        ) as stream:
            async for _ in stream:
                pass
            first = await stream.get_final_completion()
        (choice,) = first.choices
        assert choice.finish_reason == "tool_calls" and choice.message.content == "Both."
        assert [call.function.arguments for call in choice.message.tool_calls] == [
            '{"command":"a","n":5000.0}',
            '{"command":"b"}',
        ]
        history.append(choice.message.model_dump(exclude_none=True, exclude={"parsed"}))
        calls = reversed(choice.message.tool_calls)
        history += [{"role": "tool", "tool_call_id": call.id, "content": call.id} for call in calls]
        second = await client.chat.completions.create(messages=history, **asked)
        assert second.choices[0].message.content == "done" and second.choices[0].finish_reason == "stop"
        history += [second.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "and?"}]
        chunks = [chunk async for chunk in await client.chat.completions.create(messages=history, stream=True, **asked)]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "bye"
        assert [model.id async for model in client.models.list()] == ["policy"]
        with pytest.raises(openai.BadRequestError) as long:
            await client.chat.completions.create(messages=[{"role": "user", "content": "x" * 5000}], **asked)
        assert long.value.code == "context_length_exceeded"
    records = await calls_of(world)
    assert is_a_chain(records) and first.usage.prompt_tokens == len(records[0].input_ids)


async def test_responses(world: World, engine: Engine) -> None:
    engine.script += [engine.say(TWO), engine.say("<think>\nhm\n</think>\n\ndone"), engine.say("bye")]
    tools = [{"type": "function", "name": "bash", "description": "Run.", "parameters": SCHEMA, "strict": False}]
    asked: dict[str, Any] = {"model": "policy", "tools": tools, "instructions": "You are.", "store": False}
    history: list[Any] = [{"role": "user", "content": "task"}]
    async with gpt(world) as client:
        async with client.responses.stream(input=history, **asked) as stream:
            seen = [event.type async for event in stream]
            first = await stream.get_final_response()
        assert seen[0] == "response.created" and seen[-1] == "response.completed"
        assert first.output_text == "Both." and [item.type for item in first.output][1:] == ["function_call"] * 2
        history += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in first.output]
        calls = reversed(first.output[1:])
        history += [{"type": "function_call_output", "call_id": c.call_id, "output": c.call_id} for c in calls]
        second = await client.responses.create(input=history, **asked)
        assert [item.type for item in second.output] == ["reasoning", "message"] and second.output_text == "done"
        history += [
            *(item.model_dump(exclude_none=True) for item in second.output),
            {"role": "user", "content": "and?"},
        ]
        third = await client.responses.create(input=history, **asked)
        assert third.output_text == "bye" and third.status == "completed"
        failed = [
            event
            async for event in await client.responses.create(input="x" * 5000, stream=True, **asked)
            if event.type == "response.failed"
        ]
        assert failed[0].response.error.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError, match="nothing is stored here"):
            await client.responses.create(input="hi", previous_response_id="resp_1", **asked)
    assert is_a_chain(await calls_of(world))


async def test_a_client_repeats_what_is_overloaded_and_gets_the_answer(world: World, engine: Engine) -> None:
    engine.hold = True
    async with claude(world) as client:
        messages = [{"role": "user", "content": "hi"}]
        asking = asyncio.create_task(client.messages.create(model="policy", max_tokens=9, messages=messages))
        await engine.until(1)
        world.flight().stop(Refused(529, "ask again"))
        await engine.until(2)
        await until(lambda: world.flight().clients == 1)
        engine.release.set()
        assert (await asking).content[0].text == "ok"


async def test_overload_is_a_503_for_the_other_vendors_client(world: World, engine: Engine) -> None:
    engine.hold = True
    async with gpt(world, max_retries=0) as client:
        messages = [{"role": "user", "content": "hi"}]
        asking = asyncio.create_task(client.chat.completions.create(model="policy", messages=messages, stream=True))
        await engine.until(1)
        world.flight().stop(Refused(529, "ask again"))
        with pytest.raises(openai.InternalServerError) as refused:
            await asking
        assert refused.value.status_code == 503 and refused.value.response.headers["retry-after"] == "5"
