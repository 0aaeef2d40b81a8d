"""A proxy on an in-memory bus, and whoever else would speak in its log: the test."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

from schemas import streams
from schemas.config import Config
from schemas.config_file import from_tree
from schemas.envelope import Event
from schemas.events import CellJoined, ExecutionFinished, ExecutionPlaced, RouteMoved, RunStarted
from schemas.records import RecordEntry
from schemas.units import Value
from services.mesh import codec
from services.mesh.bus import Bus
from services.mesh.clock import SystemClock
from services.mesh.memory_broker import MemoryBroker
from services.mesh.memory_bus import MemoryBus
from services.mesh.service import Context
from services.mesh.tokens import make_token
from services.mesh.tree_codec import decode_record
from services.proxy.calls import Flight
from services.proxy.routes import Routes
from services.proxy.service import DESK, serve
from tests.proxy.bodies import assemble, parse_events
from tests.proxy.engines import Engine

RUN, EXECUTION, SECRET = "r-proxy", "e-000001.00", b"k" * 32


def configured(
    policy: Path,
    *,
    eval: dict[str, Any] | None = None,
    context_length: int = 4096,
    budget_s: float = 900.0,
    **proxy: Any,
) -> Config:
    tree = {
        "name": "proxy",
        "steps": 21,
        "harness": {"command": ["true"], "timeout_s": min(budget_s, 600.0), "overall_timeout_s": budget_s},
        "policy": {"path": str(policy)},
        "eval": eval or {},
        "proxy": {"grace_s": 30.0, "max_new_tokens": 512, "most_losses": 3, **proxy},
        "rollout": {"context_length": context_length, "kv_tokens": max(context_length, 65536)},
    }
    return from_tree(tree, where="test")


async def until(true: Callable[[], bool]) -> None:
    """Lets the loop run until something that has no event of its own has happened."""
    async with asyncio.timeout(5):
        while not true():
            await asyncio.sleep(0)


class World:
    """A run with one proxy, of which a test can kill and start another on the same bus."""

    def __init__(self, policy: Path, folder: Path, **proxy: Any) -> None:
        self.config = configured(policy, **proxy)
        self.broker, self.clock, self.folder = MemoryBroker(SystemClock()), SystemClock(), folder
        self.bus: Bus = MemoryBus(self.broker, RUN, name="test")
        self.context: Context | None = None
        self.instance = "proxy"
        self._task: asyncio.Task[None] | None = None
        self._said = 0
        self.session = aiohttp.ClientSession()

    async def start(self, bus: Bus | None = None) -> None:
        context = Context(
            bus=bus or MemoryBus(self.broker, RUN, name="proxy"),
            clock=self.clock,
            started=RunStarted(seed=0, config=self.config, tasks=[], code="test"),
            run=RUN,
            service="proxy",
            instance=self.instance,
            folder=self.folder,
            cache=self.folder,
            here=self.folder,
            secret=SECRET,
        )
        self.context = context
        before = await self.bus.last_seq(streams.log_stream(RUN))
        self._task = asyncio.create_task(serve(context))
        joined = asyncio.create_task(self.event("service.joined", after=before))
        await asyncio.wait({self._task, joined}, return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            joined.cancel()
            self._task.result()

    async def kill(self) -> None:
        """The process is gone: nothing is said, nothing is aborted, connections break."""
        assert self._task and self.context
        await self.context.bus.close()
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError, BaseExceptionGroup):
            await self._task
        await self.context.health.stop()
        self._task = None

    async def stop(self) -> None:
        if self._task and self.context:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            await self.context.health.stop()
        await self.session.close()
        await self.bus.close()

    def flight(self, execution: str = EXECUTION) -> Flight:
        """The only call in flight of an execution."""
        assert self.context
        (flight,) = self.context.health.app[DESK].open[execution].flights.values()
        return flight

    @property
    def routes(self) -> Routes:
        """Where the proxy believes that calls go."""
        assert self.context
        return self.context.health.app[DESK]._shared.routes

    @property
    def url(self) -> str:
        assert self.context
        return self.context.health.url

    async def say(self, owner: str, kind: str, entity: str, data: Value) -> int:
        self._said += 1
        return await self.bus.publish(
            streams.log_stream(RUN),
            streams.subject(RUN, owner, kind, entity),
            codec.encode(
                id=f"t-{self._said}",
                run=RUN,
                kind=kind,
                entity=entity,
                owner=owner,
                instance="",
                causation=0,
                data=data,
            ),
            msg_id=f"t-{self._said}",
        )

    async def join(self, cell: str, engine: Engine) -> None:
        await self.say(
            "rollout",
            "cell.joined",
            cell,
            CellJoined(index=0, capacity=8, url=engine.url, engine="scripted", version=engine.version, capabilities=[]),
        )

    async def place(
        self, execution: str = EXECUTION, *, cell: str = "cell-0", epoch: int = 1, attempt: int = 0
    ) -> None:
        await self.say(
            "scheduler", "execution.placed", execution, ExecutionPlaced(cell=cell, epoch=epoch, attempt=attempt)
        )

    async def move(self, source: str, target: str, epoch: int, execution: str = EXECUTION) -> None:
        await self.say(
            "scheduler",
            "route.moved",
            execution,
            RouteMoved(source=source, target=target, epoch=epoch, kv="recomputed"),
        )

    async def finish(self, execution: str = EXECUTION, attempt: int = 0) -> None:
        await self.say(
            "harness",
            "execution.finished",
            execution,
            ExecutionFinished(
                attempt=attempt, reason="completed", exit_code=0, seconds=1.0, workspace="", workspace_digest=""
            ),
        )

    async def event(self, kind: str, *, after: int = 0) -> Event:
        async for stored in self.bus.read(streams.log_stream(RUN), after):
            event = codec.decode(stored)
            if event.kind == kind:
                return event
        raise AssertionError("the log ended")

    async def events(self, kind: str) -> list[Event]:
        end = await self.bus.last_seq(streams.log_stream(RUN))
        found = [codec.decode(s) async for s in self.bus.read_range(streams.log_stream(RUN), 0, end)]
        return [event for event in found if event.kind == kind]

    async def records(self) -> list[RecordEntry]:
        end = await self.bus.last_seq(streams.records_stream(RUN))
        return [decode_record(s.data) async for s in self.bus.read_range(streams.records_stream(RUN), 0, end)]

    def headers(self, execution: str = EXECUTION, attempt: int = 0, agent: str = "") -> dict[str, str]:
        token = make_token(SECRET, execution, attempt)
        return {"authorization": f"Bearer {token}", **({"x-claude-code-agent-id": agent} if agent else {})}

    def post(self, body: dict[str, Any], path: str = "/v1/messages?beta=true", **who: Any) -> Any:
        return self.session.post(self.url + path, json=body, headers=self.headers(**who))

    async def status(self, body: dict[str, Any], path: str = "/v1/messages?beta=true", **who: Any) -> int:
        """Of an answer that nobody reads."""
        async with self.post(body, path, **who) as response:
            return int(response.status)

    async def ask(self, body: dict[str, Any], **who: Any) -> dict[str, Any]:
        """The answer, put together from the stream when it is one."""
        async with self.post(body, **who) as response:
            if not body.get("stream"):
                answer: dict[str, Any] = await response.json()
                assert response.status == 200, answer
                return answer
            assert response.status == 200
            return assemble(parse_events(await response.read()))
