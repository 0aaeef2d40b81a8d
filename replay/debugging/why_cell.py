"""Why a cell was in its role at a moment, and what held it back from the next: each sentence with the events behind it.

What was said is cited; how the checks stand at the moment is asked of the strategy's own gate over the scheduler's state,
so nothing is said here that the scheduler would not have looked at. Memory: a few events a cell.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from replay.debugging.citing import Cited, cite
from replay.debugging.fields import role
from replay.debugging.moments import Moment, Point, Walk
from replay.timeline.notes import duration
from schemas.envelope import Event
from schemas.errors import ConfigError
from schemas.ids import cell_id, order_of
from schemas.units import Check
from services.scheduler.core import equations as eq
from services.scheduler.core.state import Cell, State, served_capacity, supply
from services.scheduler.core.strategies import strategy_of

KEPT = 40
"""Reports of what held a cell back that are kept, the newest ones."""


class Because(msgspec.Struct, frozen=True, kw_only=True):
    """One sentence, the checks as they stand at the moment, and the events that it rests on."""

    text: str
    checks: list[Check] = []
    cited: list[Cited] = []


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """A report that the cell was held back, until the next one, a transition, or the burst's end."""

    cited: Cited
    seconds: float
    """How long this was the first thing that kept it."""


class WhyCell(msgspec.Struct, frozen=True, kw_only=True):
    cell: str
    at: Cited
    role: str
    load: int
    since_s: float
    """When it came into this role."""
    came: list[Cited]
    """How: the phases of its last transition, the decision with its checks first; or that it joined."""
    held: list[Holding]
    """What held it back from training before it left for it last; where it serves, so far."""
    now: list[Because]
    """What keeps it where it is."""


class _Report(msgspec.Struct):
    """A `cell.held`, until what it says was past: another report, a transition, the burst's end."""

    event: Event
    until_us: int = 0
    """0 while nothing else was said."""


class _Seen:
    """Of the log so far, what may have to be cited."""

    def __init__(self, cell: str) -> None:
        self.cell = cell
        self.came: list[Event] = []
        self.held: deque[_Report] = deque(maxlen=KEPT)
        self.before: list[_Report] = []
        """What held it back before it left last."""
        self.last: dict[str, Event] = {}
        """Kind to its newest event; `kind entity` for those of one cell."""
        self.moving: dict[str, Event] = {}
        self.changed: dict[str, Event] = {}
        """Quantity to the event that changed it last."""
        self._values: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<_Seen {self.cell} [{len(self.came)} phases, {len(self.held)} reports]>"

    def see(self, moment: Moment) -> None:
        event, state = moment.event, moment.state
        entity = event.kind.partition(".")[0]
        past = event.kind in ("cell.held", "burst.ended", "run.finished") or _decided(event)
        if past and self.held and not self.held[-1].until_us:
            self.held[-1].until_us = event.time_us
        if entity in ("cell", "run", "burst", "timer", "batch", "weights", "checkpoint"):
            self.last[event.kind] = event
            if entity == "cell":
                self.last[f"{event.kind} {event.entity}"] = event
                self._cell(event)
        if state.config is not None:
            now = {"w": state.d - state.f, "C_R": served_capacity(state), "supply": supply(state)}
            for name, value in now.items():
                if self._values.get(name) != value:
                    self._values[name], self.changed[name] = value, event

    def _cell(self, event: Event) -> None:
        mine = event.entity == self.cell
        if event.kind == "cell.role-transition":
            if event.data.phase == "decided":
                self.moving[event.entity] = event
            elif event.data.phase in ("completed", "failed"):
                self.moving.pop(event.entity, None)
            if mine and event.data.phase == "decided":
                self.came = [event]
                if event.data.target == "train":
                    self.before = list(self.held)
                self.held.clear()
            elif mine:
                self.came.append(event)
        elif event.kind == "cell.held" and mine:
            self.held.append(_Report(event))
        elif event.kind == "cell.joined" and mine and not self.came:
            self.came = [event]


