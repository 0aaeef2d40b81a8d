"""Decide again: feeds a recorded log to the deciders and compares every decision with the recorded one.

For each input the recorded decisions are those that name it as their cause. The state goes on from the recorded ones,
so one difference doesn't hide what follows; where the state cannot follow a recorded decision, that decider's replay
stops there and says so. A divergence is a value, not an exception.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from schemas.envelope import Decision, Event
from schemas.errors import ConfigError
from services.mesh.decider import Decider, Driver, Mismatch, same

DECIDERS = {
    "scheduler": "services.scheduler.decider:Scheduler",
    "trajectories": "services.trajectories.core.outcome:Outcome",
    "packer": "services.packer.core.packing:Packer",
}
"""Where the decider of each deciding service is."""

_KEPT = 20


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One field in which two decisions differ."""

    path: str
    expected: Any
    """As recorded."""
    actual: Any
    """As computed."""


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """A decision that is not taken again as it was recorded."""

    decider: str
    seq: int
    """Sequence of the input on which it was taken."""
    input_kind: str
    input_entity: str
    index: int
    """Number of the decision among those taken on that input, from 0."""
    recorded_seq: int
    """Where the recorded decision lies in the log; 0 when there is none."""
    expected: Decision | None
    """As recorded; None where nothing more was recorded."""
    actual: Decision | None
    """As computed; None where nothing more is decided."""
    differences: list[Difference]

    def __str__(self) -> str:
        place = f"{self.decider}, decision {self.index} on input {self.seq} ({self.input_kind} {self.input_entity})"
        at = f" at sequence {self.recorded_seq}" if self.recorded_seq else ""
        lines = [
            f"{place}:",
            f"  recorded{at}: {_short(self.expected)}",
            f"  computed: {_short(self.actual)}",
        ]
        lines += [f"    {each.path}: recorded {each.expected!r}, computed {each.actual!r}" for each in self.differences]
        return "\n".join(lines)


class DeciderResult(msgspec.Struct, frozen=True, kw_only=True):
    """How one decider fared."""

    decider: str
    inputs: int
    recorded: int
    """Decisions in the log."""
    same: int
    """Recorded decisions that were taken again, in their place and byte for byte."""
    unrecorded: int
    """Decisions computed for the newest inputs, which the log ends too early to hold."""
    divergences: int
    first: Divergence | None
    others: list[Divergence]
    """Further ones, at most a few."""
    stopped: str = ""
    """Why the rest of the log could not be replayed; empty when it was replayed to its end."""


class ReplayResult(msgspec.Struct, frozen=True, kw_only=True):
    deciders: list[DeciderResult]
    events: int

    @property
    def ok(self) -> bool:
        return not any(each.divergences for each in self.deciders)

    @property
    def first(self) -> Divergence | None:
        """The earliest divergence in the log."""
        found = [each.first for each in self.deciders if each.first]
        return min(found, key=lambda each: (each.seq, each.index), default=None)


class Replayer:
    """Replays a log for a set of deciders.

    >>> result = Replayer(deciders=load_deciders()).replay(read_events(path))
    >>> result.first is None
    True
    """

    def __init__(self, *, deciders: Sequence[Decider[Any]]) -> None:
        self._deciders = deciders

    def replay(self, events: Sequence[Event]) -> ReplayResult:
        """The log must be whole from its first event on."""
        return ReplayResult(
            deciders=[_replay_one(decider, events) for decider in self._deciders],
            events=len(events),
        )


def load_deciders(names: Iterable[str] = DECIDERS) -> list[Decider[Any]]:
    """Fresh deciders by the names of their services."""
    found: list[Decider[Any]] = []
    for name in names:
        if name not in DECIDERS:
            raise ConfigError(f"no decider is called {name!r}", remedy=f"choose from {', '.join(DECIDERS)}")
        module, _, cls = DECIDERS[name].partition(":")
        found.append(getattr(importlib.import_module(module), cls)())
    return found


