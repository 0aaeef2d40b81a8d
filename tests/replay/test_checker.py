"""The checker: runs of the real scheduler pass, and each invariant names what breaks it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from replay.checker import Report, check
from schemas import events as e
from schemas.envelope import Event
from schemas.units import Counters, GapStats, Reward, RowPlan, RowRef
from tests.replay.recorded import altered, event, first, log_of, recorded
from tests.scheduler.world import RUN, small_config

FLOW = ["ledger", "waterlevel", "capacity", "attempts", "transitions_serial", "staleness_said"]
EVENTS = recorded(seed=1)


def violated(events: list[Event], *only: str) -> list[str]:
    """What is said of every violation."""
    report = check(events, only=only)
    assert [each.invariant for each in report.checked] == list(only)
    return [each.what for each in report.violations]


def of(report: Report, name: str) -> tuple[int, str]:
    return next((each.violations, each.skipped) for each in report.checked if each.invariant == name)


@pytest.mark.parametrize("seed", range(6))
def test_runs_of_the_scheduler_keep_its_invariants(seed: int) -> None:
    report = check(recorded(seed=seed, lose=0.1 * (seed % 2)), only=FLOW)
    assert report.violations == []
    assert all(not each.skipped for each in report.checked)


def test_staleness_settles_at_its_expectation() -> None:
    report = check(recorded(seed=2, steps=40), only=["staleness"])
    assert report.ok
    assert of(report, "staleness") == (0, "")


def test_staleness_is_skipped_in_a_short_run() -> None:
    violations, skipped = of(check(recorded(seed=2, steps=4), only=["staleness"]), "staleness")
    assert violations == 0
    assert "no whole burst after" in skipped


def test_staleness_off_its_expectation() -> None:
    events = [
        msgspec.structs.replace(each, data=msgspec.structs.replace(each.data, staleness=each.data.staleness + 1))
        if each.kind == "group.consumed"
        else each
        for each in recorded(seed=2, steps=40)
    ]
    [what] = violated(events, "staleness")
    assert what.startswith("mean staleness 2.0")


def test_every_invariant_has_a_meaning() -> None:
    report = check(EVENTS)
    assert len(report.checked) == len({each.invariant for each in report.checked}) == 17
    assert all(each.meaning.endswith(".") for each in report.checked)


def test_said_once() -> None:
    again = [*EVENTS, msgspec.structs.replace(first(EVENTS, "run.started"), seq=len(EVENTS) + 1)]
    assert "run.started was said before" in violated(again, "said_once")


def test_ledger() -> None:
    finished = e.ExecutionFinished(
        attempt=0, reason="completed", exit_code=0, seconds=1.0, workspace="", workspace_digest=""
    )
    assert violated(log_of(("execution.finished", "e-1.0", finished)), "ledger") == [
        "finished and was never dispatched",
        "f = 1, p = 1, d = 0",
    ]


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
    assert said(begin, ("started", e.ExecutionStarted(attempt=0)), *again, ("started", e.ExecutionStarted(attempt=1))) == []
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


def test_capacity_is_never_exceeded() -> None:
    joined = e.CellJoined(index=0, capacity=1, url="", engine="", version=0, capabilities=[])
    placed = e.ExecutionPlaced(cell="cell-0", epoch=0, attempt=0)
    events = log_of(
        ("cell.joined", "cell-0", joined), ("execution.placed", "e-1.0", placed), ("execution.placed", "e-1.1", placed)
    )
    assert violated(events, "capacity") == ["cell-0 holds 2 of 1"]


def test_a_move_of_an_execution_that_has_ended_takes_no_room() -> None:
    """Facts reach the log between a decider's input and its decision: the move answers an older state."""
    joined = [e.CellJoined(index=i, capacity=1, url="", engine="", version=0, capabilities=[]) for i in range(2)]
    placed = [e.ExecutionPlaced(cell="cell-0", epoch=0, attempt=0), e.ExecutionPlaced(cell="cell-1", epoch=0, attempt=0)]
    finished = e.ExecutionFinished(
        attempt=0, reason="completed", exit_code=0, seconds=1.0, workspace="", workspace_digest=""
    )
    events = log_of(
        ("cell.joined", "cell-0", joined[0]),
        ("cell.joined", "cell-1", joined[1]),
        ("execution.placed", "e-1.0", placed[0]),
        ("execution.finished", "e-1.0", finished),
        ("route.moved", "e-1.0", e.RouteMoved(source="cell-0", target="cell-1", epoch=0, kv="recomputed")),
        ("execution.placed", "e-1.1", placed[1]),
    )
    assert violated(events, "capacity") == []


