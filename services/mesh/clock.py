"""Clocks: where time in microseconds comes from.

Shells and the in-memory bus take a clock as an argument, so that the same code runs live and in a simulation.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

MICROSECONDS = 1_000_000
"""Microseconds in a second."""


class Clock(Protocol):
    """Now, and waiting for a later now. Times are whole microseconds since the epoch."""

    def now_us(self) -> int:
        """The present."""

    async def sleep_until(self, us: int) -> None:
        """Returns once `now_us() >= us`; at once when that is past."""


class SystemClock:
    """The machine's wall clock."""

    def now_us(self) -> int:
        return time.time_ns() // 1000

    async def sleep_until(self, us: int) -> None:
        # In a loop, because the wall clock may be set back while the sleep runs on the monotonic one.
        while (left := us - self.now_us()) > 0:
            await asyncio.sleep(left / MICROSECONDS)
