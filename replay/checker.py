"""Looks at the invariants of `replay.invariants` over a log, event by event.

The checker folds the run twice, in the log's order and in the scheduler's, and hands each event to the invariants that
want it before it is folded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import msgspec

from replay.invariants import ALL, Evidence, Invariant, Violation
from replay.invariants.base import EVERY
from replay.invariants.folding import apply
from replay.invariants.order import SchedulerOrder, decides
from replay.invariants.scene import Scene
from schemas.envelope import Event
from schemas.errors import ConfigError

Handler = Callable[[Event], None]


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    invariant: str
    meaning: str
    """First sentence of its docstring."""
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


class Checker:
    """Every invariant, or those named, over one run. Raises ConfigError for a name that none has.

    >>> checker = Checker()
    >>> for event in events:
    ...     checker.see(event)
    >>> checker.end().ok
    True
    """

    def __init__(self, *, only: Sequence[str] = (), evidence: Evidence | None = None) -> None:
        for name in only:
            if name not in ALL:
                raise ConfigError(f"no invariant is called {name!r}", remedy=f"choose from {', '.join(ALL)}")
        self.violations: list[Violation] = []
        """Found so far."""
        self._evidence = evidence or Evidence()
        self._told, self._scheduler = Scene(), Scene()
        self._order = SchedulerOrder()
        self._last_input: Event | None = None
        self._events = 0
        chosen = [kind for name, kind in ALL.items() if not only or name in only]
        self._invariants = [self._make(kind) for kind in chosen]
        self._by_kind = {
            order: _handlers(i for i in self._invariants if i.order == order) for order in ("log", "scheduler")
        }
        self._after = [each.decided for each in self._invariants if type(each).decided is not Invariant.decided]

    def __repr__(self) -> str:
        return (
            f"<Checker [{len(self._invariants)} invariants, {self._events} events, {len(self.violations)} violations]>"
        )

    def see(self, event: Event) -> None:
        """The next event of LOG."""
        self._events += 1
        if isinstance(event.data, msgspec.Raw):
            # A kind or a schema version of the future: nobody here can read it.
            return
        _hand(event, self._by_kind["log"], self._told)
        for each in self._order.take(event):
            self._see_in_scheduler_order(each)

    def end(self) -> Report:
        """The log is over, or what there is of it."""
        for event in self._order.rest():
            # Whether something was decided on these can't be known, unless the run is known to be complete.
            self._see_in_scheduler_order(event, answered=self._evidence.complete)
        for invariant in self._invariants:
            invariant.end()
        return Report(
            events=self._events,
            checked=[
                Checked(invariant=each.name, meaning=each.law(), violations=each.violations, skipped=each.skipped)
                for each in self._invariants
            ],
            violations=self.violations,
        )

    def _make(self, kind: type[Invariant]) -> Invariant:
        scene = self._told if kind.order == "log" else self._scheduler
        invariant = kind(scene, self._evidence, self.violations)
        invariant.begin()
        return invariant

    def _see_in_scheduler_order(self, event: Event, *, answered: bool = True) -> None:
        if not decides(event, "scheduler"):
            if self._last_input is not None and answered:
                for decided in self._after:
                    decided(self._last_input)
            self._last_input = event
            self._scheduler.now_us = max(self._scheduler.now_us, event.time_us)
        _hand(event, self._by_kind["scheduler"], self._scheduler)


def check(log: Iterable[Event], *, only: Sequence[str] = (), evidence: Evidence | None = None) -> Report:
    """Look at every invariant, or at those named. Raises ConfigError for a name that none has."""
    checker = Checker(only=only, evidence=evidence)
    for event in log:
        checker.see(event)
    return checker.end()


def _handlers(invariants: Iterable[Invariant]) -> dict[str, list[Handler]]:
    """Kind to who wants it; those who want every event are under `*` and in every kind's list."""
    wanted: dict[str, list[Handler]] = defaultdict(list)
    kept = list(invariants)
    kinds = {kind for each in kept for kind in each.handlers} | {EVERY}
    for kind in kinds:
        for each in kept:
            for key in {kind, EVERY}:
                if key in each.handlers:
                    wanted[kind].append(getattr(each, each.handlers[key]))
    return {EVERY: [], **wanted}


def _hand(event: Event, handlers: dict[str, list[Handler]], scene: Scene) -> None:
    for handler in handlers.get(event.kind) or handlers[EVERY]:
        handler(event)
    apply(scene, event)