def test_nothing_is_placed_on_a_cell_in_transition_or_training() -> None:
    placed = first(EVENTS, "execution.placed", after=first(EVENTS, "cell.role-transition").seq)
    whats = violated(altered(EVENTS, placed.seq, cell="cell-0"), "capacity")
    assert whats[0] == "cell-0 is not in the rollout role"


def test_transitions_are_serial() -> None:
    decided = e.CellRoleTransition(phase="decided", source="rollout", target="train", epoch=1)
    events = log_of(("cell.role-transition", "cell-0", decided), ("cell.role-transition", "cell-1", decided))
    assert violated(events, "transitions_serial") == ["decided while cell-0 is in transition"]


def test_staleness_said() -> None:
    consumed = first(EVENTS, "group.consumed")
    assert violated(altered(EVENTS, consumed.seq, staleness=7), "staleness_said")[0].startswith("versions (0, 0)")


def test_harness_errors() -> None:
    finished = first(EVENTS, "execution.finished")
    events = altered(EVENTS, finished.seq, counters=Counters(calls=3, harness_errors=2))
    assert violated(events, "harness_errors") == ["2 harness errors"]
    assert violated(EVENTS, "harness_errors") == []


# --- the data plane: one small batch, then each way in which it can be wrong


def batch(**wrong: Any) -> list[Event]:
    """Group g-1 of two executions, trained in batch b-1 by one micro-step of two rows."""
    config = small_config(scheduler__B=1, scheduler__N=2, scheduler__phi=1.0)
    started = e.RunStarted(seed=0, config=config, tasks=[], code="test")
    group = e.GroupDispatched(
        task="t", task_digest="d", reason="initial", burst="u-1", version=0, executions=["e-1.0", "e-1.1"]
    )
    finished = e.ExecutionFinished(
        attempt=0, reason="completed", exit_code=0, seconds=1.0, workspace="", workspace_digest=""
    )

    def reward(execution: str, value: float, advantage: float) -> Reward:
        return Reward(execution=execution, attempt=0, outcome="valid", reward=value, advantage=advantage)

    def settled(value: float) -> e.ExecutionSettled:
        return e.ExecutionSettled(attempt=0, outcome="valid", reward=value)

    def row(execution: str, draw: int, nodes: list[int]) -> RowPlan:
        return RowPlan(
            execution=execution, attempt=0, draw=draw, leaf=nodes[-1], tokens=9, targets=4, target_nodes=nodes
        )

    rewards = wrong.get("rewards", [reward("e-1.0", 1.0, 1.0), reward("e-1.1", 0.0, -1.0)])
    rows = wrong.get("rows", [row("e-1.0", 0, [0, 1]), row("e-1.1", 0, [0])])
    packed = wrong.get("packed", [(each.execution, each.draw) for each in rows])
    refs = [RowRef(execution=name, draw=draw, tokens=9, targets=4) for name, draw in packed]
    enqueued = e.MicroStepEnqueued(batch="b-1", index=0, blob="", tokens=18, rows=refs)
    done = e.MicroStepDone(
        batch="b-1",
        cell="cell-0",
        loss=0.0,
        tokens=18,
        targets=8,
        executions=2,
        masked=0,
        gap=GapStats(),
        seconds=0.1,
    )
    stepped = e.BatchStepped(
        step=1,
        version=1,
        members=["cell-0"],
        loss=0.0,
        grad_norm=0.0,
        lr=0.0,
        micro_steps=1,
        tokens=18,
        targets=8,
        executions=2,
        masked=0,
        reward=0.5,
        gap=GapStats(),
        seconds=0.1,
    )
    consumed = e.GroupConsumed(batch="b-1", version_dispatched=0, version_trained=0, staleness=0)
    outcomes: list[tuple[str, str, Any]] = []
    for name, value in (("e-1.0", 1.0), ("e-1.1", 0.0)):
        outcomes.append(("execution.finished", name, finished))
        if name != wrong.get("unsettled"):
            outcomes.append(("execution.settled", name, settled(value)))
    return log_of(
        ("run.started", RUN, started),
        ("group.dispatched", "g-1", group),
        *outcomes,
        ("group.ready", "g-1", e.GroupReady(rewards=rewards, mean=0.5, std=0.5)),
        ("group.materialized", "g-1", e.GroupMaterialized(rows=rows)),
        ("group.claimed", "g-1", e.GroupClaimed(batch=wrong.get("claimed", "b-1"))),
        ("micro-step.enqueued", "m-1.0", enqueued),
        ("batch.stream-closed", "b-1", e.BatchStreamClosed(micro_steps=1, groups=wrong.get("groups", ["g-1"]))),
        *[("micro-step.done", "m-1.0", done)] * wrong.get("done", 1),
        *(
            [("micro-step.released", "m-1.0", e.MicroStepReleased(batch="b-1", reason=""))]
            if "released" in wrong
            else []
        ),
        *[("micro-step.done", "m-1.0", done)] * wrong.get("released", 0),
        ("batch.stepped", "b-1", stepped),
        *[("group.consumed", "g-1", consumed)] * wrong.get("consumed", 1),
        *wrong.get("more", []),
    )


