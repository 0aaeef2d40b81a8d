"""Several proxies over one run: any of them serves any request, and together they write one sequence of records."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from schemas import streams
from schemas.errors import ConfigError, Conflict
from schemas.ids import execution_id, proxies_for, proxy_ids
from schemas.records import CallRecord, Closed
from services.mesh.memory_bus import MemoryBus
from services.mesh.tree_codec import digest_records
from services.proxy.records import Ledger
from tests.proxy.bodies import body_of, call_text, result_of
from tests.proxy.engines import Engine
from tests.proxy.world import EXECUTION, RUN, World, until


class Pair:
    """Two proxies on one bus: the one whose execution it is, and the other."""

    def __init__(self, own: World, other: World) -> None:
        self.own, self.other = own, other

    async def check_sealed(self, *, seals: int = 1) -> int:
        """One seal, of all records, which are numbered without a gap; nothing can follow. Returns their number."""
        sealed = await self.own.event("execution.sealed")
        assert len(await self.own.events("execution.sealed")) == seals
        stream, scope = streams.records_stream(RUN), streams.records_filter(RUN, EXECUTION, 0)
        end = await self.own.bus.last_seq(stream)
        *stored, _ = [each async for each in self.own.bus.read_range(stream, 0, end, subject_filter=scope)]
        *entries, closed = await self.own.records()
        assert closed == Closed(execution=EXECUTION, attempt=0)
        assert (sealed.data.records, sealed.data.last_record) == (len(stored), stored[-1].seq if stored else 0)
        assert sealed.data.digest == digest_records(each.data for each in stored)
        calls = [entry for entry in entries if isinstance(entry, CallRecord)]
        assert [call.index for call in calls] == list(range(len(calls)))
        late = Ledger(bus=self.own.bus, run=RUN, execution=EXECUTION, attempt=0, writer="late")
        late.last = sealed.data.last_record
        if calls:
            with pytest.raises(Conflict):
                await late.append(calls[-1])
        assert await late.catch_up() == [closed]
        return len(calls)


@pytest.fixture
async def pair(policy: Path, tmp_path: Path, engine: Engine) -> AsyncIterator[Pair]:
    own, other = World(policy, tmp_path, count=2), World(policy, tmp_path, count=2)
    other.broker, other.bus = own.broker, MemoryBus(own.broker, RUN, name="other test")
    own.instance, other.instance = proxies_for(EXECUTION, 2)
    await own.bus.open_run()
    await own.join("cell-0", engine)
    await own.place()
    await own.start()
    await other.start()
    yield Pair(own, other)
    engine.release.set()
    await other.stop()
    await own.stop()


async def test_any_proxy_goes_on_where_another_answered(pair: Pair, engine: Engine) -> None:
    engine.script += [engine.say(call_text("bash", {"command": "ls"})), engine.say("seen"), engine.say("done")]
    first = await pair.own.ask(body_of("task"))
    call = first["content"][0]
    turns = ["task", first["content"], [result_of(call, "out")]]
    second = await pair.other.ask(body_of(*turns))
    assert await pair.own.ask(body_of(*turns)) == second, "it has the other's record"
    third = await pair.own.ask(body_of(*turns, second["content"], "and now"))
    assert await pair.other.ask(body_of(*turns, second["content"], "and now", stream=True)) == third
    records = [record for record in await pair.own.records() if isinstance(record, CallRecord)]
    assert len(engine.calls) == 3 and [record.index for record in records] == [0, 1, 2]
    assert [record.parent for record in records] == [None, records[0].call, records[1].call]
    await pair.own.finish()
    assert await pair.check_sealed() == 3
    for world in (pair.own, pair.other):
        async with world.post(body_of("more")) as response:
            assert response.status == 401


async def test_a_proxy_is_killed_and_the_retry_goes_to_another(pair: Pair, engine: Engine) -> None:
    first = await pair.own.ask(body_of("task"))
    follow = body_of("task", first["content"], "go")
    engine.hold = True
    lost = asyncio.create_task(pair.own.ask(follow))
    await engine.until(2)
    await pair.own.kill()
    await asyncio.gather(lost, return_exceptions=True)
    engine.hold = False
    second = await pair.other.ask(follow)
    engine.release.set()
    await pair.own.start()
    assert await pair.own.ask(follow) == second, "the next life has it from the records"
    one, two = [record for record in await pair.own.records() if isinstance(record, CallRecord)]
    assert two.parent == one.call
    await pair.own.finish()
    assert await pair.check_sealed() == 2


async def test_of_a_request_at_two_proxies_the_first_record_counts(pair: Pair, engine: Engine) -> None:
    engine.hold = True
    engine.script += [engine.say("one"), engine.say("another")]
    asks = [asyncio.create_task(world.ask(body_of("hi"))) for world in (pair.own, pair.other)]
    await engine.until(2)
    engine.release.set()
    answers = await asyncio.gather(*asks)
    assert answers[0] == answers[1]
    assert len(await pair.own.records()) == 1
    await pair.own.finish()
    assert await pair.check_sealed() == 1


async def test_an_answer_nobody_took_is_taken_at_another_proxy(pair: Pair, engine: Engine) -> None:
    engine.hold = True
    ask = asyncio.create_task(pair.own.ask(body_of("hi")))
    await engine.until(1)
    flight = pair.own.flight()
    ask.cancel()
    await until(lambda: flight.clients == 0)
    engine.release.set()
    await flight.wait()
    engine.hold = False
    answer = await pair.other.ask(body_of("hi"))
    await pair.own.ask(body_of("hi", answer["content"], "go"))
    assert len(engine.calls) == 2
    record, _, after = await pair.own.records()
    assert isinstance(record, CallRecord) and isinstance(after, CallRecord) and after.parent == record.call


async def test_finished_ends_calls_at_every_proxy(pair: Pair, engine: Engine) -> None:
    engine.hold = True
    asks = [asyncio.create_task(pair.other.status(body_of(text))) for text in ("a", "b")]
    await engine.until(2)
    await pair.own.finish()
    assert await asyncio.gather(*asks) == [401, 401]
    assert await pair.check_sealed() == 0


async def test_another_proxy_seals_where_the_own_one_is_gone(
    pair: Pair, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.proxy.desk.TAKE_OVER_S", 0.0)
    await pair.own.ask(body_of("hi"))
    await pair.own.kill()
    await pair.own.finish()
    assert await pair.check_sealed() == 1
    await pair.own.start()
    await pair.own.place("e-000001.01")
    await pair.own.ask(body_of("hi"), execution="e-000001.01")
    await pair.other.ask(body_of("ho"), execution="e-000001.01")
    assert len(await pair.own.events("execution.sealed")) == 1


async def test_a_proxy_that_the_run_does_not_have_is_refused(policy: Path, tmp_path: Path) -> None:
    world = World(policy, tmp_path, count=2)
    await world.bus.open_run()
    try:
        with pytest.raises(ConfigError, match="no proxy called 'proxy'"):
            await world.start()
    finally:
        world._task = None
        await world.stop()


def test_whose_an_execution_is_follows_from_its_id() -> None:
    assert proxy_ids(1) == ["proxy"] and proxies_for(EXECUTION, 1) == ["proxy"]
    names = [execution_id(group, member) for group in range(100) for member in range(16)]
    first = [proxies_for(name, 4)[0] for name in names]
    assert first == [proxies_for(name, 4)[0] for name in names]
    assert sorted(proxies_for(names[0], 4)) == proxy_ids(4)
    assert all(300 < first.count(proxy) < 500 for proxy in proxy_ids(4)), "even"
    stays = sum(proxies_for(name, 5)[0] in (old, "proxy-4") for name, old in zip(names, first, strict=True))
    assert stays == len(names), "with one more proxy, nobody goes from one of the old to another"
