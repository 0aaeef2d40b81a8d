"""Calls that may be what kills engines: counted, brought to an engine one at a time, and given up.

    counted ──lost most-1 times in a row──> suspect ──its turn at a cell──┬─ lost in it ──> given up
       ^                                                                  └─ it passed ──> the next suspect's turn
       └── a token came, or the engine had the call for long enough: from the beginning

An engine that dies takes all its calls with it, whichever of them it was. A call can't be tried alone: other calls come and go
at the cell, those of other proxies too, and after a common loss of a host everybody has to be back at once. So the first
losses only count. Who was lost again and again comes back one after the other, and the last loss counts in one's own turn
only, when the others that might be to blame either wait or have been at the engine for longer than the death took. Those who
wait pay for that with time, and only after losses in a row.

Invariants
- nobody is given up for fewer than `most` losses in a row, of which the last came in a turn of its own, unless another
  call with the very same prompt was: executions of a group often begin alike, and the next loss is proof enough then;
- what is lost after the engine had it for as long as reading any prompt takes counts for nothing, and begins anew;
- who loses its connection in a move, by a refusal or before it was made is not counted: that says nothing of the call;
- at a cell at most one suspect has its turn, in the order of asking; the cell sees to it that this holds for the suspects of
  all proxies (`services.rollout.turns`), and whom it sends away asks again later; a turn ends.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable

from schemas.records import GivenUp
from services.proxy.refusal import Refused

SHORTEST_TURN_S = 10.0
READ_S = 60.0
READ_TOKENS_PER_S = 1000.0
"""Slower than any engine reads a prompt: after `READ_S` and the prompt at this pace it has been read, and tokens come."""


class Turns:
    """Of all cells, as far as this proxy's calls go."""

    def __init__(self) -> None:
        self._cells: dict[str, asyncio.Lock] = {}
        self.given_up: set[bytes] = set()
        """Digests of the prompts of calls that were."""

    def __repr__(self) -> str:
        taken = [cell for cell, lock in self._cells.items() if lock.locked()]
        return f"<Turns [{', '.join(taken) or 'all free'}]>"

    def at(self, cell: str) -> asyncio.Lock:
        return self._cells.setdefault(cell, asyncio.Lock())


class Suspicion:
    """Of one call: `turn`, `begin`, then `lost` or `lived`, and `end`, each time that an engine is asked."""

    def __init__(self, turns: Turns, *, most: int, prompt_tokens: int, prompt: Callable[[], list[bytes]]) -> None:
        self._turns, self._most, self._prompt = turns, most, prompt
        self._long_s = READ_S + prompt_tokens / READ_TOKENS_PER_S
        self.cells: list[str] = []
        """Where it was lost, one after the other, without a token between them."""
        self._turn: asyncio.Lock | None = None
        """While it has its turn."""
        self._passes: asyncio.TimerHandle | None = None
        self._began = self._held_s = 0.0

    def __repr__(self) -> str:
        return f"<Suspicion [{len(self.cells)} of {self._most} losses]>"

    @property
    def suspect(self) -> bool:
        return len(self.cells) >= self._most - 1

    async def turn(self, cell: str) -> None:
        """Waits until no other suspect has its turn at the cell."""
        turn = self._turns.at(cell)
        await turn.acquire()
        self._turn = turn

    def begin(self) -> float:
        """An engine is asked now. Seconds that the turn lasts, which its cell has to know: other proxies have suspects
        too. 0 for who needs none."""
        loop = asyncio.get_running_loop()
        self._began = loop.time()
        if self._turn is None:
            return 0.0
        length_s = min(max(SHORTEST_TURN_S, 2 * self._held_s), self._long_s)
        self._passes = loop.call_later(length_s, self._pass_on)
        return length_s

    def lost(self, cell: str) -> bool:
        """The engine went away with the call in hand. Whether that was once too often."""
        held_s = asyncio.get_running_loop().time() - self._began
        if held_s > self._long_s:
            self.cells.clear()
            return False
        self._held_s = held_s
        digest = hashlib.blake2b(b",".join(self._prompt()), digest_size=16).digest()
        fatal = (self.suspect and self._turn is not None) or digest in self._turns.given_up
        if fatal or not self.suspect:
            self.cells.append(cell)
        if fatal:
            self._turns.given_up.add(digest)
        return fatal

    def lived(self) -> None:
        """A token came."""
        self.cells.clear()

    def end(self) -> None:
        """No engine is asked any more, for whatever reason."""
        if self._passes is not None:
            self._passes.cancel()
            self._passes = None
        self._pass_on()

    def _pass_on(self) -> None:
        if self._turn is not None:
            self._turn.release()
            self._turn = None


class KillsEngines(Refused):
    """This call took one engine after the other with it: no other is asked. A harness doesn't ask again after a 400."""

    def __init__(self, cells: list[str]) -> None:
        super().__init__(
            400,
            f"this call is given up: {len(cells)} times in a row the engine was lost while it had the call "
            f"({', '.join(cells)})",
            remedy="read the engines' logs of that time; proxy.most_losses says how many engines one call may cost",
        )
        self.cells = cells

    @classmethod
    def read(cls, entry: GivenUp) -> KillsEngines:
        return cls(entry.cells)
