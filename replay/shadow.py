"""A second decider that follows a log and decides again: over a file, or beside a run that goes on.

    input n ──> waits ──> open: arrives, decides ──> each recorded decision of n is compared with the next computed
                            └─ a recorded decision of a later input closes it: whatever was computed beyond is extra

A decider answers its inputs in order, so an input is complete when a later one is answered; until then it waits. The
state goes on from the recorded decisions, so one difference doesn't hide what follows; where the state cannot follow
one, the shadow stops there and says so. At the end of the log what is computed beyond it is `unrecorded`: the log may
simply end before the answers.

Memory is bounded by `window` (inputs that wait for an answer; beyond, those on which nothing is decided pass) and by the
inputs since the last mark, a snapshot from which the state before any of them can be made again.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from replay.causes import Codes, decisions_of, explain, repeats, says
from replay.divergence import Divergence, Reason, Shape, cut, differences, shape_of
from replay.steps import Count, DeciderResult, Opened, Step
from schemas.envelope import Decision, Event
from schemas.kinds import KINDS
from services.mesh.decider import Decider, Driver
from services.mesh.shell import as_decision

S = TypeVar("S", bound=msgspec.Struct)

WINDOW = 4096
"""Inputs that wait for their answers."""
KEPT = 20
_END = 1 << 62
EXPLAINED = 5
"""Divergences of a decider whose reasons are looked for; of further ones the shape is told."""
_MARK_LEAST, _MARK_MOST, _MARK_BYTES = 2048, 65_536, 32
"""Inputs between two marks: at least, at most, and bytes of state for each, so that marks cost little at any size."""


class Shadow(Generic[S]):
    """Follows one decider. Feed it every event of a log, in order; after the last, `end` and once more `advance`.

    >>> if shadow.wants(event):
    ...     shadow.advance()          # or: while shadow.advance(each=True): look(shadow.step())

    `snapshot` starts it in the middle: events up to its position are passed over.
    """

    def __init__(self, decider: Decider[S], *, snapshot: bytes | None = None, window: int = WINDOW) -> None:
        self.driver: Driver[S] = Driver(decider)
        if snapshot is not None:
            self.driver.restore(snapshot)
        self.codes = Codes()
        """Who recorded what comes next, and who replays."""
        self.divergences: list[Divergence] = []
        """The first few, in the order in which they were found."""
        self.stopped = ""
        self._name, self._window = decider.name, window
        self._decisions = {kind.name for kind in KINDS.values() if kind.owners.get(decider.name) == "decision"}
        self._begin_after = self.driver.position
        self._waiting: deque[Event] = deque()
        self._answer: Event | None = None
        self._over = False
        self._open: Opened | None = None
        self._last: Opened | Event | None = None
        self._inputs = self._recorded = self._same = self._unrecorded = self._found = 0
        self._kinds: defaultdict[str, Count] = defaultdict(Count)
        self._since: list[tuple[Event, Sequence[Event]]] = []
        self._set_mark()

    def __repr__(self) -> str:
        return f"<Shadow {self._name} [input {self.driver.position}, {len(self._waiting)} wait, {self._found} diverge]>"

    @property
    def waiting(self) -> int:
        """Inputs whose answers aren't known to be complete."""
        return len(self._waiting)

    def wants(self, event: Event) -> bool:
        """Takes the event; true when `advance` has something to do now."""
        if event.owner == self._name and event.kind in self._decisions:
            if 0 < event.causation <= self._begin_after:
                return False
            self._kinds[event.kind].recorded += 1
            self._recorded += 1
            self._answer = event
            return True
        if event.seq > self._begin_after and not self.stopped:
            self._waiting.append(event)
        return len(self._waiting) > self._window

    def follow(self, events: Sequence[Event]) -> None:
        """Takes the events and goes on as far as the log is known."""
        name, decisions, begin_after, take = self._name, self._decisions, self._begin_after, self._waiting.append
        for event in events:
            if event.owner != name or event.kind not in decisions:
                if event.seq > begin_after:
                    take(event)
            elif self.wants(event):
                opened = self._open
                if opened is not None and opened.event.seq == event.causation:
                    # Most often: one more decision on the input in hand.
                    self._answer = None
                    self._compare(event)
                else:
                    self.advance()
        if self.stopped:
            self._waiting.clear()
        elif len(self._waiting) > self._window:
            self.advance()

    def end(self) -> None:
        """The log is over, or what there is of it: `advance` takes what waits as far as it can be decided."""
        self._over = True

    def advance(self, *, each: bool = False) -> bool:
        """Goes on as far as the log is known. With `each` to the end of one input: true when it came to one."""
        answer, waiting = self._answer, self._waiting
        if self.stopped:
            return False
        until = answer.causation if answer is not None else _END if self._over else 0
        while True:
            opened = self._open
            if opened is not None:
                if opened.event.seq >= until and not (until == 0 and self._goes_by(opened)):
                    break
                self._close(opened)
            elif waiting and (waiting[0].seq < until or (until == 0 and len(waiting) > self._window)):
                self._take(until or waiting[-self._window].seq, most=1 if each else _END)
                if self._open is not None:
                    continue
            else:
                break
            if each or self.stopped:
                return each
        self._answer = None
        if answer is None:
            return False
        if self._open is None and waiting and waiting[0].seq == until:
            self._begin(waiting.popleft())
        if not self.stopped:
            self._compare(answer)
        return each and bool(self.stopped)

    def step(self) -> Step:
        """The input to whose end `advance(each=True)` came."""
        last = self._last
        assert last is not None, "advance(each=True) was true"
        opened = last if isinstance(last, Opened) else Opened(last)
        return Step(
            decider=self._name,
            event=opened.event,
            recorded=opened.recorded,
            unrecorded=opened.beyond,
            divergence=opened.divergence,
            driver=self.driver,
        )

    def result(self) -> DeciderResult:
        """How it fared so far."""
        return DeciderResult(
            decider=self._name,
            inputs=self._inputs,
            recorded=self._recorded,
            same=self._same,
            unrecorded=self._unrecorded,
            divergences=self._found,
            first=self.divergences[0] if self.divergences else None,
            others=self.divergences[1:],
            kinds=dict(sorted(self._kinds.items())),
            stopped=self.stopped,
        )

    def before(self) -> Driver[S]:
        """A driver of its own in the state before the input in hand; after the last one when there is none."""
        driver: Driver[S] = Driver(self.driver.decider)
        driver.restore(self._mark)
        for event, recorded in self._since:
            driver.feed_recorded(event, recorded)
        return driver

    def _goes_by(self, opened: Opened) -> bool:
        """Too many wait: an input is taken for complete when nothing more is decided on it."""
        return len(self._waiting) > self._window and (opened.divergence is not None or opened.peek() is None)

    def _take(self, until: int, *, most: int) -> None:
        """Inputs before `until`, on which nothing was recorded: most decide nothing. One that does stays open."""
        waiting, since, driver, every = self._waiting, self._since, self.driver, self._every
        state, decide, arrive = driver.state, driver.decider.decide, driver.arrive
        began = len(since)
        most = most if self._over else min(most, every - began)
        while most > 0 and waiting and waiting[0].seq < until:
            event = waiting.popleft()
            most -= 1
            try:
                at = arrive(event)
                computed: Iterator[Decision] = iter(decide(state, at))
                first = next(computed, None)
            except Exception as error:  # as below
                self._inputs += 1
                self._stop(Opened(event), error)
                break
            if first is not None:
                self._inputs += 1
                self._open = Opened(event, at, computed, first)
                break
            since.append((event, ()))
            self._last = event
        self._inputs += len(since) - began
        if len(since) >= every and not self._over:
            self._set_mark()

    def _begin(self, event: Event) -> None:
        """An input on which something was recorded."""
        self._inputs += 1
        try:
            at = self.driver.arrive(event)
        except Exception as error:  # whatever a decider makes of a log that it would never have written
            self._stop(Opened(event), error)
            return
        self._open = Opened(event, at, iter(self.driver.decider.decide(self.driver.state, at)))

    def _compare(self, event: Event) -> None:
        """The next recorded decision of the input in hand."""
        opened = self._open
        if opened is None or opened.event.seq != event.causation:
            self._late(event)
            return
        try:
            if opened.divergence is None:
                actual = opened.next()
                if actual is not None and says(event, actual):
                    self._same += 1
                    self._kinds[event.kind].same += 1
                else:
                    opened.divergence = self._part(opened, event, actual)
            opened.recorded.append(event)
            self.driver.apply(event, opened.at)
        except Exception as error:  # as above
            self._stop(opened, error)

    def _close(self, opened: Opened) -> None:
        """Nothing more was recorded on the input; at the end of the log it may be what the log doesn't hold any more."""
        try:
            if opened.divergence is None:
                if self._over:
                    # Before the end, what is asked for is bounded by what was recorded.
                    while (beyond := opened.next()) is not None:
                        self.driver.bound(len(opened.beyond), beyond, opened.at)
                        self.driver.apply(beyond, opened.at)
                        opened.beyond.append(beyond)
                        self._unrecorded += 1
                elif (extra := opened.next()) is not None:
                    opened.divergence = self._part(opened, None, extra)
        except Exception as error:  # as above
            self._stop(opened, error)
            return
        self._open, self._last = None, opened
        self._since.append((opened.event, opened.recorded))
        if len(self._since) >= self._every and not self._over:
            self._set_mark()

    def _set_mark(self) -> None:
        self._mark = self.driver.snapshot()
        self._since.clear()
        self._every = min(max(len(self._mark) // _MARK_BYTES, _MARK_LEAST), _MARK_MOST)

    def _stop(self, opened: Opened, error: Exception) -> None:
        what = f"input {opened.event.seq}: {type(error).__name__}: {error}"
        if opened.divergence is None:
            self.stopped = f"the decider cannot go on at {what}"
            opened.divergence = self._part(opened, None, None, raised=what)
        else:
            self.stopped = f"the state cannot follow what is recorded on {what}"
        self._waiting.clear()
        self._open, self._last = None, opened

    def _part(
        self, opened: Opened, recorded: Event | None, actual: Decision | None, *, raised: str = ""
    ) -> Divergence:
        index, event = len(opened.recorded), opened.event
        expected = as_decision(recorded) if recorded is not None else None
        here = [as_decision(each) for each in opened.recorded]
        shape: Shape = "raised"
        reason: Reason = shape
        evidence = ""
        if self._found < EXPLAINED:
            base = self.before().snapshot()

            def before() -> Driver[S]:
                driver: Driver[S] = Driver(self.driver.decider)
                driver.restore(base)
                return driver

            if not raised:
                said = here if expected is None else [*here, expected]
                shape = shape_of(said, decisions_of(before(), event), index)
            reason, evidence = explain(
                before=before,
                event=event,
                index=index,
                shape=shape,
                expected=expected,
                actual=actual,
                here=here,
                earlier=[as_decision(each) for _, past in self._since for each in past],
                codes=self.codes,
            )
        return self._note(
            event=event,
            seq=event.seq,
            index=index,
            recorded=recorded,
            actual=actual,
            shape=shape,
            reason=reason,
            evidence=evidence or raised,
        )

    def _late(self, recorded: Event) -> None:
        """Its input was answered before, or is no input of this decider: nobody can have taken it. It isn't applied."""
        cause = recorded.causation
        event, past = next(((event, past) for event, past in self._since if event.seq == cause), (None, ()))
        twice = repeats(as_decision(recorded), [as_decision(each) for each in past], [])
        self._note(
            event=event,
            seq=cause,
            index=len(past),
            recorded=recorded,
            actual=None,
            shape="missing",
            reason="decided_twice" if twice else "missing",
            evidence="" if twice else "its input was answered before, or is none",
        )

    def _note(
        self, *, event: Event | None, seq: int, index: int, recorded: Event | None, actual: Decision | None, **why: Any
    ) -> Divergence:
        self._found += 1
        expected = as_decision(recorded) if recorded is not None else None
        state = None if self.divergences else self.before().state
        found = Divergence(
            decider=self._name,
            seq=seq,
            input=event,
            index=index,
            recorded_seq=recorded.seq if recorded is not None else 0,
            expected=expected,
            actual=actual,
            differences=differences(expected, actual),
            state=None if state is None else msgspec.to_builtins(state, order="deterministic"),
            state_text="" if state is None else cut(repr(state)),
            **why,
        )
        if len(self.divergences) <= KEPT:
            self.divergences.append(found)
        return found
