"""Lives and a network on an ordinary event loop, and a mesh of all services over one in-memory broker."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from replay.worlds import scenario, wiring
from replay.worlds.faces import forget
from replay.worlds.health import WorldHealth
from replay.worlds.rows import WorldRows
from replay.worlds.world import Scripts, World
from schemas import streams
from schemas.envelope import Event
from schemas.errors import GyreError
from services.mesh.clock import SystemClock
from services.mesh.codec import decode
from services.mesh.memory_broker import MemoryBroker
from services.mesh.memory_bus import MemoryBus
from services.mesh.publisher import Publisher
from tests.mesh.contexts import context_of

RUN = "r-worlds"
TIMEOUT_PACE = 1e-3
_LIFE: ContextVar[PlainLife | None] = ContextVar("life", default=None)


class PlainLife:
    """A life that is a task. Killed, it is cancelled; what it says from then on is nobody's concern."""

    def __init__(self, name: str) -> None:
        self.name, self.dead = name, False
        self.held = self.silent = False
        self.task: asyncio.Task[None] | None = None
        self.error: BaseException | None = None
        self._endings: list[Callable[[], None]] = []

    def begin(self, main: Coroutine[Any, Any, None]) -> None:
        self.at_end(lambda: forget(main))
        self.task = asyncio.create_task(self._run(main), name=self.name)

    def at_end(self, ending: Callable[[], None]) -> None:
        self._endings.append(ending)

    def kill(self) -> None:
        self._end()
        if self.task is not None:
            self.task.cancel()

    async def _run(self, main: Coroutine[Any, Any, None]) -> None:
        _LIFE.set(self)
        try:
            await main
        except asyncio.CancelledError:
            if not self.dead:
                raise
        except Exception as error:
            self.error = error
        self._end()

    def _end(self) -> None:
        if not self.dead:
            self.dead = True
            for ending in self._endings:
                ending()


class PlainNetwork:
    def __init__(self) -> None:
        self._listeners: dict[str, tuple[PlainLife, Mapping[str, Callable[..., Awaitable[Any]]]]] = {}
        self._ports = 20_000

    def listen(self, name: str, handlers: Mapping[str, Callable[..., Awaitable[Any]]], *, port: int = 0) -> str:
        life = _LIFE.get()
        assert life is not None
        if not port:
            self._ports += 1
            port = self._ports
        url = f"http://{name}.test:{port}"
        if url in self._listeners:
            raise OSError(98, "address in use")
        self._listeners[url] = (life, handlers)
        life.at_end(lambda: self._listeners.pop(url, None) and None)
        return url

    def listens(self, url: str) -> bool:
        return url in self._listeners

    async def ask(self, url: str, path: str, *args: Any) -> Any:
        await asyncio.sleep(0)
        if url not in self._listeners:
            raise ConnectionError(f"nobody listens at {url}")
        life, handlers = self._listeners[url]
        cut = asyncio.get_running_loop().create_future()
        life.at_end(lambda: cut.done() or cut.set_result(None))
        answer = asyncio.ensure_future(handlers[path](*args))
        try:
            await asyncio.wait({answer, cut}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise ConnectionError(f"{life.name} died")
            return answer.result()
        finally:
            answer.cancel()
            cut.cancel()


class Mesh:
    """All services of a seed's run. A service that ends is started again."""

    def __init__(self, seed: int, *, pace: float, folder: Path) -> None:
        self.broker = MemoryBroker(SystemClock())
        self.bus = MemoryBus(self.broker, RUN, name="test")
        self.network = PlainNetwork()
        self.world = World(
            seed, network=self.network, life=PlainLife, scripts=Scripts(pace=pace, hangs=0.0, tests_fail=0.0)
        )
        # A scripted hour is shorter than that of the time-outs: the machine may be slow. So nobody may wait for one.
        self.started = scenario.started(seed, pace=TIMEOUT_PACE)
        self.rows = WorldRows()
        self.lives: dict[str, PlainLife] = {}
        self.errors: list[str] = []
        self._folder = folder
        self._numbers: dict[str, int] = {}
        self._supervisors: list[asyncio.Task[None]] = []
        self._killed: set[PlainLife] = set()

    async def run(self) -> list[Event]:
        """To `run.finished` and its end; the log."""
        await self.begin()
        await self.until("run.finished")
        return await self.end()

    async def begin(self) -> None:
        await self.bus.open_run()
        operator = Publisher(bus=self.bus, clock=SystemClock(), run=RUN, owner="operator", instance="test")
        await operator.say("run.started", RUN, self.started, id=f"{RUN}.started")
        names = [(service, "") for service in (*wiring.WORKERS, "proxy")]
        cells = range(self.started.config.cells.count)
        names += [(service, f"cell-{index}") for service in ("rollout", "trainer") for index in cells]
        self._supervisors = [asyncio.create_task(self._supervise(service, cell)) for service, cell in names]

    async def end(self) -> list[Event]:
        for supervisor in self._supervisors:
            supervisor.cancel()
        await asyncio.gather(*self._supervisors, return_exceptions=True)
        for group in list(self.world.machine.groups.values()):
            group.kill(-9)
        return await self.log()

    async def until(self, kind: str, count: int = 1) -> Event:
        async with self.bus.read(streams.log_stream(RUN), 0) as reader:
            async for stored in reader:
                event = decode(stored)
                if event.kind == kind:
                    count -= 1
                    if count == 0:
                        return event
        raise AssertionError("the log ended")

    async def log(self) -> list[Event]:
        end = await self.bus.last_seq(streams.log_stream(RUN))
        return [decode(stored) async for stored in self.bus.read_range(streams.log_stream(RUN), 0, end)]

    def kill(self, instance: str) -> None:
        life = self.lives[instance]
        self._killed.add(life)
        life.kill()

    async def _supervise(self, service: str, cell: str) -> None:
        instance = f"{service}-{cell}" if cell else service
        while True:
            number = self._numbers[instance] = self._numbers.get(instance, -1) + 1
            life = self.lives[instance] = PlainLife(instance)
            bus = MemoryBus(self.broker, RUN, name=instance)
            context = context_of(
                service,
                bus,
                self._folder,
                started=self.started,
                secret=b"secret",
                cell=cell,
                health=WorldHealth(self.network, instance),
                pid=number + 1,
            )
            life.begin(wiring.serve(self.world, context, life, number=number, rows=self.rows))
            assert life.task is not None
            try:
                await life.task
            except asyncio.CancelledError:
                life.kill()
                with contextlib.suppress(asyncio.CancelledError):
                    await life.task
                raise
            finally:
                await bus.close()
            if life not in self._killed:
                what = life.error.what if isinstance(life.error, GyreError) else repr(life.error)
                self.errors.append(f"{instance}: {what}")
