"""The scheduler's state along a recorded log, event by event, as it had it when it decided.

    input n ──> its recorded decisions, one by one ──> input n + 1 ──> ...

That is the decider's order, not quite the log's: an input may be stored before the answers to an earlier one. Nothing is
decided again, `gyre replay` does that. Invariant: after the last decision on an input the state is the one that the
decider had then.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime

import msgspec

from replay.logfile import Log
from replay.shadow import WINDOW
from replay.timeline.notes import duration
from schemas.envelope import Event
from schemas.errors import ConfigError, LogBroken
from services.mesh.decider import Driver
from services.mesh.shell import as_decision
from services.scheduler.core.state import State
from services.scheduler.decider import Scheduler

_UNITS = {"d": 86_400.0, "h": 3600.0, "min": 60.0, "m": 60.0, "s": 1.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)(d|h|min|m|s)")


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """The state right after one event. It changes with the next: read it, don't keep it."""

    event: Event
    cause: Event | None
    """The input that a decision answers; None where the event is an input itself."""
    state: State
    now_us: int
    """The scheduler's present: latest stored time of its inputs."""
    start_us: int
    """Stored time of the log's first event."""

    @property
    def time_s(self) -> float:
        """Of the event, since the log's first."""
        return (self.event.time_us - self.start_us) / 1e6


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """What a log covers."""

    first: int
    last: int
    """Sequences."""
    start_us: int
    end_us: int

    def __str__(self) -> str:
        began = datetime.fromtimestamp(self.start_us / 1e6, UTC)
        took = duration((self.end_us - self.start_us) / 1e6)
        return f"sequences {self.first} to {self.last}, {took} from {began:%Y-%m-%dT%H:%M:%SZ}"


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """A place in a log: a sequence, a time since its beginning, or a time of the calendar. One of the three is there."""

    text: str
    seq: int = 0
    since_us: int = -1
    time_us: int = -1

    def at_us(self, start_us: int) -> int:
        return self.time_us if self.time_us >= 0 else start_us + self.since_us


def point(text: str) -> Point:
    """`1234`, `1h30m`, `+90s`, `2026-01-02T03:04:05Z`. Raises ConfigError for anything else."""
    text = text.strip()
    if text.isdecimal() and text.isascii():
        return Point(text=text, seq=int(text))
    bare = text.removeprefix("+").replace(" ", "")
    if bare and not _PART.sub("", bare):
        seconds = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(bare))
        return Point(text=text, since_us=round(seconds * 1e6))
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"{text!r} is no place in a log",
            where="--at",
            remedy="give a sequence (1234), a time since the start (1h30m, 90s), or a date (2026-01-02T03:04:05Z, UTC)",
        ) from None
    return Point(text=text, time_us=round(found.replace(tzinfo=found.tzinfo or UTC).timestamp() * 1e6))


