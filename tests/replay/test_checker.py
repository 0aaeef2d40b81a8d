"""The checker over runs of the real scheduler in its own world, and cases of single laws that need a log of their own."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from replay.checker import check
from schemas import events as e
from schemas.envelope import Event
from schemas.units import RowPlan
from tests.replay.recorded import event, log_of, recorded

FLOW = [
    "timers",
    "ledger",
    "boundary_dispatch",
    "waterlevel",
    "queue_depth",
    "staleness",
    "staleness_said",
    "capacity",
    "start_rule",
    "routes_to_serving",
    "paused",
    "transitions_serial",
    "training_prefix",
    "waterlevel_gate",
    "supply_gate",
    "core_retention",
    "reasons",
    "attempts",
    "held_out_measured",
    "held_out_apart",
]


def violated(events: list[Event], *only: str) -> list[str]:
    """What is said of every violation."""
    report = check(events, only=only)
    assert [each.invariant for each in report.checked] == list(only)
    return [each.what for each in report.violations]


@pytest.mark.parametrize("seed", range(6))
def test_runs_of_the_scheduler_keep_its_invariants(seed: int) -> None:
    log = recorded(seed=seed, lose=0.1 * (seed % 2), eval__every=2, eval__executions=8, cells__trainable=1 + seed % 3)
    report = check(log, only=FLOW)
    assert report.violations == []
    assert all(not each.skipped for each in report.checked)


@pytest.mark.parametrize("seed", range(8))
def test_runs_that_lose_cells_and_versions_keep_them_too(seed: int) -> None:
    events = recorded(seed=seed, lose_cells=0.03, restore=0.02, cells__trainable=3, cells__capacity=24)
    heard: set[str] = set()
    # The scripted world says facts again, which a stream would not store.
    events = [
        each for each in events if each.kind != "batch.stepped" or not (each.entity in heard or heard.add(each.entity))
    ]
    report = check(events, only=[*FLOW, "step_is_B_groups", "batch_order", "bursts", "join_closed", "epochs"])
    assert report.violations == []


def test_staleness_off_its_expectation() -> None:
    events = [
        msgspec.structs.replace(each, data=msgspec.structs.replace(each.data, staleness=each.data.staleness + 1))
        if each.kind == "group.consumed"
        else each
        for each in recorded(seed=2, steps=40)
    ]
    assert violated(events, "staleness")[-1].startswith("mean staleness 1.975 over 80 groups, expected 0.975")


@pytest.mark.parametrize(
    ("reason", "cause", "expected"),
    [
        ("boundary", 1, []),
        ("boundary", 5, ["w rose to 1 inside u-1 by g-1 (boundary)"]),
        ("refill", 5, []),
    ],
)
def test_waterlevel(reason: Any, cause: int, expected: list[str]) -> None:
    group = e.GroupDispatched(task="t", task_digest="d", reason=reason, burst="u-1", version=0, executions=["e-1.0"])
    execution = e.ExecutionDispatched(group="g-1", member=0, task="t")
    events = [
        event(2, "burst.opened", "u-1", e.BurstOpened(index=1, steps=2, first_step=1, version=0), causation=1),
        event(6, "group.dispatched", "g-1", group, causation=cause),
        event(7, "execution.dispatched", "e-1.0", execution, causation=cause),
    ]
    assert violated(events, "waterlevel") == expected


def test_attempts() -> None:
    placed = [e.ExecutionPlaced(cell="cell-0", epoch=0, attempt=attempt) for attempt in range(3)]
    lost = e.ExecutionLost(attempt=0, reason="test")
    ends = [
        e.ExecutionFinished(
            attempt=attempt, reason="completed", exit_code=0, seconds=1.0, workspace="", workspace_digest=""
        )
        for attempt in range(3)
    ]
    sealed = [e.ExecutionSealed(attempt=attempt, records=0, last_record=0, digest="") for attempt in range(3)]

    def said(*what: tuple[str, Any]) -> list[str]:
        return violated(log_of(*((f"execution.{verb}", "e-1.0", data) for verb, data in what)), "attempts")

    begin, again = ("placed", placed[0]), [("lost", lost), ("placed", placed[1])]
    assert (
        said(begin, ("started", e.ExecutionStarted(attempt=0)), *again, ("started", e.ExecutionStarted(attempt=1)))
        == []
    )
    assert said(begin, *again, ("finished", ends[1]), ("sealed", sealed[1])) == []
    assert said(begin, ("lost", lost), ("finished", ends[1])) == [], "the run ended before it was placed again"
    assert said(begin, again[1]) == ["attempt 1 placed after 0, which was not lost"]
    assert said(begin, *again, ("finished", ends[0])) == ["finished attempt 0, the newest is 1"]
    assert said(begin, ("lost", lost), ("finished", ends[0])) == ["finished attempt 0, the newest is 1"]
    assert said(begin, *again, ("started", e.ExecutionStarted(attempt=0))) == ["started attempt 0, the newest is 1"]
    assert said(begin, *again, ("finished", ends[1]), ("sealed", sealed[0])) == ["sealed attempt 0, attempt 1 finished"]
    row = RowPlan(execution="e-1.0", attempt=0, draw=0, leaf=0, tokens=1, targets=1, target_nodes=[0])
    rows = ("group.materialized", "g-1", e.GroupMaterialized(rows=[row]))
    ended = [("execution.placed", "e-1.0", placed[0]), *[(f"execution.{verb}", "e-1.0", data) for verb, data in again]]
    log = log_of(*ended, ("execution.finished", "e-1.0", ends[1]), rows)
    assert violated(log, "attempts") == ["a row of e-1.0 is of attempt 0, attempt 1 finished"]


@pytest.mark.parametrize(("read", "expected"), [(6, []), (4, ["cell-1 holds 2 of 1"])])
def test_a_move_of_an_execution_that_has_ended_takes_no_room(read: int, expected: list[str]) -> None:
    """Facts reach the log between a decider's input and its decision: the move answers an older state."""
    joined = [e.CellJoined(index=i, capacity=1, url="", engine="", version=0, capabilities=[]) for i in range(2)]
    dispatched = [e.ExecutionDispatched(group="g-1", member=member, task="t") for member in range(2)]
    placed = [e.ExecutionPlaced(cell=f"cell-{index}", epoch=0, attempt=0) for index in range(2)]
    finished = e.ExecutionFinished(
        attempt=0, reason="completed", exit_code=0, seconds=1.0, workspace="", workspace_digest=""
    )
    move = e.RouteMoved(source="cell-0", target="cell-1", epoch=0, kv="recomputed")
    events = [
        event(1, "cell.joined", "cell-0", joined[0], owner="rollout"),
        event(2, "cell.joined", "cell-1", joined[1], owner="rollout"),
        event(3, "execution.dispatched", "e-1.0", dispatched[0], causation=2),
        event(4, "execution.dispatched", "e-1.1", dispatched[1], causation=2),
        event(5, "execution.placed", "e-1.0", placed[0], causation=2),
        event(6, "execution.finished", "e-1.0", finished, owner="harness"),
        event(7, "route.moved", "e-1.0", move, causation=2),
        event(8, "execution.placed", "e-1.1", placed[1], causation=read),
    ]
    assert violated(events, "capacity") == expected
