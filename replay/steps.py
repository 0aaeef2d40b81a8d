"""What a replay tells: input by input, and of a decider as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from replay.divergence import Divergence
from schemas.envelope import Decision, Event
from services.mesh.decider import Driver


class Count(msgspec.Struct, kw_only=True):
    """Decisions of one kind."""

    recorded: int = 0
    same: int = 0


class DeciderResult(msgspec.Struct, frozen=True, kw_only=True):
    """How one decider fared."""

    decider: str
    inputs: int
    recorded: int
    """Decisions in the log."""
    same: int
    """Recorded decisions that were taken again, in their place and with the same content."""
    unrecorded: int
    """Decisions computed for the newest inputs, which the log ends too early to hold."""
    divergences: int
    """Inputs on which one differs, and recorded decisions without an input."""
    first: Divergence | None
    others: list[Divergence]
    """Further ones, at most a few."""
    kinds: dict[str, Count]
    """The same by kind."""
    stopped: str = ""
    """Why the rest of the log could not be replayed; empty when it was replayed to its end."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One input of one decider, with all that was decided on it."""

    decider: str
    event: Event
    """The input."""
    recorded: Sequence[Event]
    """Its recorded decisions, as they lie in the log."""
    unrecorded: Sequence[Decision]
    """Decisions that the log ends too early to hold."""
    divergence: Divergence | None
    driver: Driver[Any]
    """It stands after this input until the next step is asked for: read its `state`, don't keep or change it."""

    @property
    def state(self) -> Any:
        """The decider's state after the input and its decisions; it changes with the next step."""
        return self.driver.state

    def snapshot(self) -> bytes:
        """From which a replay goes on after this input."""
        return self.driver.snapshot()


_NOTHING: Iterator[Decision] = iter(())


class Opened:
    """An input in hand: from its arrival until everything that was recorded on it is known."""

    __slots__ = ("_ahead", "_computed", "at", "beyond", "divergence", "event", "recorded")

    def __init__(
        self,
        event: Event,
        at: Event | None = None,
        computed: Iterator[Decision] = _NOTHING,
        ahead: Decision | None = None,
    ) -> None:
        self.event, self.at = event, at or event
        self.recorded: list[Event] = []
        self.beyond: list[Decision] = []
        self.divergence: Divergence | None = None
        self._computed, self._ahead = computed, ahead

    def __repr__(self) -> str:
        return f"<Opened {self.event.seq} [{len(self.recorded)} recorded]>"

    def peek(self) -> Decision | None:
        """The next computed decision, left where it is. Call it once the one before was applied."""
        if self._ahead is None:
            self._ahead = next(self._computed, None)
        return self._ahead

    def next(self) -> Decision | None:
        found = self._ahead
        if found is None:
            return next(self._computed, None)
        self._ahead = None
        return found
