"""The shell of a decider: feeds it from LOG in stream order, publishes what it decides, arms its timers.

For an input n that is not our own decision: evolve, decide, evolve each decision at once, publish them in order with ids
`{run}.{decider}.{n}.{i}`, take n + 1. Our own decision read back is an acknowledgement only.

Recovery: load the last snapshot, apply the decisions that the log holds up to the newest input that has any, compute
again for that one (its tail may be unrecorded) and go on live. Nothing is decided twice: the ids are the same. A snapshot
saves time and holds nothing that the log doesn't: without one that can be read the log is read from its beginning.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import msgspec
import structlog

from schemas import streams
from schemas.envelope import Decision, Event
from schemas.errors import BlobDamaged, Conflict, SnapshotUnreadable
from schemas.events import TimerFired
from schemas.ids import decision_id
from services.mesh.bus import Bus
from services.mesh.clock import Clock
from services.mesh.codec import decode
from services.mesh.decider import Decider, Driver
from services.mesh.publisher import Publisher

S = TypeVar("S", bound=msgspec.Struct)
BeforePublish = Callable[[Decision], Awaitable[None]]
Observer = Callable[[], None]


class Shell(Generic[S]):
    """A snapshot is stored every `snapshot_every` inputs of a life. `before_publish` does the I/O without which a decision
    may not be said; it must be idempotent. `observe` is called after every input, for health and metrics."""

    def __init__(
        self,
        *,
        decider: Decider[S],
        bus: Bus,
        clock: Clock,
        publisher: Publisher,
        snapshot_every: int,
        before_publish: BeforePublish | None = None,
        observe: Observer | None = None,
    ) -> None:
        self.driver: Driver[S] = Driver(decider)
        self._bus, self._clock, self._publisher = bus, clock, publisher
        self._before_publish = before_publish
        self._observe = observe
        self._snapshot_every = snapshot_every
        self._since_snapshot = 0
        self._timers: dict[str, asyncio.Task[None]] = {}
        self._sleeping: set[str] = set()
        self._failed: asyncio.Future[None] | None = None
        self.read_to = 0
        self.caught_up = asyncio.Event()
        self._log = structlog.get_logger(service=publisher.owner)

    async def run(self) -> None:
        """Runs until cancelled. Raises Fenced when another instance took over, LogBroken when the log is damaged."""
        self._failed = asyncio.get_running_loop().create_future()
        await self._publisher.take_fence()
        await self._recover()
        self.caught_up.set()
        reader = asyncio.create_task(self._follow())
        try:
            done, _ = await asyncio.wait({reader, self._failed}, return_when=asyncio.FIRST_COMPLETED)
            for finished in done:
                finished.result()
        finally:
            self._failed.cancel()
            for task in [reader, *self._timers.values()]:
                task.cancel()
            for task in [reader, *self._timers.values()]:
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            self._timers.clear()

    async def _recover(self) -> None:
        run, name = self._publisher.run, self.driver.decider.name
        log = streams.log_stream(run)
        blob = streams.snapshot_blob(name)
        if await self._bus.blob_exists(blob):
            try:
                self.driver.restore(await self._bus.get_blob(blob))
            except (BlobDamaged, SnapshotUnreadable) as error:
                self._log.warning("the log is read from its beginning: no snapshot can be used", what=error.what)
        end = await self._bus.last_seq(log)
        inputs: list[Event] = []
        recorded: dict[int, list[Decision]] = defaultdict(list)
        async for stored in self._bus.read_range(log, self.driver.position, end):
            event = decode(stored)
            if self.driver.is_input(event):
                inputs.append(event)
            else:
                recorded[event.causation].append(as_decision(event))
        newest = max(recorded, default=0)
        for event in inputs:
            if event.seq < newest:
                self.driver.feed_recorded(event, recorded.get(event.seq, []))
            elif event.seq == newest:
                known = recorded[newest]
                await self._publish(event, self.driver.feed_tail(event, known), first=len(known))
            else:
                await self._publish(event, self.driver.feed(event))
        self.read_to = end
        self._arm()
        self._log.info("recovered", inputs=len(inputs), position=self.driver.position)

    async def _follow(self) -> None:
        async for stored in self._bus.read(streams.log_stream(self._publisher.run), self.read_to):
            event = decode(stored)
            if self.driver.is_input(event):
                decisions = self.driver.feed(event)
                if decisions:
                    await self._publish(event, decisions)
                self._arm()
                await self._snapshot()
            self.read_to = event.seq
            if self._observe:
                self._observe()

    async def _publish(self, cause: Event, decisions: list[Decision], *, first: int = 0) -> None:
        name = self.driver.decider.name
        for index, decision in enumerate(decisions, start=first):
            if self._before_publish:
                await self._before_publish(decision)
            await self._publisher.say(
                decision.kind,
                decision.entity,
                decision.data,
                id=decision_id(self._publisher.run, name, cause.seq, index),
                causation=cause.seq,
            )

    async def _snapshot(self) -> None:
        # Taken when every decision so far is published, so a snapshot never holds an unacknowledged one.
        self._since_snapshot += 1
        if self._since_snapshot >= self._snapshot_every:
            self._since_snapshot = 0
            await self._bus.put_blob(streams.snapshot_blob(self.driver.decider.name), self.driver.snapshot())

    def _arm(self) -> None:
        wanted = self.driver.decider.timers(self.driver.state)
        if wanted.keys() == self._timers.keys():
            return
        # Kept until the decider has seen it fire, so that it isn't armed twice.
        for timer in [known for known, task in self._timers.items() if known not in wanted and task.done()]:
            del self._timers[timer]
        # Only a sleeping timer is cancelled: one that is already publishing holds the fence.
        for timer in [known for known in self._sleeping if known not in wanted]:
            self._timers.pop(timer).cancel()
            self._sleeping.discard(timer)
        for timer, (purpose, due_us) in wanted.items():
            if timer not in self._timers:
                self._timers[timer] = asyncio.create_task(self._wake(timer, purpose, due_us))

    async def _wake(self, timer: str, purpose: str, due_us: int) -> None:
        self._sleeping.add(timer)
        await self._clock.sleep_until(due_us)
        self._sleeping.discard(timer)
        try:
            with contextlib.suppress(Conflict):
                await self._publisher.say(
                    "timer.fired", timer, TimerFired(purpose=purpose), id=f"{self._publisher.run}.{timer}.fired"
                )
        except Exception as error:  # whatever it is, it ends the shell
            if self._failed and not self._failed.done():
                self._failed.set_exception(error)


def as_decision(event: Event) -> Decision:
    return Decision(kind=event.kind, entity=event.entity, data=event.data)
