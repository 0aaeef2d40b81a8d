"""A cell's rollout side on a stage: a memory bus, a scripted engine, and what others say to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from schemas import events as e
from schemas import streams
from schemas.config_file import from_tree
from schemas.envelope import Event
from schemas.errors import EngineError
from schemas.events import RunStarted
from services.mesh.bus import Bus
from services.mesh.clock import SystemClock
from services.mesh.codec import decode
from services.mesh.publisher import Publisher
from services.rollout.service import EPOCH_HEADER, RolloutCell
from tests.mesh.contexts import context_of

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
        self.fails: EngineError | None = None
        """Why a call gets no answer."""
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
        if self.fails is not None:
            raise self.fails
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
        started = RunStarted(seed=0, config=from_tree(tree, where="test"), tasks=[], code="test")
        self.bus, self.clock = bus, SystemClock()
        self.context = context_of("rollout", bus, tmp, started=started, clock=self.clock, cell="cell-0")
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
