"""One run on a bus, with services started in this process and everybody else played by the test."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from schemas import streams
from schemas.config import Config
from schemas.envelope import Event
from schemas.events import ExecutionFinished, ExecutionSealed, GroupDispatched, RunStarted
from schemas.ids import execution_id, group_id
from schemas.records import RecordEntry
from schemas.units import TaskRef, Value
from services.mesh.bus import Bus
from services.mesh.clock import SystemClock
from services.mesh.codec import decode
from services.mesh.publisher import Publisher
from services.mesh.service import Context
from services.mesh.tree_codec import digest_records, encode_record
from tests.mesh.contexts import context_of

WAIT_S = 20.0


class Mesh:
    """`connect` gives a bus of the run; each service gets one of its own."""

    def __init__(self, connect: Callable[[], Awaitable[Bus]], run: str, folder: Path, config: Config) -> None:
        self.connect, self.run, self.folder = connect, run, folder
        self.started = RunStarted(seed=config.seed, config=config, tasks=[TaskRef(name="t", digest="td")], code="test")
        self.bus: Bus
        self._said = 0

    async def begin(self) -> None:
        self.bus = await self.connect()
        await self.bus.open_run()
        await self.say("operator", "run.started", self.run, self.started)

    async def say(self, owner: str, kind: str, entity: str, data: Value, *, id: str = "") -> int:
        self._said += 1
        publisher = Publisher(bus=self.bus, clock=SystemClock(), run=self.run, owner=owner, instance=owner)
        return await publisher.say(kind, entity, data, id=id or f"said-{self._said}")

    async def wait(self, kind: str, entity: str = "", *, after: int = 0) -> Event:
        """The first event of the kind behind a sequence, as soon as it is there."""
        async with asyncio.timeout(WAIT_S):
            async for stored in self.bus.read(streams.log_stream(self.run), after):
                event = decode(stored)
                if event.kind == kind and entity in ("", event.entity):
                    return event
        raise AssertionError("the log ended")

    async def events(self) -> list[Event]:
        log = streams.log_stream(self.run)
        return [decode(stored) async for stored in self.bus.read_range(log, 0, await self.bus.last_seq(log))]

    async def dispatch(self, index: int, count: int, version: int = 0) -> list[str]:
        executions = [execution_id(index, member) for member in range(count)]
        data = GroupDispatched(
            task="t", task_digest="td", reason="initial", burst="u-1", version=version, executions=executions
        )
        await self.say("scheduler", "group.dispatched", group_id(index), data)
        return executions

    async def finish(self, execution: str, reason: Any = "completed", *, workspace: str = "workspace/x") -> None:
        data = ExecutionFinished(
            attempt=1,
            reason=reason,
            exit_code=0,
            seconds=1.0,
            workspace=workspace,
            workspace_digest="wd" if workspace else "",
        )
        await self.say("harness", "execution.finished", execution, data)

    async def record(self, execution: str, entries: list[RecordEntry]) -> list[bytes]:
        data = [encode_record(entry) for entry in entries]
        for index, (entry, content) in enumerate(zip(entries, data, strict=True)):
            subject = streams.record_subject(self.run, execution, entry.attempt, entry.call)
            await self.bus.publish(streams.records_stream(self.run), subject, content, msg_id=f"{entry.call}.{index}")
        return data

    async def seal(self, execution: str, stored: list[bytes], *, digest: str = "") -> int:
        under = streams.records_filter(self.run, execution, 1)
        last = await self.bus.last_for(streams.records_stream(self.run), under)
        data = ExecutionSealed(
            attempt=1,
            records=len(stored),
            last_record=last.seq if last else 0,
            digest=digest or digest_records(stored),
        )
        return await self.say("proxy", "execution.sealed", execution, data, id=f"seal-{execution}")

    async def context(self, service: str) -> Context:
        return context_of(service, await self.connect(), self.folder, started=self.started)

    @contextlib.asynccontextmanager
    async def serving(self, service: str, serve: Callable[[Context], Awaitable[None]]) -> AsyncIterator[Context]:
        """The service runs inside, once it has joined; it is ended as abruptly as a cancellation can."""
        context = await self.context(service)
        before = await self.bus.last_seq(streams.log_stream(self.run))
        task = asyncio.ensure_future(serve(context))
        joined = asyncio.ensure_future(self.wait("service.joined", service, after=before))
        try:
            await asyncio.wait({task, joined}, return_when=asyncio.FIRST_COMPLETED)
            yield context
        finally:
            if task.done():
                task.result()
            joined.cancel()
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await context.health.stop()
            await context.bus.close()
