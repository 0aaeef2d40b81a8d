"""The end of an execution, and a proxy that starts again."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest

from schemas import streams
from schemas.events import ExecutionSealed
from schemas.records import CallRecord, Closed, Delivery
from services.mesh.memory_bus import MemoryBus, PublishFate
from services.mesh.nats_bus import connect
from services.mesh.server import NatsServer
from services.mesh.tree_codec import decode_record, digest_records
from services.proxy.records import Ledger
from tests.proxy.bodies import body_of, call_text, result_of
from tests.proxy.engines import Engine
from tests.proxy.world import EXECUTION, RUN, World, until


async def check_seal(world: World, sealed: ExecutionSealed, execution: str = EXECUTION, attempt: int = 0) -> None:
    """Count, last sequence and digest are those of the stream."""
    stream = streams.records_stream(RUN)
    end = await world.bus.last_seq(stream)
    scope = streams.records_filter(RUN, execution, attempt)
    stored = [entry async for entry in world.bus.read_range(stream, 0, end, subject_filter=scope)]
    if stored and isinstance(decode_record(stored[-1].data), Closed):
        stored.pop()
    assert (sealed.attempt, sealed.records) == (attempt, len(stored))
    assert sealed.last_record == (stored[-1].seq if stored else 0)
    assert sealed.digest == digest_records(entry.data for entry in stored)


async def test_seal_aborts_what_is_generated_and_counts_what_is_stored(world: World, engine: Engine) -> None:
    await world.place("e-000001.01")
    await world.ask(body_of("hi"))
    await world.ask(body_of("other"), execution="e-000001.01")
    await world.ask(body_of("hi", "ok", "go"))
    engine.hold = True
    late = asyncio.create_task(world.status(body_of("late")))
    streamed = asyncio.create_task(world.ask(body_of("stream", stream=True)))
    await engine.until(5)
    await world.finish()
    sealed = await world.event("execution.sealed")
    await check_seal(world, sealed.data)
    assert sealed.data.records == 2 and sealed.entity == EXECUTION
    assert sorted(engine.aborted) == sorted(call["rid"] for call in engine.calls[3:])
    assert await late == 401
    assert isinstance((await asyncio.gather(streamed, return_exceptions=True))[0], AssertionError)
    engine.release.set()
    await world.finish("e-000001.01")
    other = await world.event("execution.sealed", after=sealed.seq)
    await check_seal(world, other.data, "e-000001.01")


@pytest.mark.parametrize("earlier", [False, True])
async def test_what_nobody_waits_for_any_more_is_not_stored_after_the_seal(world: World, earlier: bool) -> None:
    """An entry whose outcome stayed unknown may still be on its way, be it that of an earlier life."""
    bus = MemoryBus(world.broker, RUN, name="late")
    ledger = Ledger(bus=bus, run=RUN, execution=EXECUTION, attempt=0, writer="proxy")
    bus.publish_fate = lambda subject, msg_id: PublishFate.LATE
    append = asyncio.create_task(ledger.append(Delivery(call="c-000001.00.0.0", execution=EXECUTION, attempt=0)))
    await until(lambda: bool(bus._late))
    append.cancel()
    await asyncio.wait({append})
    bus.publish_fate = lambda subject, msg_id: PublishFate.ANSWERED
    if earlier:
        await world.kill()
        await world.start()
        await world.finish()
        sealed = (await world.event("execution.sealed")).data
    else:
        sealed = await ledger.sealed(fenced=ledger.doubtful)
    assert bus.release_late() == 0 and sealed.records == 0
    await check_seal(world, sealed)
    await bus.close()


async def test_seal_of_an_execution_that_never_called(world: World, engine: Engine) -> None:
    await world.finish("e-000009.00")  # not even placed
    first = await world.event("execution.sealed")
    assert (first.entity, first.data.records, first.data.last_record) == ("e-000009.00", 0, 0)
    await world.finish()
    second = await world.event("execution.sealed", after=first.seq)
    await check_seal(world, second.data)


async def test_a_restarted_proxy_knows_every_turn(world: World, engine: Engine) -> None:
    engine.script += [engine.say(call_text("bash", {"command": "ls"})), engine.say("stored")]
    url = world.url
    first = await world.ask(body_of("task", stream=True))
    follow = body_of("task", first["content"], [result_of(first["content"][0], "out")])
    second = await world.ask(follow)
    await world.kill()
    await world.start()
    assert world.url == url  # harnesses know this address
    assert await world.ask(follow) == second and len(engine.calls) == 2
    await world.ask({**follow, "messages": [*follow["messages"], body_of("", "stored")["messages"][1], _user("go")]})
    records = [record for record in await world.records() if isinstance(record, CallRecord)]
    assert [record.index for record in records] == [0, 1, 2]
    assert records[2].parent == records[1].call
    path = [token for record in records for token in record.input_ids + record.output_ids]
    assert engine.calls[2]["input_ids"] == path[: -len(records[2].output_ids)]
    await world.finish()
    await check_seal(world, (await world.event("execution.sealed")).data)


async def test_finished_while_the_proxy_was_dead_is_sealed_once(world: World, engine: Engine) -> None:
    await world.ask(body_of("hi"))
    await world.kill()
    await world.finish()
    await world.start()
    sealed = await world.event("execution.sealed")
    await check_seal(world, sealed.data)
    await world.kill()
    await world.start()
    await world.finish("e-000002.00")
    await world.event("execution.sealed", after=sealed.seq)
    assert [event.entity for event in await world.events("execution.sealed")] == [EXECUTION, "e-000002.00"]


async def test_an_undelivered_answer_is_taken_after_a_restart(world: World, engine: Engine) -> None:
    engine.hold = True
    ask = asyncio.create_task(world.ask(body_of("hi")))
    await engine.until(1)
    flight = world.flight()
    ask.cancel()
    await until(lambda: flight.clients == 0)
    engine.release.set()
    await flight.wait()
    await world.kill()
    await world.start()
    await world.ask(body_of("hi"))
    record, delivery = await world.records()
    assert isinstance(record, CallRecord) and not record.delivered
    assert delivery == Delivery(call=record.call, execution=EXECUTION, attempt=0)
    assert len(engine.calls) == 1
    await world.finish()
    await check_seal(world, (await world.event("execution.sealed")).data)


@pytest.mark.parametrize("stream", [False, True])
async def test_who_comes_while_an_answer_is_stored_for_nobody_has_it(world: World, engine: Engine, stream: bool) -> None:
    assert world.context and isinstance(world.context.bus, MemoryBus)
    engine.hold = True
    engine.script.append(engine.say("same words"))
    ask = asyncio.create_task(world.ask(body_of("hi")))
    await engine.until(1)
    flight = world.flight()
    ask.cancel()
    await until(lambda: flight.clients == 0)
    world.context.bus.disconnect()
    engine.release.set()
    await until(lambda: "storing" in repr(flight))
    again = asyncio.create_task(world.ask(body_of("hi", stream=stream)))
    await until(lambda: flight.clients == 1)
    world.context.bus.reconnect()
    await again
    record, delivery = await world.records()
    assert isinstance(record, CallRecord) and not record.delivered
    assert delivery == Delivery(call=record.call, execution=EXECUTION, attempt=0)
    await world.ask(body_of("hi", "same words", "next"))
    *_, child = await world.records()
    assert isinstance(child, CallRecord) and child.parent == record.call


async def test_an_undelivered_answer_is_on_nobodys_path(world: World, engine: Engine) -> None:
    engine.hold = True
    engine.script.append(engine.say("same words"))
    ask = asyncio.create_task(world.ask(body_of("hi")))
    await engine.until(1)
    flight = world.flight()
    ask.cancel()
    await until(lambda: flight.clients == 0)
    engine.release.set()
    await flight.wait()
    await world.ask(body_of("hi", "same words", "next"))
    _, other = await world.records()
    assert isinstance(other, CallRecord) and other.parent is None


async def test_a_new_attempt_has_a_tree_and_a_token_of_its_own(world: World, engine: Engine) -> None:
    await world.ask(body_of("hi"))
    engine.hold = True
    late = asyncio.create_task(world.status(body_of("late")))
    await engine.until(2)
    await world.place(attempt=1)
    await engine.abort_seen.wait()
    assert await late == 401
    engine.hold = False
    async with world.post(body_of("hi")) as response:
        assert response.status == 401
    await world.ask(body_of("hi"), attempt=1)
    await world.finish(attempt=0)  # too late: it was lost, and nothing follows from it
    await world.ask(body_of("hi", "ok", "go"), attempt=1)
    await world.kill()
    await world.start()
    await world.finish(attempt=1)
    sealed = await world.event("execution.sealed")
    assert sealed.data.records == 2
    await check_seal(world, sealed.data, attempt=1)
    assert len(await world.events("execution.sealed")) == 1


async def test_records_of_a_proxy_that_died_late_are_taken_in(world: World, engine: Engine) -> None:
    """Its last publish arrived after we had read: the number is taken, ours gets the next."""
    await world.ask(body_of("hi"))
    (stored,) = await world.records()
    assert isinstance(stored, CallRecord)
    strange = msgspec.structs.replace(stored, call=stored.call[:-1] + "1", index=1, request="00")
    gone = Ledger(bus=world.bus, run=RUN, execution=EXECUTION, attempt=0, writer="gone")
    await gone.catch_up()
    await gone.append(strange)
    await world.ask(body_of("more"))
    assert [record.index for record in await world.records() if isinstance(record, CallRecord)] == [0, 1, 2]
    await world.finish()
    await check_seal(world, (await world.event("execution.sealed")).data)


_runs = itertools.count()


async def test_on_a_real_server(
    policy: Path, tmp_path: Path, engine: Engine, nats_server: NatsServer, monkeypatch: Any
) -> None:
    """The same over JetStream: a call, a restart, a repetition, a seal."""
    run = f"r-proxy-real-{next(_runs)}"
    monkeypatch.setattr("tests.proxy.world.RUN", run)
    world = World(policy, tmp_path)
    connections = []

    async def bus(name: str) -> Any:
        connections.append(await connect(nats_server.url, run, name=name))
        return connections[-1]

    world.bus = await bus("test")
    await world.bus.open_run()
    await world.join("cell-0", engine)
    await world.place()
    try:
        await world.start(await bus("proxy"))
        first = await world.ask(body_of("hi", stream=True))
        await world.kill()
        await world.start(await bus("proxy"))
        assert await world.ask(body_of("hi")) == first and len(engine.calls) == 1
        await world.ask(body_of("hi", first["content"], "go"))
        await world.finish()
        sealed = await world.event("execution.sealed")
        assert sealed.data.records == 2
        stream = streams.records_stream(run)
        stored = [s.data async for s in world.bus.read_range(stream, 0, sealed.data.last_record)]
        assert sealed.data.digest == digest_records(stored)
    finally:
        await world.stop()
        for connection in connections:
            await connection.close()


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}