def why_cell(events: Iterable[Event], cell: str, at: Point | None = None) -> WhyCell:
    """At the point, or at the end of the log. Raises ConfigError for a cell that isn't there then."""
    walk, seen = Walk(events), _Seen(cell)
    moment = walk.to(at, see=seen.see) if at is not None else walk.end(see=seen.see)
    state = moment.state
    if cell not in state.cells:
        known = ", ".join(sorted(state.cells, key=order_of)) or "none yet"
        raise ConfigError(
            f"there is no {cell} at sequence {moment.event.seq}", where="--why", remedy=f"cells there: {known}"
        )
    found = state.cells[cell]
    came = _phases(found, seen)
    reports = list(seen.held) if role(found) in ("rollout", "away") else seen.before
    return WhyCell(
        cell=cell,
        at=cite(moment.event, moment.start_us),
        role=role(found),
        load=found.load,
        since_s=(came[-1].time_us - moment.start_us) / 1e6 if came else 0.0,
        came=[cite(each, moment.start_us) for each in came],
        held=_holdings(reports, moment),
        now=list(_Reasons(cell, found, seen, moment).all()),
    )


def _phases(cell: Cell, seen: _Seen) -> list[Event]:
    if role(cell) == "away":
        told = (seen.last.get(f"cell.{verb} {seen.cell}") for verb in ("withdrawn", "lost"))
        return [*seen.came, *sorted(filter(None, told), key=lambda each: each.seq)[-1:]]
    return seen.came


def _holdings(reports: Sequence[_Report], moment: Moment) -> list[Holding]:
    now_us = max(moment.now_us, moment.event.time_us)
    return [
        Holding(cited=cite(each.event, moment.start_us), seconds=((each.until_us or now_us) - each.event.time_us) / 1e6)
        for each in reports
    ]


def _decided(event: Event) -> bool:
    return event.kind == "cell.role-transition" and event.data.phase == "decided"