def _replay_one(decider: Decider[Any], events: Sequence[Event]) -> DeciderResult:
    driver: Driver[Any] = Driver(decider)
    recorded = _by_cause(driver, events)
    total = sum(len(group) for group in recorded.values())
    newest = max(recorded, default=0)
    pending = set(recorded)
    inputs = agreed = unrecorded = 0
    found: list[Divergence] = []
    stopped = ""
    for event in events:
        if not driver.is_input(event):
            continue
        inputs += 1
        pending.discard(event.seq)
        known = recorded.get(event.seq, [])
        expected = [_decision(each) for each in known]
        # Beyond the newest input that was answered the log may simply end before the answers.
        tail = event.seq >= newest
        try:
            mismatch, computed = driver.compare(event, expected, apply_unrecorded=tail)
        except Exception as error:  # whatever a decider makes of a decision that it would never have taken
            mismatch, computed = _locate(decider, events, recorded, event), []
            stopped = f"the state cannot follow what is recorded on input {event.seq}: {type(error).__name__}: {error}"
        agreed += mismatch.index if mismatch else len(expected)
        if mismatch is not None and tail and mismatch.expected is None:
            unrecorded += len(computed) - len(expected)
        elif mismatch is not None:
            found.append(_divergence(decider.name, event, mismatch, known))
        if stopped:
            break
    if not stopped:
        found += [_orphan(decider.name, seq, recorded[seq][0]) for seq in sorted(pending)]
    found.sort(key=lambda each: (each.seq, each.index))
    return DeciderResult(
        decider=decider.name,
        inputs=inputs,
        recorded=total,
        same=agreed,
        unrecorded=unrecorded,
        divergences=len(found),
        first=found[0] if found else None,
        others=found[1:_KEPT],
        stopped=stopped,
    )


def _by_cause(driver: Driver[Any], events: Sequence[Event]) -> dict[int, list[Event]]:
    recorded: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if not driver.is_input(event):
            recorded[event.causation].append(event)
    return dict(recorded)


def _locate(decider: Decider[Any], events: Sequence[Event], recorded: dict[int, list[Event]], at: Event) -> Mismatch:
    """The first difference on an input whose recorded decisions the state cannot take: decided anew from before it."""
    driver: Driver[Any] = Driver(decider)
    for event in events:
        if event.seq < at.seq and driver.is_input(event):
            driver.feed_recorded(event, [_decision(each) for each in recorded.get(event.seq, [])])
    computed = driver.feed(at)
    expected = [_decision(each) for each in recorded.get(at.seq, [])]
    index = next(
        (i for i, (left, right) in enumerate(zip(expected, computed, strict=False)) if not same(left, right)),
        min(len(expected), len(computed)),
    )
    return Mismatch(
        seq=at.seq,
        index=index,
        expected=expected[index] if index < len(expected) else None,
        actual=computed[index] if index < len(computed) else None,
    )


def _divergence(name: str, event: Event, mismatch: Mismatch, known: Sequence[Event]) -> Divergence:
    return Divergence(
        decider=name,
        seq=event.seq,
        input_kind=event.kind,
        input_entity=event.entity,
        index=mismatch.index,
        recorded_seq=known[mismatch.index].seq if mismatch.index < len(known) else 0,
        expected=mismatch.expected,
        actual=mismatch.actual,
        differences=differences(mismatch.expected, mismatch.actual),
    )


def _orphan(name: str, seq: int, event: Event) -> Divergence:
    """A recorded decision whose cause is no input: nobody can have taken it."""
    return Divergence(
        decider=name,
        seq=seq,
        input_kind="no input of this decider",
        input_entity="",
        index=0,
        recorded_seq=event.seq,
        expected=_decision(event),
        actual=None,
        differences=[],
    )


def differences(expected: Decision | None, actual: Decision | None) -> list[Difference]:
    """Field by field; empty when one of the two is absent."""
    if expected is None or actual is None:
        return []
    return list(_differences("", msgspec.to_builtins(expected), msgspec.to_builtins(actual)))


_ABSENT = "(absent)"


def _differences(path: str, expected: Any, actual: Any) -> Iterable[Difference]:
    if isinstance(expected, dict) and isinstance(actual, dict):
        for key in sorted({*expected, *actual}, key=str):
            inner = f"{path}.{key}" if path else str(key)
            yield from _differences(inner, expected.get(key, _ABSENT), actual.get(key, _ABSENT))
    elif isinstance(expected, list) and isinstance(actual, list):
        for index in range(max(len(expected), len(actual))):
            left = expected[index] if index < len(expected) else _ABSENT
            right = actual[index] if index < len(actual) else _ABSENT
            yield from _differences(f"{path}[{index}]", left, right)
    elif expected != actual or type(expected) is not type(actual):
        yield Difference(path=path, expected=expected, actual=actual)


def _decision(event: Event) -> Decision:
    return Decision(kind=event.kind, entity=event.entity, data=event.data)


def _short(decision: Decision | None) -> str:
    if decision is None:
        return "nothing"
    text = msgspec.json.encode(decision.data).decode()
    return f"{decision.kind} {decision.entity} {text if len(text) < 400 else text[:400] + '...'}"
