"""The wall clock of a machine in a simulation: it goes with the loop, and can be wrong."""

from __future__ import annotations

import asyncio

from replay.virtual.loop import VirtualLoop
from services.mesh.clock import MICROSECONDS


class WallClock:
    """Implements `Clock`. `start_us` is what it shows when the loop begins; `off_us` is by how much it is wrong, and may
    be changed at any time, as by somebody who sets a clock."""

    def __init__(self, loop: VirtualLoop, *, start_us: int = 0, off_us: int = 0) -> None:
        self._loop, self._start_us, self.off_us = loop, start_us, off_us

    def __repr__(self) -> str:
        return f"<WallClock [{self.now_us()} us, {self.off_us} us off]>"

    def now_us(self) -> int:
        return self._start_us + round(self._loop.time() * MICROSECONDS) + self.off_us

    async def sleep_until(self, us: int) -> None:
        # As on a real machine: sleeping goes by a clock that nobody sets, waking is checked against this one.
        while (left := us - self.now_us()) > 0:
            await asyncio.sleep(left / MICROSECONDS)