DATA = ["one_outcome", "advantages", "step_is_B_groups", "rows_disjoint", "targets_once"]


def plan(execution: str, draw: int, nodes: list[int]) -> RowPlan:
    return RowPlan(execution=execution, attempt=0, draw=draw, leaf=nodes[-1], tokens=9, targets=4, target_nodes=nodes)


def outcome(execution: str, value: float, advantage: float, *, excluded: bool = False) -> Reward:
    kind: Any = "excluded" if excluded else "valid"
    return Reward(execution=execution, attempt=0, outcome=kind, reward=value, advantage=advantage)


def test_a_right_batch_passes() -> None:
    assert check(batch(), only=DATA).violations == []
    assert check(batch(done=1, released=1), only=DATA).violations == []


@pytest.mark.parametrize(
    ("invariant", "wrong", "what"),
    [
        ("one_outcome", {"unsettled": "e-1.1"}, "e-1.1 has no outcome yet"),
        (
            "one_outcome",
            {"rewards": [outcome("e-1.0", 1.0, 0.0)]},
            "its rewards are not one for each of its executions",
        ),
        (
            "one_outcome",
            {"rewards": [outcome("e-1.0", 0.5, 0.0), outcome("e-1.1", 0.0, 0.0)]},
            "e-1.0 has valid 0.5, settled valid 1.0",
        ),
        ("advantages", {"rewards": [outcome("e-1.0", 1.0, 0.0)]}, "1 rewards in the baseline"),
        (
            "advantages",
            {"rewards": [outcome("e-1.0", 1.0, 1.0), outcome("e-1.1", 0.0, 0.0)]},
            "advantages sum to 1.0000",
        ),
        (
            "advantages",
            {
                "rewards": [
                    outcome("e-1.0", 1.0, 0.0),
                    outcome("e-1.1", 1.0, 0.0),
                    outcome("e-1.2", 0.0, 1.0, excluded=True),
                ]
            },
            "an excluded execution has an advantage",
        ),
        ("step_is_B_groups", {"groups": ["g-1", "g-2"]}, "its stream closed after 2 groups of 1"),
        ("step_is_B_groups", {"groups": []}, "its stream closed after 0 groups of 1"),
        ("step_is_B_groups", {"claimed": "b-2"}, "its stream's groups are not those that it claimed"),
        ("step_is_B_groups", {"consumed": 2}, "consumed by b-1 already"),
        (
            "rows_disjoint",
            {"rows": [plan("e-1.0", 0, [0, 1]), plan("e-1.0", 1, [1])]},
            "node 1 of e-1.0 is in draws 0 and 1",
        ),
        (
            "targets_once",
            {"rows": [plan("e-1.0", 0, [0, 1]), plan("e-1.0", 1, [1])]},
            "node 1 of e-1.0 is in m-1.0 too",
        ),
        ("targets_once", {"packed": [("e-1.0", 0), ("e-1.0", 0)]}, "draw 0 of e-1.0 is in m-1.0 too"),
        ("targets_once", {"packed": [("e-1.0", 3)]}, "draw 3 of e-1.0 was never admitted"),
        ("targets_once", {"done": 2}, "m-1.0 counts 2 times in the step"),
        ("targets_once", {"done": 0}, "m-1.0 counts 0 times in the step"),
        ("targets_once", {"done": 1, "released": 0}, "m-1.0 counts 0 times in the step"),
    ],
)
def test_what_breaks_an_invariant_is_named(invariant: str, wrong: dict[str, Any], what: str) -> None:
    assert what in violated(batch(**wrong), invariant)


