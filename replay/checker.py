"""What must hold in every run, proven over its log: each invariant is one function with a name.

An invariant takes the whole log and yields a violation for every place where it doesn't hold. One that has nothing to
look at (too few bursts, say) raises `NotApplicable` with the reason, and is reported as such.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from schemas.envelope import Event
from schemas.errors import ConfigError


class Violation(msgspec.Struct, frozen=True, kw_only=True):
    invariant: str
    seq: int
    """Where in the log; 0 when it is about the log as a whole."""
    entity: str
    what: str

    def __str__(self) -> str:
        return f"{self.invariant}: sequence {self.seq} ({self.entity}): {self.what}"


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    invariant: str
    meaning: str
    """First sentence of its function's docstring."""
    violations: int
    skipped: str = ""
    """Why it could not be looked at; empty when it was."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    events: int
    checked: list[Checked]
    violations: list[Violation]

    @property
    def ok(self) -> bool:
        return not self.violations


class NotApplicable(Exception):
    """The log holds nothing that this invariant is about."""


Log = Sequence[Event]
Invariant = Callable[[Log], Iterator[Violation]]


def check(log: Log, *, only: Sequence[str] = ()) -> Report:
    """Look at every invariant, or at those named. Raises ConfigError for a name that none has."""
    from replay import invariants_data, invariants_flow, invariants_held_out

    known = invariants_flow.ALL | invariants_data.ALL | invariants_held_out.ALL
    for name in only:
        if name not in known:
            raise ConfigError(f"no invariant is called {name!r}", remedy=f"choose from {', '.join(known)}")
    chosen = {name: each for name, each in known.items() if not only or name in only}
    checked: list[Checked] = []
    violations: list[Violation] = []
    for name, invariant in chosen.items():
        skipped, found = "", []
        try:
            found = list(invariant(log))
        except NotApplicable as reason:
            skipped = str(reason)
        meaning = (invariant.__doc__ or "").strip().split("\n\n")[0].replace("\n    ", " ")
        checked.append(Checked(invariant=name, meaning=meaning, violations=len(found), skipped=skipped))
        violations += found
    return Report(events=len(log), checked=checked, violations=violations)


def violation(invariant: str, event: Event, what: str) -> Violation:
    return Violation(invariant=invariant, seq=event.seq, entity=event.entity, what=what)
