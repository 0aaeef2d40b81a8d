"""Decide again: feeds a recorded log to the deciders and compares every decision with the recorded one.

    >>> log = replay.read("run.gyre")
    >>> result = Replayer().replay(log)
    >>> result.first is None
    True
    >>> for step in Replayer(deciders=[Scheduler()]).steps(log):     # input by input, with the state after each
    ...     step.event.kind, step.state.d - step.state.f

A divergence is a value, not an exception. Reading streams: memory doesn't grow with the log. `replay.shadow` says how one
decider is followed, `replay.divergence` what is told of a difference.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec

from replay.admission import KINDS as ADMITTING
from replay.admission import Admission, Draws
from replay.causes import Codes, by_schema
from replay.divergence import Divergence
from replay.logfile import Log
from replay.shadow import Shadow
from replay.steps import DeciderResult, Step
from schemas import events as e
from schemas.envelope import Event
from schemas.errors import ConfigError
from services.mesh.decider import Decider

DECIDERS = {
    "scheduler": "services.scheduler.decider:Scheduler",
    "trajectories": "services.trajectories.core.outcome:Outcome",
    "packer": "services.packer.core.packing:Packer",
}
"""Where the decider of each deciding service is."""
_CODES = {"run.started", "run.continued"}
"""Kinds that tell which code recorded what follows."""
_BLOCK = 2048
"""Events that are fed at a time: deciders stay in the processor's caches."""


class ReplayResult(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a log, or of what there is of it so far."""

    events: int
    recorded_by: list[str]
    """Identities of the code that ran."""
    deciders: list[DeciderResult]
    admission: Draws | None
    """The draws of admission; None when the outcome decider isn't replayed, or from a snapshot."""

    @property
    def ok(self) -> bool:
        return not any(each.divergences for each in self._parts())

    @property
    def divergences(self) -> int:
        return sum(each.divergences for each in self._parts())

    @property
    def first(self) -> Divergence | None:
        """The earliest divergence in the log."""
        found = [each.first for each in self._parts() if each.first]
        # Of two at the same place the first: whoever decides tells more than the draws alone.
        return min(found, key=lambda each: each.recorded_seq or each.seq, default=None)

    def _parts(self) -> list[DeciderResult | Draws]:
        return [*self.deciders, *([self.admission] if self.admission is not None else [])]


class Replay:
    """A log being replayed: `feed` it every event in order, then `end`. `Replayer` does both for what is recorded."""

    def __init__(
        self, deciders: Sequence[Decider[Any]], *, snapshots: Mapping[str, bytes] | None = None, code: str = ""
    ) -> None:
        known = snapshots or {}
        self.shadows = {each.name: Shadow(each, snapshot=known.get(each.name)) for each in deciders}
        self._admission = Admission() if "trajectories" in self.shadows and not known else None
        self._seen = _CODES if self._admission is None else _CODES | ADMITTING
        self._events = 0
        self._code = code
        self._recorded_by: list[str] = []

    def __repr__(self) -> str:
        return f"<Replay [{self._events} events] {list(self.shadows.values())}>"

    @property
    def found(self) -> list[Divergence]:
        """So far: of each decider the first few, of admission the first."""
        drawn = self._admission.first if self._admission is not None else None
        told = [each for shadow in self.shadows.values() for each in shadow.divergences]
        return told if drawn is None else [*told, drawn]

    def feed(self, events: Sequence[Event]) -> None:
        """The next events of LOG. Faster for some hundreds at a time than for one."""
        begin, seen = 0, self._seen
        for index, event in enumerate(events):
            if event.kind in seen:
                if event.kind in _CODES:
                    self._feed(events[begin:index])
                    begin = index
                self._see(event)
        self._feed(events[begin:] if begin else events)

    def _feed(self, events: Sequence[Event]) -> None:
        self._events += len(events)
        for shadow in self.shadows.values():
            shadow.follow(events)

    def steps(self, event: Event) -> Iterator[Step]:
        """The next event of LOG, and the steps that are complete now: take all of them."""
        self._events += 1
        self._see(event)
        for shadow in [each for each in self.shadows.values() if each.wants(event)]:
            while shadow.advance(each=True):
                yield shadow.step()

    def end(self) -> Iterator[Step]:
        """The log is over, or what there is of it: the steps that were not complete."""
        for shadow in self.shadows.values():
            shadow.end()
            while shadow.advance(each=True):
                yield shadow.step()

    def _see(self, event: Event) -> None:
        if event.owner == "operator" and isinstance(event.data, e.RunStarted | e.RunContinued):
            self._recorded_by.append(event.data.code)
            for shadow in self.shadows.values():
                shadow.codes = Codes(recorded=event.data.code, replaying=self._code)
        if self._admission is not None:
            self._admission.see(event)

    def result(self) -> ReplayResult:
        """As far as the log was read."""
        return ReplayResult(
            events=self._events,
            recorded_by=list(self._recorded_by),
            deciders=[shadow.result() for shadow in self.shadows.values()],
            admission=self._admission.result() if self._admission is not None else None,
        )


class Replayer:
    """Replays logs for a set of deciders; for all of the mesh's when none are given.

    `code` is the identity of the code that replays: a difference is laid to it where the run was recorded by another.
    `snapshots` (decider to `Step.snapshot`) begin in the middle: what lies before is passed over.
    """

    def __init__(
        self,
        *,
        deciders: Sequence[Decider[Any]] | None = None,
        snapshots: Mapping[str, bytes] | None = None,
        code: str = "",
    ) -> None:
        self._deciders = load_deciders() if deciders is None else deciders
        self._snapshots, self._code = snapshots, code

    def begin(self) -> Replay:
        """For a log that comes event by event."""
        return Replay(self._deciders, snapshots=self._snapshots, code=self._code)

    def steps(self, log: Iterable[Event]) -> Iterator[Step]:
        """Each input of each decider, once everything that was decided on it is known. Those of one decider come in the
        order of the log. Without a snapshot the log must be whole from its first event on."""
        replay = self.begin()
        for event in log:
            yield from replay.steps(event)
        yield from replay.end()

    def replay(self, log: Iterable[Event]) -> ReplayResult:
        """The whole log. Raises BadLogFile when it comes from a file that is damaged."""
        replay = self.begin()
        for block in _blocks(log):
            replay.feed(block)
        for _ in replay.end():
            pass
        result = replay.result()
        return _with_schema(result, log) if isinstance(log, Log) else result


def load_deciders(names: Iterable[str] = DECIDERS) -> list[Decider[Any]]:
    """Fresh deciders by the names of their services."""
    found: list[Decider[Any]] = []
    for name in names:
        if name not in DECIDERS:
            raise ConfigError(f"no decider is called {name!r}", remedy=f"choose from {', '.join(DECIDERS)}")
        module, _, cls = DECIDERS[name].partition(":")
        found.append(getattr(importlib.import_module(module), cls)())
    return found


def _blocks(log: Iterable[Event]) -> Iterator[list[Event]]:
    events = iter(log)
    while block := list(islice(events, _BLOCK)):
        yield block


def _with_schema(result: ReplayResult, log: Log) -> ReplayResult:
    """With first divergences laid to the schema where the bytes in the file say so."""
    deciders = [
        msgspec.structs.replace(each, first=by_schema(each.first, log.data_of(each.first.recorded_seq)))
        if each.first is not None
        else each
        for each in result.deciders
    ]
    return msgspec.structs.replace(result, deciders=deciders)
