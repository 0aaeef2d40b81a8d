"""The outcome decider in a scripted world: any fates, any order, anything said twice."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas import events as e
from schemas.envelope import Decision, Event
from schemas.ids import evaluation_id, execution_id, group_id, held_out_id, measurement_id
from schemas.units import TaskRef
from services.mesh.decider import Driver
from services.trajectories.core.outcome import Outcome
from services.trajectories.core.state import State
from tests.facts import fact, scored
from tests.trajectories.trees import config

RUN = "r-test"
BUDGET_S = 100.0


class World:
    """Feeds one driver; answers nothing by itself."""

    def __init__(self, **sections: Any) -> None:
        self.driver: Driver[State] = Driver(Outcome())
        self.seq = 0
        self.now_us = 1_000_000
        self.log: list[Event] = []
        self.decisions: list[Decision] = []
        settings = {"harness": {"command": ["true"], "timeout_s": 50.0, "overall_timeout_s": BUDGET_S}} | sections
        tasks = [TaskRef(name="t", digest="td")]
        data = e.RunStarted(seed=3, config=config(**settings), tasks=tasks, code="test")
        self.say("operator", "run.started", RUN, data)

    def say(self, owner: str, kind: str, entity: str, data: Any) -> list[Decision]:
        self.seq += 1
        event = fact(self.seq, owner, kind, entity, data, time_us=self.now_us)
        self.log.append(event)
        decided = self.driver.feed(event)
        self.decisions += decided
        self.seq += len(decided)
        return decided

    def dispatch(self, index: int, count: int) -> list[str]:
        executions = [execution_id(index, member) for member in range(count)]
        data = e.GroupDispatched(
            task="t", task_digest="td", reason="initial", burst="u-1", version=0, executions=executions
        )
        self.say("scheduler", "group.dispatched", group_id(index), data)
        return executions

    def of(self, kind: str) -> list[Decision]:
        return [decision for decision in self.decisions if decision.kind == kind]


def finished(reason: str = "completed", *, attempt: int = 1, workspace: str = "workspace/x") -> e.ExecutionFinished:
    return e.ExecutionFinished(
        attempt=attempt,
        reason=reason,
        exit_code=0,
        seconds=1.0,
        workspace=workspace,
        workspace_digest="wd" if workspace else "",
    )


def tree(*, attempt: int = 1, trainable: int = 4, blob: str = "tree/x") -> e.ExecutionTreeFrozen:
    nodes = 1 if blob and trainable else 0
    return e.ExecutionTreeFrozen(
        attempt=attempt,
        blob=blob,
        digest="d",
        parents=[-1] * nodes,
        tokens=[trainable + 3] * nodes,
        trainable=[trainable] * nodes,
        leaves=[0] * nodes,
        classes=[0] * nodes,
    )


def settle(world: World, execution: str, score: float, reason: str = "completed", **kwargs: Any) -> None:
    world.say("harness", "execution.started", execution, e.ExecutionStarted(attempt=1))
    world.say("harness", "execution.finished", execution, finished(reason))
    world.say("trajectories", "execution.tree-frozen", execution, tree(**kwargs))
    world.say("evaluator", "evaluation.scored", evaluation_id(execution, 1), scored(execution, score))


def test_a_group_from_finish_to_rows() -> None:
    world = World()
    a, b, c, d = world.dispatch(0, 4)
    settle(world, a, 1.0)
    settle(world, b, 0.0, "harness_timeout")
    settle(world, c, 0.5, "failed", trainable=0)
    asked = world.of("evaluation.requested")
    assert [decision.entity for decision in asked] == [evaluation_id(name, 1) for name in (a, b, c)]
    assert asked[0].data.workspace == "workspace/x" and asked[0].data.task_digest == "td" and asked[0].data.tries == 1
    last = world.say("harness", "execution.finished", d, finished("total_failure", workspace=""))
    assert [decision.kind for decision in last] == ["execution.settled", "group.ready", "group.materialized"]
    rewards = last[1].data.rewards
    assert [reward.outcome for reward in rewards] == ["valid", "valid", "valid", "placeholder"]
    assert [reward.reward for reward in rewards] == [1.0, 0.0, 0.5, 0.0]
    assert last[1].data.mean == 0.375
    assert sum(reward.advantage for reward in rewards) == pytest.approx(0)
    assert [row.execution for row in last[2].data.rows] == [a, b]
    assert world.driver.state.groups == {}


@pytest.mark.parametrize("reason", ["cancelled", "surplus", "overall_timeout"])
def test_excluded_without_evaluation(reason: str) -> None:
    world = World()
    a, b = world.dispatch(0, 2)
    decided = world.say("harness", "execution.finished", a, finished(reason))
    assert [decision.data.outcome for decision in decided] == ["excluded"]
    settle(world, b, 1.0)
    (gone,) = world.of("group.discarded")
    assert gone.data.valid == 1 and not world.of("group.ready")


def test_an_excluded_execution_is_in_no_baseline() -> None:
    world = World(trajectories={"advantage": "mean"})
    a, b, c = world.dispatch(0, 3)
    world.say("harness", "execution.finished", a, finished("cancelled"))
    settle(world, b, 1.0)
    settle(world, c, 0.0)
    (ready,) = world.of("group.ready")
    assert ready.data.mean == 0.5 and [reward.advantage for reward in ready.data.rewards] == [0.0, 0.5, -0.5]


def test_records_that_were_not_kept_exclude_and_do_not_stick() -> None:
    world = World()
    a, b, c = world.dispatch(0, 3)
    settle(world, a, 1.0, blob="")
    settle(world, b, 1.0)
    settle(world, c, 0.0)
    (ready,) = world.of("group.ready")
    assert [reward.outcome for reward in ready.data.rewards] == ["excluded", "valid", "valid"]
    assert world.of("execution.settled")[0].data.reason == "records are not what was sealed"


@pytest.mark.parametrize(
    "change", [{"valid": False}, {"digest": "other"}, {"score": float("nan")}], ids=["invalid", "other", "nan"]
)
def test_a_score_that_does_not_count_excludes(change: dict[str, Any]) -> None:
    world = World()
    a, _ = world.dispatch(0, 2)
    world.say("harness", "execution.finished", a, finished())
    world.say("trajectories", "execution.tree-frozen", a, tree())
    answer = scored(a, **({"score": 1.0} | change))
    (settled,) = world.say("evaluator", "evaluation.scored", evaluation_id(a, 1), answer)
    assert settled.data.outcome == "excluded" and settled.data.reward == 0.0


def test_a_failed_evaluation_is_asked_again_until_the_budget_is_spent() -> None:
    world = World()
    a, _ = world.dispatch(0, 2)
    world.say("harness", "execution.started", a, e.ExecutionStarted(attempt=1))
    world.say("harness", "execution.finished", a, finished())

    def fail(tries: int) -> list[Decision]:
        data = e.EvaluationFailed(execution=a, attempt=1, reason="crashed", tries=tries)
        return world.say("evaluator", "evaluation.failed", evaluation_id(a, 1), data)

    world.now_us += 60_000_000
    (again,) = fail(1)
    assert again.kind == "evaluation.requested" and again.data.tries == 2
    assert fail(1) == []
    world.now_us += 60_000_000
    (settled,) = fail(2)
    assert settled.kind == "execution.settled" and settled.data.outcome == "excluded"
    assert world.say("evaluator", "evaluation.scored", evaluation_id(a, 1), scored(a, 1.0)) == []


def test_a_lost_attempt_leaves_nothing() -> None:
    world = World()
    a, _ = world.dispatch(0, 2)
    world.say("harness", "execution.started", a, e.ExecutionStarted(attempt=1))
    assert world.say("harness", "execution.lost", a, e.ExecutionLost(attempt=1, reason="test")) == []
    assert world.say("harness", "execution.finished", a, finished(attempt=1)) == []
    assert world.say("trajectories", "execution.tree-frozen", a, tree(attempt=1)) == []
    [asked] = world.say("harness", "execution.finished", a, finished(attempt=2))
    assert (asked.kind, asked.data.attempt) == ("evaluation.requested", 2)
    assert world.say("evaluator", "evaluation.scored", evaluation_id(a, 1), scored(a, 1.0, attempt=1)) == []
    assert world.say("evaluator", "evaluation.scored", evaluation_id(a, 2), scored(a, 0.5, attempt=2)) == []
    [settled] = world.say("trajectories", "execution.tree-frozen", a, tree(attempt=2))
    assert (settled.data.attempt, settled.data.reward, settled.data.outcome) == (2, 0.5, "valid")


def test_the_budget_runs_from_the_first_attempt() -> None:
    world = World()
    a, _ = world.dispatch(0, 2)
    world.say("harness", "execution.started", a, e.ExecutionStarted(attempt=1))
    world.now_us += 99_000_000
    world.say("harness", "execution.started", a, e.ExecutionStarted(attempt=2))
    world.now_us += 1_000_000
    world.say("harness", "execution.finished", a, finished(attempt=2))
    data = e.EvaluationFailed(execution=a, attempt=2, reason="crashed", tries=1)
    (settled,) = world.say("evaluator", "evaluation.failed", evaluation_id(a, 2), data)
    assert settled.data.outcome == "excluded"


FATES = ("valid", "valid", "timeout", "failed", "total_failure", "cancelled", "broken", "invalid", "flaky", "hopeless")


def facts_of(fate: str, execution: str, score: float) -> list[tuple[str, str, str, Any]]:
    """What the other services say about an execution without being asked."""
    reason = {"timeout": "harness_timeout", "flaky": "completed", "hopeless": "completed"}.get(fate, fate)
    if reason not in ("harness_timeout", "failed", "total_failure", "cancelled"):
        reason = "completed"
    end = finished(reason, workspace="" if fate == "total_failure" else "workspace/x")
    return [
        ("harness", "execution.started", execution, e.ExecutionStarted(attempt=1)),
        ("harness", "execution.finished", execution, end),
        ("trajectories", "execution.tree-frozen", execution, tree(blob="" if fate == "broken" else "tree/x")),
    ]


def answer_of(fate: str, asked: e.EvaluationRequested, score: float) -> tuple[str, str, str, Any]:
    entity = evaluation_id(asked.execution, asked.attempt)
    if fate == "hopeless" or (fate == "flaky" and asked.tries < 3):
        data = e.EvaluationFailed(execution=asked.execution, attempt=asked.attempt, reason="x", tries=asked.tries)
        return ("evaluator", "evaluation.failed", entity, data)
    return ("evaluator", "evaluation.scored", entity, scored(asked.execution, score, valid=fate != "invalid"))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    fates=st.lists(st.lists(st.sampled_from(FATES), min_size=2, max_size=4), min_size=1, max_size=4),
)
def test_every_group_ends_once_in_any_order(seed: int, fates: list[list[str]]) -> None:
    rng = random.Random(seed)
    world = World()
    fate_of: dict[str, str] = {}
    pending: list[tuple[str, str, str, Any]] = []
    said: list[tuple[str, str, str, Any]] = []
    handled = 0
    for index, members in enumerate(fates):
        for execution, fate in zip(world.dispatch(index, len(members)), members, strict=True):
            fate_of[execution] = fate
            pending += facts_of(fate, execution, rng.random())
    restart = rng.randrange(1, 30)
    while pending:
        world.now_us += rng.randrange(20_000_000)
        if said and rng.random() < 0.3:
            world.say(*rng.choice(said))
        fact = pending.pop(rng.randrange(len(pending)))
        said.append(fact)
        world.say(*fact)
        for asked in world.of("evaluation.requested")[handled:]:
            handled += 1
            pending.append(answer_of(fate_of[asked.data.execution], asked.data, rng.choice([0.0, 0.5, 1.0])))
        restart -= 1
        if restart == 0:
            other: Driver[State] = Driver(Outcome())
            other.restore(world.driver.snapshot())
            world.driver = other
    for fact in said:  # all of it once more, after the end
        assert world.say(*fact) == []
    settled = Counter(decision.entity for decision in world.of("execution.settled"))
    assert settled == dict.fromkeys(fate_of, 1)
    ended = Counter(decision.entity for decision in world.of("group.ready") + world.of("group.discarded"))
    assert ended == {group_id(index): 1 for index in range(len(fates))}
    assert [d.entity for d in world.of("group.ready")] == [d.entity for d in world.of("group.materialized")]
    for decision in world.of("group.ready"):
        counted = [reward for reward in decision.data.rewards if reward.outcome != "excluded"]
        assert len(counted) >= 2
        assert sum(reward.advantage for reward in counted) == pytest.approx(0, abs=1e-6)
    assert world.driver.state.groups == {}
    replayed: Driver[State] = Driver(Outcome())
    assert [decision for event in world.log for decision in replayed.feed(event)] == world.decisions
    assert replayed.snapshot() == world.driver.snapshot()


def test_a_kind_of_another_version_changes_nothing() -> None:
    world = World()
    world.dispatch(0, 2)
    before = msgspec.msgpack.encode(world.driver.state)
    assert world.say("harness", "execution.finished", "e-000000.00", msgspec.Raw(b"{}")) == []
    assert world.say("harness", "something.new", "e-000000.00", msgspec.Raw(b"{}")) == []
    assert msgspec.msgpack.encode(world.driver.state) == before


def measure(world: World, version: int, count: int) -> list[str]:
    executions = [held_out_id(version, member) for member in range(count)]
    for member, name in enumerate(executions):
        data = e.ExecutionDispatched(
            group="", member=member, task="h", measurement=measurement_id(version), task_digest="hd"
        )
        world.say("scheduler", "execution.dispatched", name, data)
    return executions


def test_held_out_executions_settle_by_the_same_rules_and_that_is_all() -> None:
    world = World()
    group = world.dispatch(0, 2)
    a, b, c, d = measure(world, 4, 4)
    settle(world, a, 0.75)
    (asked,) = world.of("evaluation.requested")
    assert (asked.entity, asked.data.task, asked.data.task_digest) == (evaluation_id(a, 1), "h", "hd")
    assert asked.data.held_out
    world.say("harness", "execution.finished", b, finished("total_failure", workspace=""))
    world.say("harness", "execution.finished", c, finished("overall_timeout"))
    world.say("harness", "execution.finished", d, finished())
    world.now_us += round(BUDGET_S * 1.1e6)
    failed = e.EvaluationFailed(execution=d, attempt=1, reason="timeout", tries=1)
    world.say("evaluator", "evaluation.failed", evaluation_id(d, 1), failed)
    said = world.of("execution.settled")
    assert [(each.entity, each.data.outcome, each.data.reward) for each in said] == [
        (a, "valid", 0.75),
        (b, "placeholder", 0.0),
        (c, "excluded", 0.0),
        (d, "excluded", 0.0),
    ]
    assert world.driver.state.held_out == {}
    for each in list(world.log):  # everything a second time
        world.say(each.owner, each.kind, each.entity, each.data)
    assert len(world.of("execution.settled")) == 4
    for name in group:
        settle(world, name, 1.0)
    (ready,) = world.of("group.ready")
    (rows,) = world.of("group.materialized")
    assert {each.execution for each in ready.data.rewards} == set(group) == {row.execution for row in rows.data.rows}
    assert not [
        each for each in world.of("evaluation.requested") if each.data.held_out and each.data.execution in group
    ]


def test_a_lost_held_out_attempt_is_followed_by_the_next() -> None:
    world = World()
    (a,) = measure(world, 0, 1)
    world.say("harness", "execution.started", a, e.ExecutionStarted(attempt=0))
    world.say("harness", "execution.lost", a, e.ExecutionLost(attempt=0, reason="test"))
    assert world.say("harness", "execution.finished", a, finished(attempt=0)) == []
    settle(world, a, 1.0)
    (said,) = world.of("execution.settled")
    assert (said.data.attempt, said.data.outcome) == (1, "valid")
