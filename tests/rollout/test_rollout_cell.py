"""A cell's rollout side with a scripted engine: its gate, its changes of role, its weights."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from schemas import events as e
from schemas import streams
from schemas.config_file import from_tree
from schemas.envelope import Event
from schemas.errors import EngineError
from schemas.events import RunStarted
from services.mesh.bus import Bus
from services.mesh.clock import SystemClock
from services.mesh.codec import decode
from services.mesh.memory_broker import MemoryBroker
from services.mesh.memory_bus import MemoryBus
from services.mesh.publisher import Publisher
from services.mesh.service import Context
from services.rollout.service import EPOCH_HEADER, RolloutCell

RUN = "r-rollout"


class ScriptedEngine:
    """Answers when `release` is set or, unless it is `deaf`, when all calls are aborted; remembers what was asked of
    it, in order."""

    engine = "scripted"

    def __init__(self) -> None:
        self.capabilities = ["abort"]
        self.done: list[str] = []
        self.started = asyncio.Event()
        self.release = asyncio.Event()
        self.deaf = 0
        self.aborts: list[bytes] = []
        self.gone: set[str] = set()
        """Addresses that nobody serves any more."""
        self.tried = asyncio.Event()
        """One of them was asked for."""
        self.pulling, self.let = asyncio.Event(), asyncio.Event()
        """Weights are on their way; they arrive. Set from the beginning, so that they always do."""
        self.let.set()
        self._dead: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        self.done.append("start")

    async def stop(self) -> None:
        self.done.append("stop")

    async def died(self) -> int:
        return await asyncio.shield(self._dead)

    def die(self, code: int) -> None:
        self._dead.set_result(code)

    async def generate(self, body: bytes) -> tuple[int, bytes]:
        self.started.set()
        await self.release.wait()
        self.done.append("generate")
        return 200, b'{"ok": true}'

    async def abort(self, body: bytes) -> tuple[int, bytes]:
        self.aborts.append(body)
        self.release.set()
        return 200, b""

    async def abort_all(self) -> None:
        self.done.append("abort all")
        if self.deaf:
            self.deaf -= 1
        else:
            self.release.set()

    async def pull_weights(self, address: dict[str, Any], version: int) -> None:
        if address["at"] in self.gone:
            self.tried.set()
            raise EngineError("nobody is there", where=address["at"])
        self.pulling.set()
        await self.let.wait()
        self.done.append(f"pull {version} {address['at']}")

    async def release_memory(self) -> None:
        self.done.append("release")

    async def resume_memory(self) -> None:
        self.done.append("resume")


class Stage:
    def __init__(self, bus: Bus, tmp: Path, **rollout: Any) -> None:
        tree = {"name": "t", "harness": {"command": ["true"]}, "steps": 3, "rollout": rollout}
        config = from_tree(tree, where="test")
        self.bus, self.clock = bus, SystemClock()
        self.context = Context(
            bus=bus,
            clock=self.clock,
            started=RunStarted(seed=0, config=config, tasks=[], code="test"),
            run=RUN,
            service="rollout",
            instance="rollout-cell-0",
            folder=tmp,
            cache=tmp,
            here=tmp,
            secret=b"s",
            cell="cell-0",
        )
        self.engine = ScriptedEngine()
        self.cell = RolloutCell(self.context, self.engine)
        self._said = 0

    async def say(self, owner: str, kind: str, entity: str, data: Any) -> int:
        self._said += 1
        publisher = Publisher(bus=self.bus, clock=self.clock, run=RUN, owner=owner, instance=owner)
        return await publisher.say(kind, entity, data, id=f"{owner}.{kind}.{self._said}")

    async def decide(self, target: str, epoch: int, phase: str = "decided", owner: str = "scheduler") -> None:
        source = "rollout" if target == "train" else "train"
        data = e.CellRoleTransition(phase=phase, source=source, target=target, epoch=epoch)  # type: ignore[arg-type]
        await self.say(owner, "cell.role-transition", "cell-0", data)

    async def expose(self, version: int, at: str = "there") -> int:
        data = e.WeightsExposed(version=version, purpose="publish", address={"at": at, "kind": "test"}, bytes=4)
        return await self.say("trainer", "weights.exposed", "cell-0", data)

    async def seen(self, kind: str, count: int = 1, **wanted: Any) -> Event:
        """The `count`-th event of a kind with these values, as soon as it is in the log."""
        async with self.bus.read(streams.log_stream(RUN), 0) as reader:
            async for stored in reader:
                event = decode(stored)
                if event.kind == kind and all(getattr(event.data, key) == value for key, value in wanted.items()):
                    count -= 1
                    if count == 0:
                        return event
        raise AssertionError("the log ended")


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    bus = MemoryBus(MemoryBroker(SystemClock()), RUN, name="test")
    await bus.open_run()
    yield bus
    await bus.close()


@pytest.fixture
async def stage(bus: Bus, tmp_path: Path) -> Stage:
    return Stage(bus, tmp_path, drain_s=60.0)


@contextlib.asynccontextmanager
async def running(stage: Stage) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(stage.cell.run())
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, EngineError):
            await task
        await stage.context.health.stop()


async def call(url: str, epoch: int) -> tuple[int, dict[str, Any]]:
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{url}/generate", data=b"{}", headers={EPOCH_HEADER: str(epoch)}) as response,
    ):
        return response.status, await response.json()


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


async def test_every_publication_is_pulled_once_and_a_repeated_exposure_is_not(stage: Stage) -> None:
    async with running(stage):
        await stage.seen("cell.joined")
        await stage.expose(2)
        await stage.seen("weights.published", version=2)
        await stage.expose(2, at="elsewhere")
        await stage.expose(4)
        await stage.seen("weights.published", version=4)
    assert stage.engine.done == ["start", "pull 2 there", "pull 4 there"]


async def test_a_restarted_cell_joins_with_the_current_weights(stage: Stage) -> None:
    await stage.expose(2, at="old")
    await stage.expose(2, at="new")
    async with running(stage):
        joined = await stage.seen("cell.joined")
    assert joined.data.version == 2
    assert stage.engine.done == ["start", "pull 2 new"]


async def test_a_restarted_cell_waits_until_the_published_weights_are_exposed_again(stage: Stage) -> None:
    """Whoever exposed them is gone: it serves nobody and does not end, and joins with the next exposure."""
    stage.engine.gone = {"old"}
    stage.engine.release.set()
    await stage.expose(2, at="old")
    async with running(stage):
        url = (await stage.seen("service.joined")).data.url
        await stage.engine.tried.wait()
        assert (await call(url, 0))[0] == 409
        await stage.expose(2, at="new")
        assert (await stage.seen("cell.joined")).data.version == 2
        assert (await call(url, 0))[0] == 200
    assert stage.engine.done == ["start", "pull 2 new", "generate"]


async def test_a_cell_that_returns_waits_for_an_exposure_that_can_be_pulled(stage: Stage) -> None:
    stage.engine.gone = {"old"}
    async with running(stage):
        await stage.seen("cell.joined")
        await stage.decide("train", epoch=1)
        await stage.seen("cell.role-transition", phase="released")
        await stage.expose(2, at="old")
        await stage.decide("rollout", epoch=2)
        await stage.decide("rollout", epoch=2, phase="released", owner="trainer")
        await stage.engine.tried.wait()
        await stage.expose(2, at="new")
        assert (await stage.seen("cell.role-transition", phase="acquired", source="train")).data.version == 2
    assert stage.engine.done == ["start", "release", "resume", "pull 2 new"]


async def test_what_is_published_while_a_cell_returns_is_pulled_before_it_says_so(stage: Stage) -> None:
    async with running(stage):
        await stage.seen("cell.joined")
        await stage.decide("train", epoch=1)
        await stage.seen("cell.role-transition", phase="released")
        await stage.expose(2)
        stage.engine.let.clear()
        await stage.decide("rollout", epoch=2)
        await stage.decide("rollout", epoch=2, phase="released", owner="trainer")
        await stage.engine.pulling.wait()
        await stage.cell._until_folded(await stage.expose(4))
        stage.engine.let.set()
        assert (await stage.seen("cell.role-transition", phase="acquired", source="train")).data.version == 4
    assert stage.engine.done == ["start", "release", "resume", "pull 2 there", "pull 4 there"]


async def test_an_exposure_that_was_out_of_reach_for_a_moment_is_tried_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.rollout.service.PULL_AGAIN_S", 0.01)
    async with running(stage):
        await stage.seen("cell.joined")
        stage.engine.gone = {"there"}
        await stage.expose(2)
        await stage.engine.tried.wait()
        stage.engine.gone = set()
        await stage.seen("weights.published", version=2)
    assert stage.engine.done == ["start", "pull 2 there"]


async def test_weights_that_stay_out_of_reach_end_the_service(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.rollout.service.PULL_AGAIN_S", 0.01)
    monkeypatch.setattr("services.rollout.service.EXPOSED_S", 0.05)
    stage.engine.gone = {"old"}
    await stage.expose(2, at="old")
    async with running(stage) as task:
        with pytest.raises(EngineError, match="nobody is there"):
            await task


async def test_weights_that_nobody_exposes_after_the_run_end_nothing(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is finished while the cell waits for them: it waits no more, and lives on."""
    monkeypatch.setattr("services.rollout.service.EXPOSED_S", 0.0)
    monkeypatch.setattr("services.rollout.service.PULL_AGAIN_S", 60.0)
    stage.engine.gone = {"old"}
    await stage.expose(2, at="old")
    async with running(stage) as task:
        await stage.engine.tried.wait()
        seq = await stage.say("scheduler", "run.finished", RUN, e.RunFinished(steps=3, reason="steps_done"))
        await stage.cell._until_folded(seq)
        assert stage.context.health.ready() == ""
        assert not task.done()
    assert stage.engine.done == ["start"]


async def test_a_cell_that_starts_after_the_run_joins_and_starts_no_engine(stage: Stage) -> None:
    await stage.expose(2)
    await stage.say("scheduler", "run.finished", RUN, e.RunFinished(steps=3, reason="steps_done"))
    async with running(stage) as task:
        await stage.seen("service.joined")
        assert stage.context.health.ready() == ""
        assert not task.done()
    assert stage.engine.done == []


async def test_a_cell_that_cannot_pull_still_leaves_for_training(stage: Stage) -> None:
    stage.engine.gone = {"old"}
    await stage.expose(2, at="old")
    async with running(stage):
        await stage.engine.tried.wait()
        await stage.decide("train", epoch=1)
        await stage.seen("cell.role-transition", phase="released")
    assert stage.engine.done == ["start", "release"]


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
