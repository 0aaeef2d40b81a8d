"""The operator of a simulated run: starts it, and tells it what `gyre pause`, `resume`, `cell drain` and `cell add` tell.

Invariant: what he wished is undone in the end, unless the run is over before. Where the event bus gives no answer he says
it again until it does, and counts the seconds from then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from replay.fault.setting import RUN
from schemas.errors import BusError
from schemas.events import RunStarted
from services.mesh import operators
from services.mesh.clock import Clock
from services.mesh.memory_broker import MemoryBroker
from services.mesh.memory_bus import Line, MemoryBus

WAY_S = 0.001


class Operator:
    """`start` once, then `wish` as often as one likes, outside of all lives."""

    def __init__(self, broker: MemoryBroker, clock: Clock) -> None:
        self._bus = MemoryBus(broker, RUN, name="operator", line=Line(way_s=WAY_S, sits_out=True))
        self._says = operators.publisher(self._bus, clock=clock, run=RUN)
        self._wishes: dict[asyncio.Task[None], None] = {}
        self._said = 0

    def __repr__(self) -> str:
        return f"<Operator [{self._said} wishes said, {len(self._wishes)} to be undone]>"

    async def open_run(self) -> None:
        await self._bus.open_run()

    async def start(self, started: RunStarted) -> None:
        await self._says.say("run.started", RUN, started, id=f"{RUN}.started")

    def wish(self, kind: str, undone: str, entity: str, *, seconds: float, said: Callable[[], None]) -> None:
        """Says `kind` of the run or a cell, and `undone` so many seconds later. `said` is called in between."""
        task = asyncio.ensure_future(self._wish(kind, undone, entity, seconds, said))
        self._wishes[task] = None
        task.add_done_callback(lambda task: self._wishes.pop(task, None))

    async def leave(self) -> None:
        """The run is over, or given up."""
        left = list(self._wishes)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _wish(self, kind: str, undone: str, entity: str, seconds: float, said: Callable[[], None]) -> None:
        if await self._say(kind, entity):
            said()
            await asyncio.sleep(seconds)
            await self._say(undone, entity)

    async def _say(self, kind: str, entity: str) -> bool:
        """False where the command would refuse it: the run is over, or the cell that is to be drained has not joined."""
        while True:
            self._said += 1
            try:
                if await operators.is_over(self._bus, RUN):
                    return False
                if kind == "cell.withdrawn" and not await operators.has_joined(self._bus, RUN, entity):
                    return False
                await operators.wish(self._says, kind, entity, by="operator", nonce=str(self._said))
            except BusError:
                continue
            return True
