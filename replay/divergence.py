"""A decision that is not taken again as it was recorded: where, what, in which fields, from which state, and why likely.

`shape` is seen from the code that replays:

    different   both decide, and not the same
    missing     recorded, and not taken again
    extra       taken now, and not recorded
    raised      the decider ended with an exception
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from schemas.envelope import Decision, Event

Shape = Literal["different", "missing", "extra", "raised"]
Reason = Literal[
    "different", "missing", "extra", "raised", "decided_twice", "clock_or_randomness", "unordered", "schema", "code"
]
MEANINGS: dict[Reason, str] = {
    "different": "another decision",
    "missing": "a recorded decision is not taken any more",
    "extra": "a decision is taken that was not recorded",
    "raised": "the decider raised an exception",
    "decided_twice": "the same was decided before",
    "clock_or_randomness": "the decider touches the clock or randomness",
    "unordered": "the decider depends on the order of a set or a dict",
    "schema": "it was written with another schema",
    "code": "it was recorded by another version of the code",
}
_ABSENT = "(absent)"
_LONG = 400


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One field in which two decisions differ."""

    path: str
    expected: Any
    """As recorded."""
    actual: Any
    """As computed."""


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """The first decision on one input that is not taken again as it was recorded."""

    decider: str
    seq: int
    """Sequence of the input on which it was taken."""
    input: Event | None
    """The input; None where the log has none at `seq`, or where it was passed long before."""
    index: int
    """Number of the decision among those taken on that input, from 0."""
    recorded_seq: int
    """Where the recorded decision lies in the log; 0 when there is none."""
    expected: Decision | None
    """As recorded; None where nothing more was recorded."""
    actual: Decision | None
    """As computed; None where nothing more is decided."""
    differences: list[Difference]
    shape: Shape
    reason: Reason
    """What is most likely behind it."""
    evidence: str
    """What speaks for the reason; empty where the shape alone does."""
    state: Any
    """The decider's state just before the input, as JSON has it; None where it isn't kept."""
    state_text: str
    """The same in one line."""

    def __str__(self) -> str:
        kind = f"{self.input.kind} {self.input.entity}" if self.input is not None else "no input of this decider"
        at = f" at sequence {self.recorded_seq}" if self.recorded_seq else ""
        lines = [
            f"{self.decider}, decision {self.index} on input {self.seq} ({kind}):",
            f"  recorded{at}: {short(self.expected)}",
            f"  computed: {short(self.actual)}",
        ]
        lines += [f"    {each.path}: recorded {each.expected!r}, computed {each.actual!r}" for each in self.differences]
        lines.append(f"  likely: {MEANINGS[self.reason]}" + (f" ({self.evidence})" if self.evidence else ""))
        if self.state_text:
            lines.append(f"  state before: {self.state_text}")
        return "\n".join(lines)


def shape_of(recorded: Sequence[Decision], computed: Sequence[Decision], index: int) -> Shape:
    """How two lists that agree up to `index` part there. `recorded` may end at `index`: what comes later isn't known."""
    expected = recorded[index] if index < len(recorded) else None
    actual = computed[index] if index < len(computed) else None
    if expected is None:
        return "extra"
    if actual is None:
        return "missing"
    if expected.kind == actual.kind:
        return "different"
    later = any((each.kind, each.entity) == (expected.kind, expected.entity) for each in computed[index:])
    return "extra" if later else "missing"


def differences(expected: Decision | None, actual: Decision | None) -> list[Difference]:
    """Field by field; empty when one of the two is absent."""
    if expected is None or actual is None:
        return []
    return list(_differences("", msgspec.to_builtins(expected), msgspec.to_builtins(actual)))


def short(decision: Decision | None) -> str:
    """The decision in one line, cut where it is long."""
    if decision is None:
        return "nothing"
    return f"{decision.kind} {decision.entity} {cut(msgspec.json.encode(decision.data).decode())}"


def cut(text: str) -> str:
    return text if len(text) < _LONG else text[:_LONG] + "..."


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
