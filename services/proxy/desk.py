"""All executions that this proxy serves, as LOG has them: opened when placed, sealed when finished; one that is cancelled
may not call any more.

What LOG says arrives in order through `apply`, which never waits; seals run beside it. A request whose execution LOG
hasn't shown us yet waits a little: its harness runs, so the event is on its way. Several proxies open and end the same
executions; each execution is one's own (`schemas.ids.proxies_for`), and the others seal it only where that one doesn't.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from schemas.envelope import Event
from schemas.errors import Conflict
from schemas.events import ExecutionSealed
from schemas.ids import proxies_for
from services.proxy.executions import Execution, Shared
from services.proxy.refusal import Refused

TAKE_OVER_S = 20.0
"""Seconds for which the next proxy in an execution's order waits for its seal, the one after it twice as long."""
PLACED_S = 10.0
"""Seconds for which a request waits for its execution to appear in LOG."""
OVER_KEPT = 10_000
"""So many of the executions that ended last are refused at once; a harness that asks later waits like one that is early."""

log = structlog.get_logger(service="proxy")

Say = Callable[[Event, ExecutionSealed], Coroutine[Any, Any, int]]


class Desk:
    def __init__(self, shared: Shared, say_sealed: Say) -> None:
        self._shared, self._say = shared, say_sealed
        self.open: dict[str, Execution] = {}
        self._over: dict[str, None] = {}
        self._cancelled: set[str] = set()
        """Those that are not sealed yet."""
        self._held_out: set[str] = set()
        """Held-out executions that are not over: they may sample at a temperature of their own."""
        self._began: dict[str, int] = {}
        """When those that are not sealed yet started first."""
        self._unsealed: set[str] = set()
        """Those that are finished and that nobody has sealed yet."""
        self._news = asyncio.Event()

    def __repr__(self) -> str:
        flights = sum(len(execution.flights) for execution in self.open.values())
        return f"<Desk [{len(self.open)} open, {len(self._over)} over, {flights} calls in flight]>"

    def flights(self) -> int:
        """Calls in flight."""
        return sum(len(execution.flights) for execution in self.open.values())

    async def rebuild(self, history: list[Event]) -> list[Event]:
        """Take up a run from its log. Returns the `execution.finished` events that nobody sealed."""
        finished: dict[str, Event] = {}
        for event in history:
            late = self.is_late(event)
            self.apply(event)
            if event.kind == "execution.finished" and not late:
                finished[event.entity] = event
            elif event.kind == "execution.sealed":
                finished.pop(event.entity, None)
        for execution in self.open.values():
            # Those of others are read when a request of theirs comes here.
            if not self._turn(execution.execution):
                await execution.load()
        return list(finished.values())

    def is_late(self, event: Event) -> bool:
        """Whether an old attempt says its end after a newer one was placed: nothing follows from it."""
        known = self.open.get(event.entity)
        return event.kind == "execution.finished" and known is not None and event.data.attempt < known.attempt

    def apply(self, event: Event) -> tuple[Execution, Refused] | None:
        """One event of LOG. Returns the attempt whose calls are to be stopped, and what they are told: it is replaced by an
        `execution.placed`, or cancelled."""
        if self.is_late(event):
            return None
        self._shared.routes.apply(event)
        stopped = None
        match event.kind:
            case "execution.dispatched":
                if event.data.measurement:
                    self._held_out.add(event.entity)
                return None
            case "execution.placed" if event.entity not in self._over:
                before = self.open.get(event.entity)
                if before is None or before.attempt < event.data.attempt:
                    self.open[event.entity] = self._execution(
                        event.entity, event.data.attempt, began_us=self._began.get(event.entity, event.time_us)
                    )
                    if before is not None:
                        stopped = before, Refused(401, "a newer attempt of the execution was placed")
            case "execution.started" if event.entity not in self._over:
                began = self._began.setdefault(event.entity, event.time_us)
                if event.entity in self.open:
                    self.open[event.entity].began_us = began
                return None
            case "execution.cancelled" if event.entity not in self._over:
                self._cancelled.add(event.entity)
                if event.entity in self.open:
                    stopped = self.open[event.entity], _is_cancelled(event.entity)
            case "execution.finished":
                self._end(event.entity)
                self._unsealed.add(event.entity)
            case "execution.sealed":
                self._end(event.entity)
                self._held_out.discard(event.entity)
                self._cancelled.discard(event.entity)
                self._unsealed.discard(event.entity)
                self._began.pop(event.entity, None)
                self.open.pop(event.entity, None)
            case _:
                return None
        news, self._news = self._news, asyncio.Event()
        news.set()
        return stopped

    def _end(self, execution: str) -> None:
        self._over[execution] = None
        while len(self._over) > OVER_KEPT:
            del self._over[next(iter(self._over))]

    async def find(self, name: str, attempt: int) -> Execution:
        """The execution that a token stands for. Raises Refused: 400 when it is cancelled, 401 when it is over, 529 when LOG
        doesn't show it."""
        if (known := self._look(name, attempt)) is not None:
            return known
        try:
            async with asyncio.timeout(PLACED_S):
                while (found := self._look(name, attempt)) is None:
                    await self._news.wait()
                return found
        except TimeoutError:
            raise Refused(529, f"execution {name} is not placed yet; ask again") from None

    def _look(self, name: str, attempt: int) -> Execution | None:
        """None where LOG doesn't show it yet."""
        if name in self._cancelled:
            raise _is_cancelled(name)
        found = self.open.get(name)
        if name in self._over or (found and found.attempt > attempt):
            raise Refused(401, f"attempt {attempt} of execution {name} is over")
        return found if found and found.attempt == attempt else None

    async def seal(self, finished: Event) -> None:
        """Answer an `execution.finished`: exactly one `execution.sealed`, whoever says it and how often we start. Where it is
        another proxy's turn to say it, that one is waited for a while."""
        execution = self.open.get(finished.entity)
        if execution is None or execution.attempt != finished.data.attempt:
            if execution is not None:
                # Its attempt was lost, and the run ended before the next was placed.
                await execution.stop(Refused(401, f"execution {finished.entity} is over"))
            execution = self._execution(finished.entity, finished.data.attempt)
        if turn := self._turn(finished.entity):
            await execution.stop(Refused(401, f"execution {finished.entity} is over"))
            if await self._sealed_within(finished.entity, turn * TAKE_OVER_S):
                return
            log.warning("sealed in another proxy's place", execution=finished.entity)
        sealed = await execution.seal()
        try:
            await self._say(finished, sealed)
        except Conflict:
            return  # said already, by another or in an earlier life
        self.open.pop(finished.entity, None)

    def _turn(self, execution: str) -> int:
        """0 for an execution of ours, else how many proxies come before this one."""
        shared = self._shared
        return proxies_for(execution, shared.config.proxy.count).index(shared.instance)

    async def _sealed_within(self, execution: str, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                while execution in self._unsealed:
                    await self._news.wait()
        except TimeoutError:
            return False
        return True

    def _execution(self, name: str, attempt: int, *, began_us: int | None = None) -> Execution:
        config = self._shared.config
        own = config.eval.temperature if name in self._held_out else None
        temperature = config.proxy.temperature if own is None else own
        return Execution(self._shared, name, attempt, temperature, began_us=began_us)

    async def close(self) -> None:
        """Stops everything in flight: the proxy ends."""
        for execution in list(self.open.values()):
            await execution.stop(Refused(529, "the proxy is stopping; ask again"))


def _is_cancelled(execution: str) -> Refused:
    """A harness doesn't ask again after a 400: it ends."""
    return Refused(400, f"execution {execution} is cancelled: its group is complete without it")
