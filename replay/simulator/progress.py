"""Executions that run, on engines whose rate depends on their load (`load_effect`, beta).

All engines run at one rate: `1 / (1 - beta + beta load)`, load = running executions over slots that serve. Work time then
advances for every execution alike, so an execution ends when the common work clock reaches the end that it had at its
start, and a change of rate moves nothing but the clock: starting or ending one costs the logarithm of how many run. Work is
counted in microseconds, so at rate 1 nothing is lost to rounding: an execution lasts as long as it is said to.
"""

from __future__ import annotations

import heapq
import math

from replay.simulator.durations import Draw


class Progress:
    def __init__(self, load_effect: float) -> None:
        self._beta = load_effect
        self._heap: list[tuple[float, int, str, Draw]] = []
        self._count = 0
        self._dropped: set[str] = set()
        """Still in the heap."""
        self._rate = 1.0
        self._work_us = 0.0
        self._at_us = 0
        self._slots = 1

    def __repr__(self) -> str:
        return f"<Progress [{self._running} running, rate {self._rate:.3f}]>"

    @property
    def _running(self) -> int:
        return len(self._heap) - len(self._dropped)

    def start(self, now_us: int, execution: str, draw: Draw) -> None:
        self._advance(now_us)
        self._count += 1
        heapq.heappush(self._heap, (self._work_us + round(draw.seconds * 1e6), self._count, execution, draw))
        self._set_rate()

    def serve(self, now_us: int, slots: int) -> None:
        """So many slots serve from now on."""
        self._advance(now_us)
        self._slots = slots
        self._set_rate()

    def next_us(self) -> int | None:
        """When the next execution ends, if nothing changes."""
        while self._heap and self._heap[0][2] in self._dropped:
            self._dropped.discard(heapq.heappop(self._heap)[2])
        if not self._heap:
            return None
        return self._at_us + math.ceil(max(0.0, self._heap[0][0] - self._work_us) / self._rate)

    def end(self, now_us: int) -> tuple[str, Draw]:
        """Takes the execution that ends now, as `next_us` said."""
        self._advance(now_us)
        _, _, execution, draw = heapq.heappop(self._heap)
        self._set_rate()
        return execution, draw

    def drop(self, now_us: int, execution: str) -> None:
        """One that runs is stopped."""
        self._advance(now_us)
        self._dropped.add(execution)
        self._set_rate()

    def _advance(self, now_us: int) -> None:
        self._work_us += (now_us - self._at_us) * self._rate
        self._at_us = now_us

    def _set_rate(self) -> None:
        if self._beta:
            load = self._running / max(1, self._slots)
            self._rate = 1.0 / (1.0 - self._beta + self._beta * load)
