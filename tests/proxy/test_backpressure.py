"""Calls for which no engine is ready: they wait as long as the execution's budget lasts, and pings say so."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from schemas import events as e
from schemas.records import CallRecord
from services.proxy.calls import FAILED_TRIES
from services.proxy.desk import Desk
from services.proxy.routes import Routes
from tests.mesh.virtual_clock import VirtualClock
from tests.proxy.bodies import body_of, parse_events
from tests.proxy.conftest import MakeWorld
from tests.proxy.engines import Engine
from tests.proxy.world import EXECUTION, World, until
from tests.replay.recorded import event

OTHER = "e-000001.01"


class Stream:
    """A streamed answer while it comes."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response, self.seen = response, b""

    @property
    def pings(self) -> int:
        return self.seen.count(b"event: ping")

    async def pings_come(self, count: int = 2) -> None:
        """Until so many more have come."""
        wanted = self.pings + count
        while self.pings < wanted:
            self.seen += await self._response.content.readany()

    async def rest(self) -> list[dict[str, Any]]:
        self.seen += await self._response.content.read()
        return parse_events(self.seen)


async def test_a_call_without_an_engine_waits_with_pings(make_world: MakeWorld, engine: Engine) -> None:
    """Its execution is placed on a cell that is not up yet."""
    world: World = await make_world(ping_s=0.01)
    await world.place(OTHER, cell="cell-1")
    async with world.post(body_of("hi", stream=True), execution=OTHER) as response:
        stream = Stream(response)
        await stream.pings_come()
        await world.join("cell-1", engine)
        assert (await stream.rest())[-1]["type"] == "message_stop"
    assert len(engine.calls) == 1 and len(await world.records()) == 1


async def test_a_call_whose_cell_changes_its_role_waits_with_pings(make_world: MakeWorld, engine: Engine) -> None:
    world: World = await make_world(ping_s=0.01)
    engine.script += ["stale"] * 100
    async with world.post(body_of("hi", stream=True)) as response:
        stream = Stream(response)
        await engine.until(1)
        await stream.pings_come()
        engine.script.clear()
        await world.move("cell-0", "cell-0", 2)
        assert (await stream.rest())[-1]["type"] == "message_stop"
    assert engine.epochs[-1] == "2"


async def test_no_pings_while_its_engine_is_dead_until_the_log_says_so(
    make_world: MakeWorld, engine: Engine, monkeypatch: Any
) -> None:
    monkeypatch.setattr("services.proxy.calls.FIRST_PAUSE_S", 60.0)
    monkeypatch.setattr("services.proxy.calls.LONGEST_PAUSE_S", 60.0)
    world: World = await make_world(ping_s=0.01)
    engine.hold = True
    async with world.post(body_of("hi", stream=True)) as response:
        stream = Stream(response)
        await engine.until(1)
        flight = world.flight()
        await stream.pings_come()
        await engine.stop()
        await until(lambda: not flight.alive)
        # Its stream waits in periods of a ping's; what it writes meanwhile is counted where it is written.
        periods, pings, wait, write = 0, 0, flight.wait, web.StreamResponse.write

        async def counted_wait() -> None:
            nonlocal periods
            periods += 1
            await wait()

        async def counted_write(self: web.StreamResponse, data: bytes) -> None:
            nonlocal pings
            pings += b"event: ping" in data
            await write(self, data)

        monkeypatch.setattr(flight, "wait", counted_wait)
        monkeypatch.setattr(web.StreamResponse, "write", counted_write)
        await until(lambda: periods >= 4)
        assert pings == 0 and not flight.alive and flight.clients == 1
        await world.say(
            "scheduler", "cell.lost", "cell-0", e.CellLost(service="rollout", process=1, reason="it is silent")
        )
        await until(lambda: flight.alive)
        await until(lambda: pings >= 2)
        again = Engine(engine.tokenizer)
        try:
            await world.join("cell-1", await again.start())
            await world.move("cell-0", "cell-1", 3)
            assert (await stream.rest())[-1]["type"] == "message_stop"
        finally:
            await again.stop()
    (record,) = await world.records()
    assert isinstance(record, CallRecord) and record.cell == "cell-1"


async def test_it_waits_no_longer_than_the_budget_of_its_execution(make_world: MakeWorld, engine: Engine) -> None:
    world: World = await make_world(budget_s=0.3)
    await world.place(OTHER, cell="cell-1")
    async with world.post(body_of("hi"), execution=OTHER) as response:
        assert response.status == 503
        assert "while its budget lasted" in (await response.json())["error"]["message"]
    engine.script += ["stale"] * 100
    await world.place("e-000001.02")
    async with world.post(body_of("hi"), execution="e-000001.02") as response:
        assert response.status == 503, "a cell that never serves again is no reason to wait longer"


async def test_an_engine_that_is_gone_is_waited_for(make_world: MakeWorld, engine: Engine, monkeypatch: Any) -> None:
    monkeypatch.setattr("services.proxy.calls.LONGEST_WAIT_S", 0.01)
    world: World = await make_world()
    engine.script += ["gone"] * (4 * FAILED_TRIES) + [engine.say("back")]
    assert (await world.ask(body_of("hi")))["content"] == [{"type": "text", "text": "back"}]
    assert len(await world.records()) == 1


