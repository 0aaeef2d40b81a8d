"""Facts that are to come: what is said next, and when. Each has a key, so one that was said meanwhile is taken off.

Of two at the same microsecond the one that was added first comes first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable


class Pending:
    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Hashable, Callable[[], None]]] = []
        self._count = 0
        self._valid: dict[Hashable, int] = {}
        """Key to the number of its entry: another number in the heap is of one that was taken off."""

    def __repr__(self) -> str:
        return f"<Pending [{len(self._valid)}]>"

    def __len__(self) -> int:
        return len(self._valid)

    def add(self, due_us: int, key: Hashable, what: Callable[[], None]) -> None:
        """In place of what had the key before."""
        self._count += 1
        self._valid[key] = self._count
        heapq.heappush(self._heap, (due_us, self._count, key, what))

    def drop(self, key: Hashable) -> None:
        """It was said, or will never be."""
        self._valid.pop(key, None)

    def next_us(self) -> int | None:
        heap, valid = self._heap, self._valid
        while heap and valid.get(heap[0][2]) != heap[0][1]:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def take(self) -> Callable[[], None]:
        """The one that `next_us` told of."""
        _, _, key, what = heapq.heappop(self._heap)
        del self._valid[key]
        return what
