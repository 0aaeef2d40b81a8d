"""In place of the database of trajectories: what the projection applied, in order, kept over lives.

A database costs more than everything else of a simulated run. What matters of it is kept: one transaction an event, and
none twice. `services.trajectories.store.Store` gets the same events in its own tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from schemas.envelope import Event
from schemas.records import FrozenTree

T = TypeVar("T")


async def at_once(act: Callable[..., T], *args: Any) -> T:
    """In place of a thread: nothing here takes time."""
    return act(*args)


class WorldRows:
    """Implements `services.trajectories.store.Rows`."""

    def __init__(self) -> None:
        self.applied: list[tuple[Event, FrozenTree | None]] = []

    def __repr__(self) -> str:
        return f"<WorldRows [{len(self.applied)} events, position {self.position()}]>"

    def position(self) -> int:
        return self.applied[-1][0].seq if self.applied else 0

    def apply(self, said: Event, tree: FrozenTree | None = None) -> None:
        if said.seq > self.position():
            self.applied.append((said, tree))

    def tree(self, execution: str) -> dict[str, Any] | None:
        """The execution's last frozen tree in counts; None for an unknown one."""
        for _, tree in reversed(self.applied):
            if tree is not None and tree.execution == execution:
                return {"execution": execution, "nodes": len(tree.nodes)}
        return None

    def reset(self) -> None:
        self.applied.clear()

    def close(self) -> None:
        """What was applied stays, as on a disk."""
