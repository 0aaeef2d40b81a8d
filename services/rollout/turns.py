"""One turn at a time for calls that may be what kills engines, whichever proxies they come from.

A proxy says of such a call how long its turn lasts; who comes meanwhile is told to come again. Invariant: of two calls with
turns that the engine has at once, the turn of one is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

TURN_HEADER = "x-gyre-turn"


class Turns:
    """At one cell, in one life of its process."""

    def __init__(self) -> None:
        self._holder: object = None
        self._until = 0.0

    def __repr__(self) -> str:
        return f"<Turns [{'taken' if self._holder is not None else 'free'}]>"

    def take(self, headers: Mapping[str, str]) -> object | None:
        """A token to give back with the answer, also for a call that needs no turn; None where another has its turn."""
        call, turn_s = object(), float(headers.get(TURN_HEADER, 0))
        if turn_s:
            now = asyncio.get_running_loop().time()
            if self._holder is not None and now < self._until:
                return None
            self._holder, self._until = call, now + turn_s
        return call

    def give_back(self, call: object) -> None:
        if self._holder is call:
            self._holder = None
