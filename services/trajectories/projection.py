"""LOG and RECORDS into the store. The live service and a rebuild use the same path, so both give the same rows."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

from schemas import streams
from schemas.envelope import Event
from schemas.errors import LogBroken
from schemas.events import ExecutionSealed, ExecutionTreeFrozen
from schemas.records import FrozenTree
from services.mesh.bus import Bus
from services.mesh.codec import decode
from services.trajectories.store import PROJECTED, Rows
from services.trajectories.tree import read_sealed

_KEPT_TREES = 16
InThread = Callable[..., Awaitable[Any]]
"""Does what blocks: `asyncio.to_thread`, or something that needs no thread."""


class Projection:
    """Applies events in log order. `keep` spares it from reading RECORDS again for a tree that was just frozen."""

    def __init__(self, *, bus: Bus, run: str, store: Rows, in_thread: InThread = asyncio.to_thread) -> None:
        self._bus, self._run, self._store, self._in_thread = bus, run, store, in_thread
        self._trees: OrderedDict[str, FrozenTree] = OrderedDict()
        self._moved: asyncio.Event | None = None
        """Where somebody waits for the next move."""
        self.position = 0
        """LOG sequence of the last event that was applied."""

    def __repr__(self) -> str:
        return f"<Projection of {self._run} [position {self.position}, {len(self._trees)} trees kept]>"

    def keep(self, tree: FrozenTree) -> None:
        self._trees[tree.execution] = tree
        if len(self._trees) > _KEPT_TREES:
            self._trees.popitem(last=False)

    async def resume(self) -> int:
        """LOG sequence after which to go on."""
        self._move(await self._in_thread(self._store.position))
        return self.position

    async def reached(self, seq: int) -> None:
        """Returns once the rows hold LOG up to `seq`."""
        while self.position < seq:
            self._moved = self._moved or asyncio.Event()
            await self._moved.wait()

    async def apply(self, event: Event) -> None:
        if isinstance(event.data, PROJECTED):
            await self._in_thread(self._store.apply, event, await self._tree(event))
        self._move(event.seq)

    async def rebuild(self) -> None:
        """Drops this run's rows and fills them again from all that LOG and RECORDS hold now."""
        await self._in_thread(self._store.reset)
        log = streams.log_stream(self._run)
        async for stored in self._bus.read_range(log, 0, await self._bus.last_seq(log)):
            await self.apply(decode(stored))

    def _move(self, seq: int) -> None:
        self.position = seq
        if self._moved is not None:
            self._moved.set()
            self._moved = None

    async def _tree(self, event: Event) -> FrozenTree | None:
        if not isinstance(event.data, ExecutionTreeFrozen) or not event.data.blob:
            return None
        kept = self._trees.pop(event.entity, None)
        if kept is not None and kept.attempt == event.data.attempt:
            return kept
        # A frozen tree names the seal that it answers.
        sealed = decode(await self._bus.get(streams.log_stream(self._run), event.causation))
        if not isinstance(sealed.data, ExecutionSealed):
            raise LogBroken(f"{event.id} answers a {sealed.kind}, not a seal", where=f"sequence {event.seq}")
        return await read_sealed(self._bus, self._run, event.entity, sealed.data)


async def rebuild(bus: Bus, run: str, store: Rows) -> None:
    """Drop and fill: the rows of `run` from LOG and RECORDS alone."""
    await Projection(bus=bus, run=run, store=store).rebuild()
