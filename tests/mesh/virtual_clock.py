"""A clock that stands still until it is told to advance.

It wakes its sleepers in order of their deadlines, ties in the order in which they went to sleep, and never goes backwards.
"""

from __future__ import annotations

import asyncio
import heapq


class VirtualClock:
    """A clock that advances only by hand.

    >>> clock = VirtualClock(start_us=1_000)
    >>> clock.advance(500)
    >>> clock.now_us()
    1500
    """

    def __init__(self, start_us: int = 0) -> None:
        self._now = start_us
        self._sleepers: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = 0

    def __repr__(self) -> str:
        return f"<VirtualClock [now: {self._now} us, {len(self._sleepers)} asleep]>"

    def now_us(self) -> int:
        return self._now

    async def sleep_until(self, us: int) -> None:
        if us <= self._now:
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._order += 1
        heapq.heappush(self._sleepers, (us, self._order, waiter))
        await waiter

    def next_deadline(self) -> int | None:
        """The time at which the next sleeper wants to wake, None when nobody sleeps."""
        while self._sleepers and self._sleepers[0][2].done():
            heapq.heappop(self._sleepers)
        return self._sleepers[0][0] if self._sleepers else None

    def advance_to(self, us: int) -> None:
        """Moves the present to `us` and wakes everyone who waited for it. Raises ValueError for a time in the past."""
        if us < self._now:
            raise ValueError(f"a virtual clock at {self._now} us cannot go back to {us} us")
        while (deadline := self.next_deadline()) is not None and deadline <= us:
            _, _, waiter = heapq.heappop(self._sleepers)
            self._now = max(self._now, deadline)
            waiter.set_result(None)
        self._now = us

    def advance(self, us: int) -> None:
        """Moves the present by `us` microseconds."""
        self.advance_to(self._now + us)
