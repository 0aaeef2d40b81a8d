"""Seals become frozen trees: reads what was sealed, puts the tree into BLOBS, says `execution.tree-frozen` in counts.

Invariants: every seal is answered once, also after a crash between any two steps (the id derives from the seal's, the
blob is the same bytes); the blob exists before the event that names it. Records that aren't what was sealed are an
error in the log of the service and a frozen event without a blob, after which the execution is excluded: never a stuck
group.
"""

from __future__ import annotations

from collections.abc import Callable

from schemas import streams
from schemas.envelope import Event
from schemas.errors import LogBroken
from schemas.events import ExecutionSealed, ExecutionTreeFrozen
from schemas.records import FrozenTree
from services.mesh.service import Context
from services.mesh.tree_codec import encode_tree
from services.trajectories.tree import counts_of, no_tree, read_sealed


class Freezer:
    """`frozen` is called with every tree, before it is announced."""

    def __init__(self, context: Context, *, frozen: Callable[[FrozenTree], None]) -> None:
        self._context = context
        self._frozen = frozen
        self.count = 0
        """Trees frozen by this process."""
        self.broken = 0
        """Seals of this process whose records weren't what was sealed."""

    def __repr__(self) -> str:
        return f"<Freezer [{self.count} frozen, {self.broken} broken]>"

    async def follow(self) -> None:
        """Takes up what an earlier process left, then goes on live. Runs until cancelled."""
        past, end = await self._context.history(about=("execution",))
        answered = {event.entity for event in past if event.kind == "execution.tree-frozen"}
        for event in past:
            if event.kind == "execution.sealed" and event.entity not in answered:
                await self._freeze(event)
        async for event in self._context.events(end, about=("execution",), owner="proxy"):
            if event.kind == "execution.sealed":
                await self._freeze(event)

    async def _freeze(self, event: Event) -> None:
        sealed, execution = event.data, event.entity
        assert isinstance(sealed, ExecutionSealed)
        await self._context.say(
            "execution.tree-frozen",
            execution,
            await self._counts(execution, sealed),
            id=f"{event.id}.tree-frozen",
            causation=event.seq,
        )
        self.count += 1

    async def _counts(self, execution: str, sealed: ExecutionSealed) -> ExecutionTreeFrozen:
        bus = self._context.bus
        try:
            tree = await read_sealed(bus, self._context.run, execution, sealed)
        except LogBroken as error:
            self.broken += 1
            self._context.log.error("records_broken", execution=execution, attempt=sealed.attempt, what=str(error))
            return no_tree(sealed.attempt)
        blob = streams.tree_blob(execution, sealed.attempt)
        digest = await bus.put_blob(blob, encode_tree(tree))
        self._frozen(tree)
        return counts_of(tree, blob=blob, digest=digest)