def test_no_engine_serves_what_is_not_durable() -> None:
    published = e.WeightsPublished(version=2, bytes=1, seconds=0.1, transport="test")
    saved = e.CheckpointSaved(version=2, path="p", digest="d", log_sequence=0)
    wrong = log_of(("weights.published", "cell-0", published), ("checkpoint.saved", "v2", saved))
    assert violated(wrong, "durable_before_published") == ["version 2 is not durable"]
    assert violated(list(reversed(wrong)), "durable_before_published") == []
    assert "no weights" in of(check(EVENTS[:1], only=["durable_before_published"]), "durable_before_published")[1]


# --- held-out measurements

HELD_OUT = ["held_out_measured", "held_out_apart"]
MEASURED = recorded(seed=3, eval__every=2, eval__executions=3)


@pytest.mark.parametrize("seed", range(4))
def test_runs_that_measure_keep_all_invariants(seed: int) -> None:
    log = recorded(seed=seed, lose=0.1 * (seed % 2), eval__every=2, eval__executions=8, cells__trainable=1 + seed % 3)
    report = check(log, only=[*FLOW, *HELD_OUT])
    assert report.violations == []
    assert all(not each.skipped for each in report.checked)


def test_nothing_was_measured() -> None:
    report = check(EVENTS, only=HELD_OUT)
    assert report.ok and all(each.skipped for each in report.checked)


def test_a_measurement_that_is_not_what_its_executions_say() -> None:
    closed = first(MEASURED, "measurement.closed")
    assert "mean 9.0" in violated(altered(MEASURED, closed.seq, mean=9.0), "held_out_measured")[0]
    assert "its counts" in violated(altered(MEASURED, closed.seq, valid=9), "held_out_measured")[0]
    never = [each for each in MEASURED if each is not closed]
    assert violated(never, "held_out_measured") == [f"{closed.entity} was open when the run was finished"]
    twice = [*MEASURED, msgspec.structs.replace(closed, seq=len(MEASURED) + 1)]
    assert violated(twice, "held_out_measured") == ["closed and not open"]
    execution = first(MEASURED, "measurement.opened").data.executions[0]
    unsettled = [each for each in MEASURED if (each.kind, each.entity) != ("execution.settled", execution)]
    assert violated(unsettled, "held_out_measured")[0] == "1 executions are not settled"
    dispatched = next(each for each in MEASURED if (each.kind, each.entity) == ("execution.dispatched", execution))
    assert violated(altered(MEASURED, dispatched.seq, task="task-0"), "held_out_measured") == ["task-0 is not a held-out task"]
    gone = [each for each in MEASURED if each is not dispatched]
    assert "its executions are not those that were dispatched for it" in violated(gone, "held_out_measured")


def test_a_held_out_execution_where_training_is() -> None:
    execution = first(MEASURED, "measurement.opened").data.executions[0]
    ready = first(MEASURED, "group.ready")
    [reward] = ready.data.rewards
    wrong = altered(MEASURED, ready.seq, rewards=[msgspec.structs.replace(reward, execution=execution)])
    assert violated(wrong, "held_out_apart") == [f"holds {execution}, which is held out"]
    packed = e.MicroStepEnqueued(
        batch="b-000001", index=0, blob="", tokens=1, rows=[RowRef(execution=execution, draw=0, tokens=1, targets=1)]
    )
    assert violated([*MEASURED, event(10**6, "micro-step.enqueued", "m-000001.009", packed)], "held_out_apart") == [
        f"holds {execution}, which is held out"
    ]
    decided = first(MEASURED, "cell.role-transition")
    level = msgspec.structs.replace(decided.data.reason[0], left=decided.data.reason[0].left + 3)
    found = violated(altered(MEASURED, decided.seq, reason=[level, *decided.data.reason[1:]]), "held_out_apart")
    assert len(found) == 1 and found[0].startswith("w = ")
