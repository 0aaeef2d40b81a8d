"""Why a decision is likely not taken again as it was recorded.

Looked at in this order, the first that speaks for itself is told
 1. the same decision was recorded before: it was decided twice;
 2. deciding touches a clock, randomness or whatever else isn't in the log, or gives another result when repeated;
 3. it depends on the order of a set or a dict: another order, or the same state from a snapshot, gives another result;
 4. the input or the recorded decision has another schema than this code's;
 5. the run was recorded by another version of the code;
 6. the shape alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from replay.divergence import Difference, Divergence, Reason, Shape
from replay.touch import forget, reordered, touched
from schemas.envelope import Decision, Event
from schemas.kinds import KINDS
from services.mesh.codec import encode_data
from services.mesh.decider import Driver, same


class Codes(msgspec.Struct, frozen=True, kw_only=True):
    """Which code recorded, and which replays; empty where that isn't known."""

    recorded: str = ""
    replaying: str = ""

    @property
    def differ(self) -> bool:
        return bool(self.recorded and self.replaying) and self.recorded != self.replaying


def explain(
    *,
    before: Callable[[], Driver[Any]],
    event: Event,
    index: int,
    shape: Shape,
    expected: Decision | None,
    actual: Decision | None,
    here: Sequence[Decision],
    earlier: Sequence[Decision],
    codes: Codes,
) -> tuple[Reason, str]:
    """The likely reason and what speaks for it.

    `before` gives a driver in the state just before the input, a fresh one each time; `here` are the decisions that were
    recorded on the input and taken again, `earlier` those recorded shortly before it.
    """
    alone = {"missing": expected, "different": expected, "extra": actual}.get(shape)
    if alone is not None and repeats(alone, here, () if shape == "different" else earlier):
        return "decided_twice", ""
    impure = _impure(before, event, index, actual)
    if impure is not None:
        return impure
    strange = next((each for each in (event, expected) if each is not None and isinstance(each.data, msgspec.Raw)), None)
    if strange is not None:
        return "schema", f"this code cannot read {strange.kind} as it was written"
    if codes.differ:
        return "code", f"recorded by {codes.recorded}, replayed by {codes.replaying}"
    return shape, ""


def says(event: Event, decision: Decision) -> bool:
    """Whether the event says what was decided."""
    if event.kind != decision.kind or event.entity != decision.entity:
        return False
    # Values that are not equal to themselves are told apart by their bytes.
    return event.data == decision.data or encode_data(event.data) == encode_data(decision.data)


def repeats(decision: Decision, here: Sequence[Decision], earlier: Sequence[Decision]) -> bool:
    """Whether it was decided before: on the same input, or where it can be said only once."""
    if any(same(each, decision) for each in here):
        return True
    known = KINDS.get(decision.kind)
    if known is not None and known.once:
        return any((each.kind, each.entity) == (decision.kind, decision.entity) for each in earlier)
    # Such a decision tells which of several it is.
    numbered = hasattr(decision.data, "attempt") or hasattr(decision.data, "epoch")
    return numbered and any(same(each, decision) for each in earlier)


def by_schema(found: Divergence, data: bytes) -> Divergence:
    """The divergence, its reason the schema when it lies in fields that the recorded `data` (JSON) doesn't have, or in
    fields that this code doesn't know."""
    if found.reason not in ("different", "code") or found.expected is None or not data:
        return found
    recorded, known = msgspec.json.decode(data), msgspec.to_builtins(found.expected.data)
    if not isinstance(recorded, dict) or not isinstance(known, dict):
        return found
    lacking, unknown = sorted(known.keys() - recorded.keys()), sorted(recorded.keys() - known.keys())
    if found.differences and all(_field(each) in lacking for each in found.differences):
        said = f"{found.expected.kind} was recorded without {', '.join(sorted({_field(each) for each in found.differences}))}"
    elif unknown:
        said = f"this code doesn't know {', '.join(unknown)} of {found.expected.kind}"
    else:
        return found
    return msgspec.structs.replace(found, reason="schema", evidence=said)


def _field(difference: Difference) -> str:
    return difference.path.removeprefix("data.").partition(".")[0].partition("[")[0]


def _impure(
    before: Callable[[], Driver[Any]], event: Event, index: int, actual: Decision | None
) -> tuple[Reason, str] | None:
    package = type(before().decider).__module__.rpartition(".")[0]
    results: list[list[Decision]] = []

    def decide(driver: Driver[Any]) -> None:
        results.append(decisions_of(driver, event))

    driver = before()
    forget(package)
    what = touched(lambda: decide(driver))
    if what:
        return "clock_or_randomness", what
    forget(package)
    decide(before())
    first, again = results
    if not _alike(first, again):
        return "clock_or_randomness", "decided again from the same state, it decides otherwise"
    for backwards in (False, True):
        driver = before()
        driver.state = reordered(driver.state, backwards=backwards)
        decide(driver)
    if not _alike(results[-1], results[-2]):
        return "unordered", "with its sets in another order, it decides otherwise"
    there = first[index] if index < len(first) else None
    if (there is None) != (actual is None) or (there is not None and actual is not None and not same(there, actual)):
        return "unordered", "from a snapshot of the same state, it decides otherwise"
    return None


def decisions_of(driver: Driver[Any], event: Event) -> list[Decision]:
    """What is decided on the input, as far as it goes: an exception ends it."""
    found: list[Decision] = []
    try:
        at = driver.arrive(event)
        for decision in driver.decide(at):
            found.append(decision)
            driver.apply(decision, at)
    except Exception:  # whatever it is, what came before it is what there is
        return found
    return found


def _alike(left: Sequence[Decision], right: Sequence[Decision]) -> bool:
    return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