class Walk:
    """Goes along a log. `ahead` is the event that `step` applies next.

    >>> walk = Walk(log)
    >>> while (moment := walk.step()) is not None:
    ...     moment.event.kind, moment.state.d - moment.state.f
    """

    def __init__(self, events: Iterable[Event]) -> None:
        self.driver: Driver[State] = Driver(Scheduler())
        self.first: Event | None = None
        self.last: Event | None = None
        """Of the log, as far as it was read."""
        self._ordered = self._order(events)
        self._at: Event | None = None
        self._next = next(self._ordered, None)

    def __repr__(self) -> str:
        return f"<Walk [input {self.driver.position}] {self.driver.state!r}>"

    def __iter__(self) -> Iterator[Moment]:
        while (moment := self.step()) is not None:
            yield moment

    @property
    def ahead(self) -> Event | None:
        return self._next[0] if self._next is not None else None

    @property
    def answers(self) -> Event | None:
        """The input that `ahead` is a decision on; None where it is none."""
        return self._next[1] if self._next is not None else None

    @property
    def span(self) -> Span:
        """Of what was read."""
        assert self.first is not None and self.last is not None
        return Span(first=self.first.seq, last=self.last.seq, start_us=self.first.time_us, end_us=self.last.time_us)

    def step(self) -> Moment | None:
        """Applies the next event; None at the end. Raises LogBroken where the state cannot follow it."""
        if self._next is None:
            return None
        event, cause = self._next
        try:
            if cause is None:
                self._at = self.driver.arrive(event)
            else:
                self.driver.apply(as_decision(event), self._at or cause)
        except LogBroken:
            raise
        # A decider takes whatever a running mesh can say; here the log may hold anything.
        except Exception as error:
            raise LogBroken(
                f"the scheduler's state cannot follow {event.kind} {event.entity}: {type(error).__name__} {error}",
                where=f"sequence {event.seq}",
                remedy="see what is wrong with the log with `gyre check`",
            ) from error
        self._next = next(self._ordered, None)
        assert self.first is not None
        return Moment(
            event=event,
            cause=cause,
            state=self.driver.state,
            now_us=self.driver.now_us,
            start_us=self.first.time_us,
        )

    def end(self, *, see: Callable[[Moment], None] | None = None) -> Moment:
        """The last moment of the log; `see` gets every one. Raises ConfigError when there is none."""
        moment: Moment | None = None
        while (following := self.step()) is not None:
            moment = following
            if see is not None:
                see(moment)
        if moment is None:
            raise _empty()
        return moment

    def to(self, point: Point, *, before: bool = False, see: Callable[[Moment], None] | None = None) -> Moment:
        """The moment at the point: after the event with that sequence, or after the last that was stored by that time.
        With `before`, the moment before it. `see` gets every moment until there. Raises ConfigError when the log doesn't
        reach there."""
        moment: Moment | None = None
        while (ahead := self.ahead) is not None:
            assert self.first is not None
            if (
                point.seq
                and moment is not None
                and (moment.event.seq == point.seq or (before and ahead.seq == point.seq))
            ):
                return moment
            if not point.seq and ahead.time_us > point.at_us(self.first.time_us):
                if moment is None:
                    raise _outside(point, self._whole())
                return moment
            moment = self.step()
            if see is not None and moment is not None:
                see(moment)
        span = self.span if self.first is not None else None
        if moment is None or span is None:
            raise _empty()
        if point.seq == moment.event.seq or (not point.seq and point.at_us(span.start_us) <= span.end_us):
            return moment
        raise _outside(point, span)

    def _whole(self) -> Span:
        for _ in self._ordered:
            pass
        return self.span

    def _order(self, events: Iterable[Event]) -> Iterator[tuple[Event, Event | None]]:
        waiting: deque[Event] = deque()
        cause: Event | None = None
        is_input = self.driver.is_input
        for event in events:
            self.first = self.first or event
            self.last = event
            if is_input(event):
                waiting.append(event)
                # An answer that comes later still is applied where it lies.
                if len(waiting) <= WINDOW:
                    continue
                cause = waiting.popleft()
                yield cause, None
            else:
                while waiting and waiting[0].seq <= event.causation:
                    cause = waiting.popleft()
                    yield cause, None
                yield event, cause or event
        for event in waiting:
            yield event, None


def _empty() -> ConfigError:
    return ConfigError("the log holds no event", where="--at", remedy="export a run that has begun")


def check_inside(log: Log, point: Point) -> None:
    """Raises ConfigError when the log doesn't reach there, without reading it."""
    m = log.manifest
    if not point.seq and not m.last_us:
        # Logs of before don't say when they end: whoever walks there finds out.
        return
    span = Span(first=m.first_seq, last=m.last_seq, start_us=m.first_us, end_us=m.last_us)
    if point.seq:
        inside = m.first_seq <= point.seq <= m.last_seq
    else:
        inside = m.first_us <= point.at_us(m.first_us) <= m.last_us
    if not inside:
        raise _outside(point, span)


def _outside(point: Point, span: Span) -> ConfigError:
    return ConfigError(f"{point.text} is outside of the log", where="--at", remedy=f"it covers {span}")
