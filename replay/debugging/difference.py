"""Two runs side by side: configuration, the first decision in which they part, when each step was made, idle cells.

Decisions of the scheduler are compared in the order in which they were taken: kind, entity, content; not the numbers of
the checks behind them (they follow from the configuration and the clock), and timers by how long they run. One pass over
both logs, and one to the parting; memory grows with steps.

Idle cell-hours are those of slots that served nobody, of cells that changed their role, and of cells in the training role
without a micro-step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import Any

import msgspec

from replay.debugging.citing import Cited, cite
from replay.debugging.fields import line, values
from replay.debugging.moments import Moment, Walk, point
from replay.divergence import Difference, differences
from schemas.envelope import Decision, Event
from services.scheduler.core.measurements import slots
from services.scheduler.core.state import served_capacity

US_PER_H = 3.6e9
FIGURES = {
    "hours": "from the first event to the last",
    "steps": "training steps made",
    "hours_per_step": "",
    "idle_cell_hours": "together",
    "empty_slot_cell_hours": "slots that served nobody, in cells",
    "waiting_cell_hours": "training role without a micro-step",
    "moving_cell_hours": "on the way to training and back",
    "staleness_mean": "over the groups consumed",
    "executions": "dispatched",
    "executions_surplus": "cancelled",
    "attempts_lost": "",
    "groups_discarded": "",
    "transitions": "decided",
    "routes_moved": "",
    "reward_last": "mean of the last step's batch",
}
"""Name to what is counted."""


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """A decision of one of the runs."""

    input: Cited
    decision: Cited
    before: dict[str, Any]
    """The state's named fields just before it."""
    stands: str
    """The same in one line."""


class Parting(msgspec.Struct, frozen=True, kw_only=True):
    """The first decision that the runs don't share."""

    index: int
    """How many were the same before."""
    a: Taken | None
    """None where that log has no more decisions."""
    b: Taken | None
    decision: list[Difference]
    """Fields in which the decisions differ; `expected` is of a, `actual` of b. Empty when they are of another kind."""


