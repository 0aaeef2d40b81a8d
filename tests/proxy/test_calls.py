"""Calls through a whole proxy: what a harness sees, what the engine is asked, what is recorded."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import structlog

from schemas.events import ExecutionDispatched
from schemas.ids import held_out_id, measurement_id
from schemas.records import CallRecord, Delivery
from services.mesh.chat import ChatTokenizer
from tests.proxy.bodies import body_of, call_text, parse_events, result_of
from tests.proxy.conftest import MakeWorld
from tests.proxy.engines import Engine
from tests.proxy.world import EXECUTION, World, until


def prompts(records: list[Any]) -> dict[str, list[int]]:
    """Prompt of every recorded call, by concatenation along its parents."""
    calls = {record.call: record for record in records if isinstance(record, CallRecord)}

    def path(call: str) -> list[int]:
        record = calls[call]
        before = path(record.parent) + calls[record.parent].output_ids if record.parent else []
        return before + record.input_ids

    return {call: path(call) for call in calls}


async def test_a_conversation_with_tools_streaming_and_not(
    world: World, engine: Engine, tokenizer: ChatTokenizer
) -> None:
    engine.script.append(engine.say("Look.\n" + call_text("bash", {"command": "ls", "n": 5000.0})))
    engine.script.append(engine.say("done"))
    first = await world.ask(body_of("task", stream=True))
    assert [block["type"] for block in first["content"]] == ["text", "tool_use"]
    assert first["content"][0]["text"] == "Look."
    assert first["content"][1]["input"] == {"command": "ls", "n": 5000.0}
    assert first["stop_reason"] == "tool_use"
    call = first["content"][1]
    second = await world.ask(body_of("task", first["content"], [result_of(call, "a\nb")]))
    assert second["content"] == [{"type": "text", "text": "done"}] and second["stop_reason"] == "end_turn"
    records = await world.records()
    one, two = records
    assert isinstance(one, CallRecord) and isinstance(two, CallRecord)
    assert (one.parent, two.parent) == (None, one.call) and (one.index, two.index) == (0, 1)
    assert [call["input_ids"] for call in engine.calls] == list(prompts(records).values())
    assert one.output_ids[-1] == engine.end and len(one.output_ids) == len(one.logprobs)
    assert one.versions[0].version == 7 and one.versions[0].end == len(one.output_ids)
    assert (one.cell, one.role, one.finish, one.delivered) == ("cell-0", "main", "stop", True)
    assert first["usage"]["input_tokens"] == len(one.input_ids)
    assert second["usage"]["input_tokens"] == len(engine.calls[1]["input_ids"])
    assert second["usage"]["output_tokens"] == len(two.output_ids)
    text = tokenizer.decode(engine.calls[1]["input_ids"])
    assert text.endswith(
        "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\na\nb\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


async def test_our_sampling_overrides_what_was_asked(world: World, engine: Engine) -> None:
    await world.ask(body_of("hi", temperature=0.2, top_p=0.5, top_k=3))
    sampling = engine.calls[0]["sampling_params"]
    assert (sampling["temperature"], sampling["top_p"], sampling["top_k"]) == (1.0, 1.0, -1)
    assert engine.end in sampling["stop_token_ids"] and sampling["max_new_tokens"] == 300
    assert engine.epochs == ["1"] and len(engine.calls[0]["rid"]) == 32
    (record,) = await world.records()
    assert isinstance(record, CallRecord) and record.temperature == 1.0
    assert record.asked == {"temperature": 0.2, "top_p": 0.5, "top_k": 3.0, "max_tokens": 300.0}


async def test_same_request_twice_in_flight_is_one_call_and_one_record(world: World, engine: Engine) -> None:
    engine.hold = True
    asks = [asyncio.create_task(world.ask(body_of("hi", stream=stream))) for stream in (True, False, True)]
    await engine.until(1)
    await until(lambda: world.flight().clients == 3)
    engine.release.set()
    answers = await asyncio.gather(*asks)
    assert answers[0] == answers[1] == answers[2]
    assert len(engine.calls) == 1 and len(await world.records()) == 1
    assert await world.ask(body_of("hi")) == answers[0]
    assert len(engine.calls) == 1 and len(await world.records()) == 1


async def test_a_client_that_left_gets_its_answer_later(world: World, engine: Engine) -> None:
    engine.hold = True
    ask = asyncio.create_task(world.ask(body_of("hi", stream=True)))
    await engine.until(1)
    ask.cancel()
    await asyncio.wait({ask})
    flight = world.flight()
    await until(lambda: flight.clients == 0)
    engine.release.set()
    await flight.wait()
    records = await world.records()
    assert isinstance(records[0], CallRecord) and not records[0].delivered
    again = await asyncio.gather(world.ask(body_of("hi")), world.ask(body_of("hi", stream=True)))
    assert again[0] == again[1] and len(engine.calls) == 1
    record, delivery = await world.records()
    assert isinstance(delivery, Delivery) and delivery.call == records[0].call
    follow = await world.ask(body_of("hi", again[0]["content"], "more"))
    assert follow["stop_reason"] == "end_turn"
    last = (await world.records())[-1]
    assert isinstance(last, CallRecord) and last.parent == record.call


async def test_after_the_grace_time_exactly_its_generation_is_aborted(make_world: MakeWorld, engine: Engine) -> None:
    world = await make_world(grace_s=0.05)
    engine.hold = True
    ask = asyncio.create_task(world.ask(body_of("hi")))
    await engine.until(1)
    ask.cancel()
    await engine.abort_seen.wait()
    assert engine.aborted == [engine.calls[0]["rid"]]
    engine.hold = False
    assert (await world.ask(body_of("hi")))["stop_reason"] == "end_turn"
    assert len(await world.records()) == 1
    assert engine.calls[1]["rid"] != engine.calls[0]["rid"]


async def test_lost_connection_is_retried_under_a_new_rid(world: World, engine: Engine) -> None:
    engine.script += ["lost", "lost", engine.say("fine")]
    answer = await world.ask(body_of("hi", stream=True))
    assert answer["content"] == [{"type": "text", "text": "fine"}]
    assert len({call["rid"] for call in engine.calls}) == 3
    assert len(await world.records()) == 1


async def test_an_engine_that_fails_again_and_again_is_an_error_before_any_block(
    make_world: MakeWorld, engine: Engine, monkeypatch: Any
) -> None:
    monkeypatch.setattr("services.proxy.calls.FAILED_TRIES", 2)
    world = await make_world()
    engine.script += ["failed"] * 4
    async with world.post(body_of("hi", stream=True)) as response:
        events = parse_events(await response.read())
    assert {event["type"] for event in events[:-1]} <= {"message_start", "ping"}
    assert events[-1]["type"] == "error" and events[-1]["error"]["type"] == "api_error"
    async with world.post(body_of("hi")) as response:
        assert response.status == 503
    assert await world.records() == []


async def test_an_outage_is_one_warning_however_many_calls_it_meets(world: World, engine: Engine) -> None:
    engine.script += ["lost", "gone", "lost", engine.say("fine")]
    engine.script += ["lost", engine.say("again")]
    with structlog.testing.capture_logs() as said:
        await world.ask(body_of("task"))
        await world.ask(body_of("other task"))
    loud = [line["event"] for line in said if line["log_level"] in ("warning", "error")]
    assert loud == ["engine lost", "engine lost"], "one for each outage"
    assert [line["calls_lost"] for line in said if line["event"] == "engine answers again"] == [3, 1]


async def test_stale_epoch_waits_for_the_route_and_goes_on(
    world: World, engine: Engine, tokenizer: ChatTokenizer
) -> None:
    other = await Engine(tokenizer).start()
    other.version = 9
    try:
        await world.join("cell-1", other)
        engine.script += ["stale"] * 100
        ask = asyncio.create_task(world.ask(body_of("hi")))
        await engine.until(2)  # the same route is tried again: the cell may be behind us in the log
        await world.move("cell-0", "cell-1", 4)
        await ask
    finally:
        await other.stop()
    assert other.epochs == ["4"]
    (record,) = await world.records()
    assert isinstance(record, CallRecord)
    assert record.cell == "cell-1" and record.versions[0].version == 9


async def test_an_aborted_answer_is_resumed_and_never_surfaces(world: World, engine: Engine) -> None:
    part = engine.say("one ", finish="abort")
    engine.script += [part, engine.ids([], finish="abort"), engine.say("two")]
    asked = asyncio.create_task(world.ask(body_of("hi")))
    answer = await asked
    assert answer["content"] == [{"type": "text", "text": "one two"}] and answer["stop_reason"] == "end_turn"
    assert engine.calls[1]["input_ids"] == engine.calls[0]["input_ids"] + part["output_ids"]
    assert engine.calls[1]["sampling_params"]["max_new_tokens"] == 300 - len(part["output_ids"])
    (record,) = await world.records()
    assert isinstance(record, CallRecord) and len(record.output_ids) == len(record.logprobs)
    assert [(span.start, span.end) for span in record.versions] == [(0, len(record.output_ids))]


async def test_length_is_max_tokens_and_has_no_end_token(
    world: World, engine: Engine, tokenizer: ChatTokenizer
) -> None:
    engine.script += [engine.say("half a", finish="length"), engine.say("rest")]
    answer = await world.ask(body_of("hi"))
    assert answer["stop_reason"] == "max_tokens"
    await world.ask(body_of("hi", answer["content"], "Output token limit hit. Resume."))
    one, two = await world.records()
    assert isinstance(one, CallRecord) and isinstance(two, CallRecord)
    assert engine.end not in one.output_ids and two.parent == one.call
    assert two.input_ids[0] == engine.end  # the turn is closed as context, never as a target


async def test_wrong_logprobs_are_refused(world: World, engine: Engine) -> None:
    bad = engine.say("x")
    bad["meta_info"]["output_token_logprobs"].pop()
    engine.script.append(bad)
    async with world.post(body_of("hi")) as response:
        assert response.status == 500 and "do not agree" in (await response.json())["error"]["message"]
    assert await world.records() == []


async def test_what_an_engine_aborted_before_its_first_token_leaves_no_span(world: World, engine: Engine) -> None:
    nothing, rest = engine.ids([], finish="abort"), engine.say("rest")
    nothing["meta_info"]["weight_versions"] = [{"version": "6", "start": 0, "end": 0}]
    del nothing["meta_info"]["output_token_logprobs"]
    engine.script += [nothing, rest]
    await world.ask(body_of("hi"))
    (record,) = await world.records()
    assert isinstance(record, CallRecord)
    assert [(span.version, span.start) for span in record.versions] == [(7, 0)]


async def test_weights_without_a_number_are_refused_with_the_remedy(world: World, engine: Engine) -> None:
    """What a server calls them that was not told."""
    bad = engine.say("x")
    bad["meta_info"]["weight_version"] = "default"
    engine.script.append(bad)
    with structlog.testing.capture_logs() as logs:
        async with world.post(body_of("hi")) as response:
            assert response.status == 500 and "'default'" in (await response.json())["error"]["message"]
    assert any("--weight-version N" in entry.get("what", "") for entry in logs)
    assert await world.records() == []


async def test_a_logprob_that_is_no_number_is_refused(world: World, engine: Engine) -> None:
    bad = engine.say("x")
    bad["meta_info"]["output_token_logprobs"][0][0] = None
    engine.script.append(bad)
    async with world.post(body_of("hi")) as response:
        assert response.status == 500 and "not an answer" in (await response.json())["error"]["message"]
    assert await world.records() == []


async def test_overflow_and_clamp(world: World, engine: Engine) -> None:
    async with world.post(body_of("x" * 5000)) as response:
        assert response.status == 400
        message = (await response.json())["error"]["message"]
    assert message.startswith("prompt is too long: ") and message.endswith(" tokens > 4096 maximum")
    await world.ask(body_of("hi", max_tokens=32000))
    assert engine.calls[-1]["sampling_params"]["max_new_tokens"] == 512
    await world.ask(body_of("x" * 3500))
    sent = engine.calls[-1]
    assert sent["sampling_params"]["max_new_tokens"] == min(300, 4096 - len(sent["input_ids"]))
    async with world.post(body_of("x" * 3500), path="/v1/messages/count_tokens") as response:
        assert (await response.json()) == {"input_tokens": len(sent["input_ids"])}


async def test_nothing_but_start_and_pings_before_the_answer(make_world: MakeWorld, engine: Engine) -> None:
    world = await make_world(ping_s=0.02)
    engine.hold = True
    async with world.post(body_of("hi", stream=True)) as response:
        assert response.content_type == "text/event-stream"
        seen = b""
        while seen.count(b"event: ping") < 4:
            seen += await response.content.readany()
        assert {event["type"] for event in parse_events(seen)} == {"message_start", "ping"}
        assert await world.records() == []
        engine.release.set()
        rest = await response.content.read()
    assert len(await world.records()) == 1
    assert parse_events(seen + rest)[-1]["type"] == "message_stop"


async def test_identical_sub_agents_are_separate_branches(world: World, engine: Engine) -> None:
    engine.hold = True
    asks = [asyncio.create_task(world.ask(body_of("find"), agent=agent)) for agent in ("a1", "a2")]
    await engine.until(2)
    engine.release.set()
    await asyncio.gather(*asks)
    one, two = await world.records()
    assert isinstance(one, CallRecord) and isinstance(two, CallRecord)
    assert {one.agent, two.agent} == {"a1", "a2"} and one.role == two.role == "sub-agent"
    assert one.parent is None and two.parent is None and one.prefix != two.prefix


async def test_who_may_ask(world: World, engine: Engine) -> None:
    url = f"{world.url}/v1/messages"
    token = world.headers()["authorization"].removeprefix("Bearer ")
    for headers in ({}, {"authorization": "Bearer nobody"}, {"x-api-key": token[:-1] + "x"}):
        async with world.session.post(url, json=body_of("hi"), headers=headers) as response:
            assert response.status == 401
            error = await response.json()
            assert error["type"] == "error" and error["error"]["type"] == "authentication_error"
    async with world.session.post(url, json=body_of("hi"), headers={"x-api-key": token}) as response:
        assert response.status == 200
    await world.finish()
    await world.event("execution.sealed")
    async with world.session.post(url, json=body_of("hi"), headers={"x-api-key": token}) as response:
        assert response.status == 401
    for path in ("/", "/api/hello"):
        async with world.session.head(world.url + path) as response:
            assert response.status == 200
    async with world.session.post(f"{world.url}/v1/nothing", json={}) as response:
        assert response.status == 404 and (await response.json())["error"]["type"] == "not_found_error"
    async with world.session.get(f"{world.url}/readyz") as response:
        assert response.status == 200


async def test_a_request_before_its_placement_is_seen_waits(world: World, engine: Engine) -> None:
    ask = asyncio.create_task(world.ask(body_of("hi"), execution="e-000001.01"))
    async with world.session.get(f"{world.url}/healthz") as response:
        assert response.status == 200
    await world.place("e-000001.01")
    assert (await ask)["stop_reason"] == "end_turn"


async def test_record_comes_before_the_answer_even_when_its_acknowledgement_is_lost(
    world: World, engine: Engine
) -> None:
    from services.mesh.memory_bus import PublishFate

    assert world.context
    bus: Any = world.context.bus
    fates = [PublishFate.ACK_LOST]
    bus.publish_fate = lambda subject, msg_id: fates.pop() if fates else PublishFate.ANSWERED
    await world.ask(body_of("hi"))
    assert len(await world.records()) == 1


async def test_a_client_that_gave_up_leaves_no_half_record(world: World, engine: Engine) -> None:
    timeout = aiohttp.ClientTimeout(total=0.2)
    engine.hold = True
    try:
        async with world.session.post(
            f"{world.url}/v1/messages", json=body_of("hi"), headers=world.headers(), timeout=timeout
        ) as response:
            await response.read()
    except TimeoutError:
        pass
    await world.finish(EXECUTION)
    await engine.abort_seen.wait()
    sealed = await world.event("execution.sealed")
    assert sealed.data.records == 0 and engine.aborted == [engine.calls[0]["rid"]]


async def test_held_out_executions_sample_at_their_own_temperature(make_world: MakeWorld, engine: Engine) -> None:
    """Also from a proxy that starts again: what is held out is in the log."""
    world = await make_world(eval={"temperature": 0.0})
    name = held_out_id(0, 0)
    dispatched = ExecutionDispatched(group="", member=0, task="t", measurement=measurement_id(0), task_digest="d")
    await world.say("scheduler", "execution.dispatched", name, dispatched)
    await world.place(name)
    await world.ask(body_of("hi"), execution=name)
    await world.kill()
    await world.start()
    await world.ask(body_of("ho"), execution=name)
    await world.ask(body_of("hi"))
    records = [record for record in await world.records() if isinstance(record, CallRecord)]
    assert [(record.execution, record.temperature) for record in records] == [
        (name, 0.0),
        (name, 0.0),
        (EXECUTION, 1.0),
    ]
    assert [call["sampling_params"]["temperature"] for call in engine.calls] == [0.0, 0.0, 1.0]
