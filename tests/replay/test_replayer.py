"""The replayer over recorded runs of the real scheduler: the same again, or the place where they part."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from replay.replayer import DeciderResult, Replayer, load_deciders
from schemas import events as e
from schemas.envelope import Event
from schemas.errors import GyreError
from services.scheduler.decider import Scheduler
from tests.replay.recorded import altered, event, first, recorded

EVENTS = recorded(seed=3)


def replay(events: list[Event]) -> DeciderResult:
    [result] = Replayer(deciders=[Scheduler()]).replay(events).deciders
    return result


@pytest.mark.parametrize("seed", range(5))
def test_a_recorded_run_is_decided_the_same_again(seed: int) -> None:
    losses = {"lose_cells": 0.03, "restore": 0.02, "cells__trainable": 3, "cells__capacity": 24}
    events = recorded(seed=seed, **(losses if seed > 2 else {}))
    result = Replayer(deciders=[Scheduler()]).replay(events)
    decisions = [each for each in events if each.causation]
    assert result.ok
    assert result.first is None
    assert result.deciders[0].recorded == result.deciders[0].same == len(decisions)
    assert result.deciders[0].inputs == len(events) - len(decisions)


def test_an_altered_decision_is_named_with_its_fields() -> None:
    placed = first(EVENTS, "execution.placed", after=60)
    result = replay(altered(EVENTS, placed.seq, cell="cell-9"))
    found = result.first
    assert found is not None
    assert (found.decider, found.seq, found.recorded_seq) == ("scheduler", placed.causation, placed.seq)
    assert found.expected is not None
    assert found.expected.entity == placed.entity
    assert [(each.path, each.expected, each.actual) for each in found.differences] == [
        ("data.cell", "cell-9", placed.data.cell)
    ]
    assert f"recorded at sequence {placed.seq}: execution.placed {placed.entity}" in str(found)
    # No state goes on from a placement on a cell that doesn't exist.
    assert "cannot follow" in result.stopped


def test_replay_goes_on_from_the_recorded_decisions() -> None:
    """An alteration that leaves the state as it was makes one difference, and what follows is compared all the same."""
    placed = first(EVENTS, "execution.placed")
    later = first(EVENTS, "burst.ended")
    events = altered(altered(EVENTS, placed.seq, reason=[]), later.seq, reason=[])
    result = replay(events)
    assert result.divergences == 2
    assert result.first is not None
    assert result.first.recorded_seq == placed.seq
    assert [each.recorded_seq for each in result.others] == [later.seq]


def test_a_missing_decision_is_named() -> None:
    # Not the last on its input, and renumbered, as a log file would need it.
    placed = first(EVENTS, "burst.opened")
    kept = [each for each in EVENTS if each.seq != placed.seq]
    number = {each.seq: index for index, each in enumerate(kept, start=1)}
    events = [
        msgspec.structs.replace(each, seq=number[each.seq], causation=number.get(each.causation, 0)) for each in kept
    ]
    result = replay(events)
    assert result.first is not None
    assert result.first.actual is not None
    assert result.first.actual.kind == "burst.opened"


def test_an_added_decision_is_named() -> None:
    cause = next(
        each
        for each in EVENTS
        if each.kind == "execution.started" and not any(other.causation == each.seq for other in EVENTS)
    )
    extra = event(
        len(EVENTS) + 1,
        "execution.placed",
        "e-000000.00",
        e.ExecutionPlaced(cell="cell-0", epoch=0, attempt=0),
        causation=cause.seq,
    )
    result = replay([*EVENTS, extra])
    assert result.first is not None
    assert result.first.seq == cause.seq
    assert result.first.actual is None
    assert result.first.recorded_seq == extra.seq


def test_a_decision_without_an_input_is_named() -> None:
    orphan = event(
        len(EVENTS) + 1,
        "execution.placed",
        "e-000000.00",
        e.ExecutionPlaced(cell="cell-0", epoch=0, attempt=0),
        causation=first(EVENTS, "execution.placed").seq,
    )
    result = replay([*EVENTS, orphan])
    assert result.divergences == 1
    assert result.first is not None
    assert result.first.recorded_seq == orphan.seq


@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
def test_a_log_that_ends_in_the_middle_is_no_divergence(share: float) -> None:
    """Decisions that the log ends too early to hold are counted, not complained of."""
    events = EVENTS[: int(len(EVENTS) * share)]
    result = replay(events)
    assert result.divergences == 0
    assert result.same == result.recorded


def test_decisions_cut_off_the_end_are_counted() -> None:
    last = max(each.causation for each in EVENTS)
    result = replay([each for each in EVENTS if each.causation != last])
    assert result.divergences == 0
    assert result.unrecorded == sum(each.causation == last for each in EVENTS)


def test_an_unknown_decider_is_refused() -> None:
    with pytest.raises(GyreError, match="choose from scheduler"):
        load_deciders(["nobody"])


def test_results_are_data() -> None:
    result = Replayer(deciders=[Scheduler()]).replay(altered(EVENTS, first(EVENTS, "execution.placed").seq, epoch=7))
    read: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(result))
    assert read["deciders"][0]["first"]["differences"] == [{"path": "data.epoch", "expected": 7, "actual": 0}]
