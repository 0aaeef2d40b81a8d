"""A run in which one worker service lives and the test speaks for all the others. Waiting is for events, never for time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from schemas import streams
from schemas.config import Config
from schemas.config_file import from_tree
from schemas.envelope import Event
from schemas.events import RunStarted
from schemas.units import Value
from services.mesh.bus import Bus
from services.mesh.clock import Clock, SystemClock
from services.mesh.codec import decode
from services.mesh.memory_broker import MemoryBroker
from services.mesh.memory_bus import MemoryBus
from services.mesh.publisher import Publisher
from services.mesh.service import Context
from services.mesh.tasks import list_tasks, task_refs
from tests.mesh.contexts import context_of

SECRET = b"s" * 32
FULL_REWARD = 'echo 1 > "$VERIFIER_LOGS/reward.txt"\n'


def make_task(folder: Path, *, tests: str = FULL_REWARD, toml: str = "") -> Path:
    """A task whose workspace begins with `in.txt`."""
    (folder / "environment").mkdir(parents=True)
    (folder / "tests").mkdir()
    (folder / "task.toml").write_text(toml)
    (folder / "instruction.md").write_text("Copy in.txt to out.txt.\n")
    (folder / "environment" / "in.txt").write_text("ada\n")
    (folder / "environment" / "Dockerfile").write_text("FROM scratch\n")
    (folder / "tests" / "test.sh").write_text(tests)
    return folder


class World:
    """One run on a bus. `folder` is the run's, `folder / "tasks"` holds the tasks and `folder / "held-out"` held-out ones."""

    def __init__(self, bus: Bus, folder: Path, settings: dict[str, Any], *, clock: Clock | None = None) -> None:
        self.bus, self.folder, self.clock = bus, folder, clock or SystemClock()
        tree = {
            "name": "test",
            "steps": 3,
            "tasks": {"path": str(folder / "tasks")},
            "harness": {"command": ["true"]},
            **settings,
        }
        tree["eval"] = {"path": str(folder / "held-out")}
        self.config: Config = from_tree(tree, where="test")
        self.tasks = task_refs(list_tasks(folder / "tasks"))
        self.held_out = task_refs(list_tasks(folder / "held-out")) if (folder / "held-out").exists() else []
        self.started = RunStarted(seed=0, config=self.config, tasks=self.tasks, held_out=self.held_out, code="test")
        self._ids = itertools.count(1)

    async def begin(self) -> None:
        await self.bus.open_run()
        (self.folder / "secret").write_bytes(SECRET)
        await self.say("operator", "run.started", self.bus.run, self.started)

    async def say(self, owner: str, kind: str, entity: str, data: Value, *, id: str = "") -> int:
        """Publish an event of another service."""
        publisher = Publisher(bus=self.bus, clock=self.clock, run=self.bus.run, owner=owner, instance=owner)
        return await publisher.say(kind, entity, data, id=id or f"{owner}.{next(self._ids)}")

    def context(self, service: str, *, bus: Bus | None = None, instance: str = "") -> Context:
        return context_of(
            service,
            bus or self.bus,
            self.folder,
            started=self.started,
            clock=self.clock,
            secret=SECRET,
            instance=instance,
        )

    async def wait(self, kind: str, entity: str = "", *, attempt: int = -1) -> Event:
        """The first event of a kind (about an entity, of an attempt), from the beginning of LOG."""
        async for stored in self.bus.read(streams.log_stream(self.bus.run), 0):
            event = decode(stored)
            if (
                event.kind == kind
                and entity in ("", event.entity)
                and attempt in (-1, getattr(event.data, "attempt", -1))
            ):
                return event
        raise AssertionError("the log ended")

    async def events(self, *kinds: str) -> list[Event]:
        """Events of these kinds that LOG holds now, in order."""
        log = streams.log_stream(self.bus.run)
        stored = self.bus.read_range(log, 0, await self.bus.last_seq(log))
        return [event for event in [decode(one) async for one in stored] if event.kind in kinds]


@asynccontextmanager
async def serving(serve: Callable[[Context], Awaitable[None]], context: Context) -> AsyncIterator[asyncio.Task[None]]:
    """The service in this process, as `run_service` holds it, without its signals."""
    task = asyncio.ensure_future(serve(context))
    try:
        yield task
    finally:
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            pass
        finally:
            await context.health.stop()


def memory_world(folder: Path, settings: dict[str, Any], *, clock: Clock | None = None) -> World:
    """A world on a memory bus; the tasks are made before."""
    clock = clock or SystemClock()
    return World(MemoryBus(MemoryBroker(clock), "r-1", name="test"), folder, settings, clock=clock)