class _Reasons:
    """What keeps the cell where it is at the moment."""

    def __init__(self, name: str, cell: Cell, seen: _Seen, moment: Moment) -> None:
        self._name, self._cell, self._seen, self._moment = name, cell, seen, moment
        self._state: State = moment.state

    def all(self) -> Iterator[Because]:
        state = self._state
        if state.finished:
            yield self._because("the run is over", "run.finished")
            return
        place = role(self._cell)
        if self._cell.pool:
            yield self._because("an engine of the separate pool serves, and never trains", f"cell.joined {self._name}")
        elif place == "rollout":
            yield from self._serves()
        elif place == "away":
            yield from self._away()
        elif place in ("leaving", "returning"):
            yield from self._moves()
        elif place == "training":
            yield from self._trains()
        else:
            yield from self._out()

    def _because(self, text: str, *kinds: str, checks: Sequence[Check] = (), events: Sequence[Event] = ()) -> Because:
        told = [self._seen.last[kind] for kind in kinds if kind in self._seen.last]
        cited = {each.seq: each for each in [*told, *events]}
        return Because(
            text=text,
            checks=list(checks),
            cited=[cite(each, self._moment.start_us) for _, each in sorted(cited.items())],
        )

    def _serves(self) -> Iterator[Because]:
        """In the order in which the scheduler looks: the first sentence is enough to keep it."""
        state, burst = self._state, self._state.burst
        most = state.rules.cells.trainers(state.added)
        if self._cell.index >= most:
            yield self._because(f"only the first {most} cells may train (cells.trainable)", "run.started")
            return
        if state.paused:
            yield self._because("an operator paused the run: no cell joins training", "run.paused")
        if burst is None:
            yield self._because("no burst is open", "burst.ended")
        elif burst.done == burst.steps:
            text = f"all {burst.steps} steps of {burst.id} are made: nobody joins before the next burst"
            yield self._because(text, "batch.stepped", "weights.exposed")
        if state.recall:
            text = f"cells of the burst that ended go back first: {', '.join(state.recall)}"
            yield self._because(text, "burst.ended")
        moving = sorted(state.index.moving, key=order_of)
        if moving:
            told = [self._seen.moving[name] for name in moving if name in self._seen.moving]
            yield self._because(f"{', '.join(moving)} is on its way, and one moves at a time", events=told)
        if burst is not None and burst.done < burst.steps:
            yield from self._gate()

    def _gate(self) -> Iterator[Because]:
        state, seen, strategy = self._state, self._seen, strategy_of(self._state)
        names = strategy.joining(state)
        following = names[0] if names else cell_id(state.index.prefix)
        if self._name not in names and self._name != following:
            yield self._because(f"cells join in the order of their indices: {following} is next")
        if not names:
            if following not in state.index.moving:
                text = f"{following} cannot train now, and nobody joins above it"
                kinds = [f"cell.{verb} {following}" for verb in ("withdrawn", "lost", "role-transition")]
                yield self._because(text, *kinds)
            return
        who = "it" if self._name in names else following
        report = f"cell.held {following}"
        said = [report] if state.held[0] == following else []
        checks = strategy.gate(state, names)
        for check in checks:
            if not check.holds:
                changed = [seen.changed[name] for name in _SIDES.get(check.rule, ()) if name in seen.changed]
                text = f"{check.rule} holds {who} back"
                yield self._because(text, *said, checks=[check], events=changed)
        if strategy.supplied and not state.supply_held:
            yield from self._timer(who, said)
        elif all(each.holds for each in checks):
            yield self._because(f"nothing holds {who} back any more: it is decided on this event", *said, checks=checks)

    def _timer(self, who: str, said: list[str]) -> Iterator[Because]:
        state, tau_s = self._state, self._state.rules.scheduler.tau_s
        if not state.supply_timer:
            text = f"and no supply timer is armed: the supply must hold for tau ({duration(tau_s)}) first"
            yield self._because(text, "timer.set", "timer.fired")
            return
        since_us = state.supply_due_us - round(tau_s * 1e6)
        check = eq.supplied_for(since_us=since_us, now_us=self._moment.now_us, tau_s=tau_s)
        left = duration(max(0.0, tau_s - check.left))
        text = f"the supply has not held for tau yet: timer {state.supply_timer} holds {who} back, due in {left}"
        # Whatever the clock says, it lasted when its timer has fired.
        yield self._because(text, "timer.set", *said, checks=[msgspec.structs.replace(check, holds=False)])

    def _away(self) -> Iterator[Because]:
        cell = self._cell
        if cell.withdrawn:
            text = f"an operator withdrew it; {cell.load} executions are still on it"
            yield self._because(text, f"cell.withdrawn {self._name}")
        if cell.lost:
            text = f"its {cell.lost} process does not answer: it counts again once another joins"
            yield self._because(text, f"cell.lost {self._name}")
        if cell.reserved:
            yield self._because("the fixed split keeps it for training: it serves nobody", "run.started")

    def _moves(self) -> Iterator[Because]:
        cell, phase = self._cell, self._seen.came[-1].data.phase
        goal = "training" if cell.place == "leaving" else "rollout"
        if cell.arrived:
            below = [name for name in self._state.index.moving if order_of(name) < order_of(self._name)]
            text = f"it has arrived; {', '.join(below) or 'the scheduler'} has to complete the way to {goal} first"
        elif cell.place == "leaving" and phase in ("decided", "draining"):
            text = f"on its way to {goal}: it said {phase} last, and empties ({cell.load} executions are still on it)"
        else:
            text = f"on its way to {goal}: it said {phase} last, and the next phase is still to be said"
        yield self._because(text, events=self._seen.came[-1:])

    def _trains(self) -> Iterator[Because]:
        state, burst = self._state, self._state.burst
        ended = self._seen.last.get("burst.ended")
        if self._name in state.recall:
            text = f"the burst ended; it goes back to rollout, highest index first: {', '.join(reversed(state.recall))}"
            yield self._because(text, "burst.ended", checks=state.recall_reason)
            return
        if ended is not None and self._name in ended.data.stays and ended.seq > self._seen.came[-1].seq:
            yield self._because("it stayed in training when the last burst ended", "burst.ended")
        if burst is None:
            yield self._because("no burst is open")
        elif burst.done < burst.steps:
            text = (
                f"{burst.id} goes on: {burst.done} of {burst.steps} steps are made; cells that train stay until its end"
            )
            yield self._because(text, "burst.opened", "batch.opened")
        else:
            text = f"all {burst.steps} steps of {burst.id} are made; it goes back once every engine has version {state.version}"
            yield self._because(text, "batch.stepped", "weights.exposed")

    def _out(self) -> Iterator[Because]:
        cell = self._cell
        if cell.lost:
            text = f"its {cell.lost} process does not answer: it goes back to rollout once another joins"
            yield self._because(text, f"cell.lost {self._name}")
        else:
            text = "it was put out of training, and goes back to rollout when no other cell moves"
            others = [event for name, event in self._seen.moving.items() if name != self._name]
            yield self._because(text, events=[*self._seen.came[-1:], *others])


_SIDES = {
    eq.WATERLEVEL: ("w", "C_R"),
    "held-out executions fit": ("w", "C_R"),
    "supply rho_min B": ("supply",),
}
"""Rule to the quantities on its sides."""