class Side(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    code: str
    seed: int
    finished: bool
    figures: dict[str, float | None]
    steps_s: dict[int, float]
    """Training step to when it was made, in seconds since the log's first event."""


class RunDifference(msgspec.Struct, frozen=True, kw_only=True):
    a: Side
    b: Side
    config: list[Difference]
    """`expected` is of a, `actual` of b."""
    parting: Parting | None
    """None when every decision is the same."""
    decisions: int
    """The same in both before they part."""


def compare_runs(a: Iterable[Event], b: Iterable[Event]) -> RunDifference:
    """Two logs, each of which can be read again. Raises LogBroken where a state can't follow its log."""
    ours, theirs = _Account(), _Account()
    index, parted = 0, False
    pair: tuple[Event | None, Event | None] = (None, None)
    for left, right in zip_longest(_decisions(Walk(a), ours), _decisions(Walk(b), theirs)):
        if not parted and (left is None or right is None or left[1] != right[1]):
            parted = True
            pair = (left[0] if left is not None else None, right[0] if right is not None else None)
        index += not parted
    return RunDifference(
        a=ours.side(),
        b=theirs.side(),
        config=_changed(ours.config, theirs.config),
        parting=_parting(index, a, pair[0], b, pair[1]) if parted else None,
        decisions=index,
    )


def account(log: Iterable[Event]) -> Side:
    """The figures of one log. Raises LogBroken where a state can't follow it."""
    found = _Account()
    for moment in Walk(log):
        found.see(moment)
    return found.side()


Content = tuple[str, str, Any]


def _decisions(walk: Walk, account: _Account) -> Iterator[tuple[Event, Content]]:
    for moment in walk:
        account.see(moment)
        if moment.cause is not None:
            yield moment.event, _content(moment)


def _content(moment: Moment) -> Content:
    event = moment.event
    if event.kind == "timer.set":
        return event.kind, event.entity, event.data.due_us - moment.now_us
    if event.kind == "cell.held":
        return event.kind, event.entity, next((each.rule for each in event.data.reason if not each.holds), "")
    data = event.data
    for name in ("reason", "checks"):
        if isinstance(getattr(data, name, None), list):
            data = msgspec.structs.replace(data, **{name: []})
    return event.kind, "" if event.kind.startswith("run.") else event.entity, data


def _parting(index: int, a: Iterable[Event], left: Event | None, b: Iterable[Event], right: Event | None) -> Parting:
    changed: list[Difference] = []
    if left is not None and right is not None and left.kind == right.kind:
        said = [Decision(kind=each.kind, entity=each.entity, data=each.data) for each in (left, right)]
        changed = _paths(differences(said[0], said[1]))
    return Parting(index=index, a=_taken(a, left), b=_taken(b, right), decision=changed)


def _taken(events: Iterable[Event], decision: Event | None) -> Taken | None:
    if decision is None:
        return None
    walk = Walk(events)
    before = walk.to(point(str(decision.seq)), before=True)
    start_us = before.start_us
    return Taken(
        input=cite(walk.answers or decision, start_us),
        decision=cite(decision, start_us),
        before=values(before),
        stands=line(before),
    )


def _changed(a: Any, b: Any) -> list[Difference]:
    return _paths(differences(*(Decision(kind="run.started", entity="", data=each) for each in (a, b))))


def _paths(found: list[Difference]) -> list[Difference]:
    return [msgspec.structs.replace(each, path=each.path.removeprefix("data.")) for each in found]


class _Account:
    """Figures of one run, event by event."""

    def __init__(self) -> None:
        self.config: Any = None
        self._run = self._code = ""
        self._seed = 0
        self._finished = False
        self._start_us = self._now_us = 0
        self._empty = self._training = self._moving = 0.0
        self._rates = (0.0, 0, 0)
        self._trained_s = 0.0
        self._steps: dict[int, tuple[float, int]] = {}
        """Step to when it was made, and the version that it made."""
        self._counts = dict.fromkeys([*_COUNTED.values(), "executions"], 0)
        self._staleness = self._consumed = 0
        self._reward: float | None = None
        self._transitions = 0

    def __repr__(self) -> str:
        return f"<_Account {self._run} [{len(self._steps)} steps]>"

    def see(self, moment: Moment) -> None:
        event = moment.event
        self._start_us = self._start_us or event.time_us
        passed, self._now_us = max(0, event.time_us - (self._now_us or event.time_us)), max(self._now_us, event.time_us)
        if passed and not self._finished:
            empty, training, moving = self._rates
            self._empty += empty * passed
            self._training += training * passed
            self._moving += moving * passed
        self._count(event)
        state = moment.state
        if state.config is not None:
            taken = state.p - state.f + state.a + slots(state)
            empty = max(0, served_capacity(state) - taken) / state.rules.cells.capacity
            self._rates = (empty, state.index.prefix, len(state.index.moving))

    def _count(self, event: Event) -> None:
        data = event.data
        if isinstance(data, msgspec.Raw):
            return
        if event.kind in _COUNTED:
            self._counts[_COUNTED[event.kind]] += 1
        elif event.kind == "micro-step.done":
            self._trained_s += data.seconds
        elif event.kind == "batch.stepped":
            # It may be said again.
            self._steps.setdefault(data.step, ((event.time_us - self._start_us) / 1e6, data.version))
            self._reward = data.reward
        elif event.kind == "checkpoint.restored":
            self._steps = {step: made for step, made in self._steps.items() if made[1] <= data.version}
        elif event.kind == "group.consumed":
            self._staleness += data.staleness
            self._consumed += 1
        elif event.kind == "cell.role-transition":
            self._transitions += data.phase == "decided"
        elif event.kind == "execution.dispatched":
            self._counts["executions"] += not data.measurement
        elif event.kind == "run.started":
            self.config, self._run, self._code, self._seed = data.config, event.entity, data.code, data.seed
        elif event.kind == "run.finished":
            self._finished = True

    def side(self) -> Side:
        hours, steps = (self._now_us - self._start_us) / US_PER_H, len(self._steps)
        waiting = max(0.0, self._training / US_PER_H - self._trained_s / 3600)
        empty, moving = self._empty / US_PER_H, self._moving / US_PER_H
        found: dict[str, float | None] = {
            **self._counts,
            "hours": hours,
            "steps": steps,
            "hours_per_step": max(self._steps.values())[0] / 3600 / steps if steps else None,
            "idle_cell_hours": empty + waiting + moving,
            "empty_slot_cell_hours": empty,
            "waiting_cell_hours": waiting,
            "moving_cell_hours": moving,
            "staleness_mean": self._staleness / self._consumed if self._consumed else None,
            "transitions": self._transitions,
            "reward_last": self._reward,
        }
        return Side(
            run=self._run,
            code=self._code,
            seed=self._seed,
            finished=self._finished,
            figures={name: found[name] for name in FIGURES},
            steps_s={step: made[0] for step, made in self._steps.items()},
        )


_COUNTED = {
    "execution.cancelled": "executions_surplus",
    "execution.lost": "attempts_lost",
    "group.discarded": "groups_discarded",
    "route.moved": "routes_moved",
}
"""Kind to the figure that counts it."""