async def test_an_engine_that_stays_gone_is_waited_for_within_the_budget(make_world: MakeWorld, engine: Engine) -> None:
    world: World = await make_world(budget_s=0.5)
    await engine.stop()
    async with world.post(body_of("hi")) as response:
        assert response.status == 503
        assert "while its budget lasted" in (await response.json())["error"]["message"]


async def test_a_cell_that_joins_again_is_asked_at_once(
    make_world: MakeWorld, engine: Engine, monkeypatch: Any
) -> None:
    for name in ("FIRST_PAUSE_S", "LONGEST_WAIT_S"):
        monkeypatch.setattr(f"services.proxy.calls.{name}", 600.0)
    world: World = await make_world()
    engine.script += ["lost", engine.say("back")]
    ask = asyncio.create_task(world.ask(body_of("hi")))
    await engine.until(1)
    await until(lambda: not world.flight().alive)
    await world.join("cell-0", engine)
    assert (await ask)["content"] == [{"type": "text", "text": "back"}]


async def test_a_cell_that_joined_while_it_was_asked_is_asked_at_once(
    make_world: MakeWorld, engine: Engine, monkeypatch: Any
) -> None:
    """A call may hear of the loss after LOG told that the cell is there again: a host that was down answers late."""
    for name in ("FIRST_PAUSE_S", "LONGEST_WAIT_S"):
        monkeypatch.setattr(f"services.proxy.calls.{name}", 600.0)
    world: World = await make_world()
    engine.hold = True
    engine.script += [engine.ids([], finish="abort"), engine.say("back")]
    ask = asyncio.create_task(world.ask(body_of("hi")))
    await engine.until(1)
    await world.join("cell-0", engine)
    await until(lambda: world.routes.joins("cell-0") == 2)
    engine.release.set()
    assert (await ask)["content"] == [{"type": "text", "text": "back"}]


@pytest.mark.parametrize("holds", [False, True])
async def test_an_engine_that_was_gone_is_alive_when_it_holds_a_call(
    make_world: MakeWorld, engine: Engine, monkeypatch: Any, holds: bool
) -> None:
    """Only then are there pings: each look for one that is nowhere takes a while, and is no sign of life."""
    monkeypatch.setattr("services.proxy.calls.HOLDS_S", 0.01 if holds else 600.0)
    world: World = await make_world()
    engine.hold = True
    engine.script += ["lost", engine.say("back")]
    ask = asyncio.create_task(world.ask(body_of("hi")))
    await engine.until(2)
    flight = world.flight()
    if holds:
        await until(lambda: flight.alive)
    else:
        assert not flight.alive
    engine.release.set()
    await ask


@pytest.mark.parametrize("says", ["it has another role", "it aborts", "it is full"])
async def test_an_engine_that_was_gone_is_alive_when_it_answers(
    make_world: MakeWorld, engine: Engine, monkeypatch: Any, says: str
) -> None:
    """The call waits for what LOG says next, however long: in a queue, not in silence."""
    monkeypatch.setattr("services.proxy.calls.HOLDS_S", 600.0)
    monkeypatch.setattr("services.proxy.calls.LONGEST_WAIT_S", 0.01)
    world: World = await make_world(ping_s=0.01)
    answers = {"it has another role": "stale", "it aborts": engine.ids([], finish="abort"), "it is full": "full"}
    engine.script += ["lost", *[answers[says]] * 1000]
    async with world.post(body_of("hi", stream=True)) as response:
        stream = Stream(response)
        await engine.until(3)
        assert world.flight().alive
        await stream.pings_come()
        engine.script.clear()
        await world.move("cell-0", "cell-0", 2)
        assert (await stream.rest())[-1]["type"] == "message_stop"


async def test_the_budget_begins_with_the_first_start() -> None:
    """Whatever attempt that was; before it, with the placement."""
    shared: Any = SimpleNamespace(
        run="r",
        bus=None,
        routes=Routes(),
        clock=VirtualClock(),
        config=SimpleNamespace(proxy=_Proxy, eval=None),
        incarnation="",
    )
    desk = Desk(shared, lambda finished, sealed: _never())

    def say(seq: int, kind: str, data: Any, owner: str) -> None:
        desk.apply(event(seq, kind, EXECUTION, data, owner=owner))

    placed = e.ExecutionPlaced(cell="cell-0", epoch=1, attempt=0)
    say(1, "execution.placed", placed, "scheduler")
    at_placement = desk.open[EXECUTION].began_us
    say(2, "execution.started", e.ExecutionStarted(attempt=0), "harness")
    started = desk.open[EXECUTION].began_us
    assert at_placement < started
    say(3, "execution.placed", e.ExecutionPlaced(cell="cell-0", epoch=1, attempt=1), "scheduler")
    say(4, "execution.started", e.ExecutionStarted(attempt=1), "harness")
    assert (desk.open[EXECUTION].attempt, desk.open[EXECUTION].began_us) == (1, started)


class _Proxy:
    temperature = 1.0


async def _never() -> int:
    raise AssertionError("nothing is sealed here")
