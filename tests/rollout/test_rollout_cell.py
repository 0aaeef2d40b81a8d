"""A cell's rollout side: its gate, its changes of role, its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from schemas import events as e
from schemas.errors import EngineError
from services.mesh.bus import Bus
from services.mesh.http import HttpClient
from services.proxy.engine import CallCut, EngineLost, Engines
from services.proxy.routes import Route
from services.rollout.adapter import EngineDied
from services.rollout.service import EPOCH_HEADER
from tests.rollout.stage import Stage, call, running


async def test_leaving_waits_for_the_call_in_flight_and_refuses_new_ones(stage: Stage) -> None:
    async with running(stage):
        url = (await stage.seen("cell.joined")).data.url
        in_flight = asyncio.create_task(call(url, 0))
        await stage.engine.started.wait()
        await stage.decide("train", epoch=1)
        await stage.seen("cell.role-transition", phase="draining")
        for epoch in (0, 1):
            status, answer = await call(url, epoch)
            assert status == 409
            assert answer["error"]["type"] == "stale_epoch"
        assert "release" not in stage.engine.done
        stage.engine.release.set()
        assert await in_flight == (200, {"ok": True})
        await stage.seen("cell.role-transition", phase="released")
        assert stage.engine.done == ["start", "generate", "release"]


async def test_a_call_that_its_proxy_aborts_frees_the_cell_whatever_the_epoch(stage: Stage) -> None:
    async with running(stage):
        url = (await stage.seen("cell.joined")).data.url
        in_flight = asyncio.create_task(call(url, 0))
        await stage.engine.started.wait()
        await stage.decide("train", epoch=1)
        await stage.seen("cell.role-transition", phase="draining")
        async with aiohttp.ClientSession() as http, http.post(f"{url}/abort_request", json={"rid": "r"}) as response:
            assert response.status == 200
        await stage.seen("cell.role-transition", phase="released")
        assert await in_flight == (200, {"ok": True})
        assert stage.engine.aborts == [b'{"rid": "r"}']
        assert stage.engine.done == ["start", "generate", "release"]


async def test_calls_that_do_not_move_in_time_are_aborted_by_the_cell(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.rollout.service.ABORT_AGAIN_S", 0.01)
    stage = Stage(bus, tmp_path, drain_s=0.05)
    stage.engine.deaf = 2  # the abort overtakes the call on its way to the engine
    async with running(stage):
        url = (await stage.seen("cell.joined")).data.url
        in_flight = asyncio.create_task(call(url, 0))
        await stage.engine.started.wait()
        await stage.decide("train", epoch=1)
        drained = await stage.seen("cell.role-transition", phase="drained")
        await stage.seen("cell.role-transition", phase="released")
        assert await in_flight == (200, {"ok": True})
        assert drained.data.seconds >= 0.05
        assert stage.engine.done == ["start", "abort all", "abort all", "abort all", "generate", "release"]


async def test_a_caller_that_is_slow_to_send_holds_nothing_back(stage: Stage) -> None:
    async with running(stage):
        url = (await stage.seen("cell.joined")).data.url
        sending, rest = asyncio.Event(), asyncio.Event()

        async def body() -> AsyncIterator[bytes]:
            yield b"{"
            sending.set()
            await rest.wait()
            yield b"}"

        async with aiohttp.ClientSession() as http:
            slow = asyncio.create_task(
                http.post(f"{url}/generate", data=body(), headers={EPOCH_HEADER: "0"}).__aenter__()
            )
            await sending.wait()
            await stage.decide("train", epoch=1)
            await stage.seen("cell.role-transition", phase="released")
            rest.set()
            assert (await slow).status == 409
        assert stage.engine.done == ["start", "release"]


async def test_a_caller_that_left_leaves_nothing_behind(stage: Stage) -> None:
    async with running(stage):
        url = (await stage.seen("cell.joined")).data.url
        gone = asyncio.create_task(call(url, 0))
        await stage.engine.started.wait()
        await stage.decide("train", epoch=1)
        await stage.seen("cell.role-transition", phase="draining")
        gone.cancel()
        await stage.seen("cell.role-transition", phase="released")
        assert stage.cell.in_flight == 0 and stage.engine.done == ["start", "release"]


async def test_it_returns_with_the_published_version_and_serves_when_completed(stage: Stage) -> None:
    stage.engine.release.set()
    async with running(stage):
        url = (await stage.seen("cell.joined")).data.url
        await stage.decide("train", epoch=1)
        await stage.seen("cell.role-transition", phase="released")
        await stage.expose(2)
        await stage.decide("rollout", epoch=2)
        await stage.decide("rollout", epoch=2, phase="released", owner="trainer")
        acquired = await stage.seen("cell.role-transition", phase="acquired")
        assert acquired.data.version == 2
        assert stage.engine.done == ["start", "release", "resume", "pull 2 there"]
        await stage.decide("rollout", epoch=2, phase="completed")
        await stage.expose(4)
        await stage.seen("weights.published", version=4)
        assert (await call(url, 2))[0] == 200
        assert (await call(url, 1))[0] == 409


async def test_a_cell_restarted_while_it_leaves_finishes_leaving(stage: Stage) -> None:
    await stage.decide("train", epoch=1)
    async with running(stage):
        await stage.seen("cell.role-transition", phase="released")
    assert stage.engine.done == ["start", "release"]


async def test_a_cell_restarted_while_it_returns_finishes_returning(stage: Stage) -> None:
    await stage.decide("train", epoch=1)
    await stage.decide("train", epoch=1, phase="released", owner="rollout")
    await stage.expose(2)
    await stage.decide("rollout", epoch=2)
    await stage.decide("rollout", epoch=2, phase="released", owner="trainer")
    async with running(stage):
        assert (await stage.seen("cell.role-transition", phase="acquired")).data.version == 2
    assert stage.engine.done == ["start", "release", "resume", "pull 2 there"]


@pytest.mark.parametrize(("fails", "kind"), [(EngineDied, "engine_died"), (EngineError, "engine_unreachable")])
async def test_an_engine_that_dies_with_a_call_is_told_apart_from_one_that_is_not_there(
    stage: Stage, fails: type[EngineError], kind: str
) -> None:
    """As the proxy understands it."""
    async with running(stage):
        url = (await stage.seen("cell.joined")).data.url
        stage.engine.fails = fails("gone")
        stage.engine.release.set()
        assert await call(url, 0) == (502, {"error": {"type": kind, "message": "gone"}})
        async with contextlib.aclosing(HttpClient()) as client:
            route = Route(attempt=0, cell="cell-0", epoch=0, url=url)
            with pytest.raises(CallCut if fails is EngineDied else EngineLost) as raised:
                await Engines(client).generate(
                    route, rid="r", input_ids=[b"1"], temperature=1.0, max_new_tokens=1, stop_ids=[]
                )
        assert isinstance(raised.value, CallCut) == (fails is EngineDied)


async def test_the_end_of_the_engine_ends_the_service_with_its_code(stage: Stage) -> None:
    async with running(stage) as task:
        await stage.seen("cell.joined")
        stage.engine.die(9)
        with pytest.raises(EngineError, match="ended with code 9"):
            await task


async def test_a_cell_that_is_put_out_before_any_publication_returns_with_the_starting_policy(stage: Stage) -> None:
    """Its memory was given away and nobody exposes version 0: a fresh engine has it."""
    async with running(stage) as first:
        await stage.seen("cell.joined")
        await stage.decide("train", 1)
        await stage.seen("cell.role-transition", phase="released")
        await stage.decide("train", 1, phase="failed")
        await stage.decide("rollout", 2)
        await stage.decide("rollout", 2, phase="released", owner="trainer")
        with pytest.raises(EngineError, match="no version was published yet"):
            await first
    again = Stage(stage.bus, stage.context.folder)
    async with running(again):
        acquired = await again.seen("cell.role-transition", phase="acquired", target="rollout")
        assert (acquired.data.version, acquired.data.epoch) == (0, 2)


async def test_a_process_that_others_took_for_lost_ends(stage: Stage) -> None:
    async with running(stage) as task:
        process = (await stage.seen("service.joined")).seq
        await stage.seen("cell.joined")
        for service, lost in (("rollout", process - 1), ("trainer", process)):
            other = e.CellLost(service=service, process=lost, reason="test")  # type: ignore[arg-type]
            await stage.say("scheduler", "cell.lost", "cell-0", other)
        await stage.decide("train", 1)
        await stage.seen("cell.role-transition", phase="released")
        mine = e.CellLost(service="rollout", process=process, reason="test")
        await stage.say("scheduler", "cell.lost", "cell-0", mine)
        with pytest.raises(EngineError, match="others took its executions"):
            await task
