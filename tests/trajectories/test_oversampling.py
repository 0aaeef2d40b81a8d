"""More than N executions a group: it closes at N valid ones, decided in the order of the log, and the others are surplus."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from schemas import events as e
from schemas.envelope import Decision
from schemas.ids import evaluation_id
from services.mesh.decider import Driver
from services.trajectories.core.outcome import Outcome
from services.trajectories.core.state import State
from tests.facts import scored
from tests.trajectories.test_outcome import World, finished, settle, tree


def world_of(N: int, **sections: Any) -> World:
    return World(scheduler={"N": N, "B": 2, "oversample": 2}, **sections)


def kinds(decided: list[Decision]) -> list[tuple[str, str]]:
    return [(decision.kind, decision.entity) for decision in decided]


def test_the_group_closes_at_its_nth_valid_execution_and_the_others_are_cancelled() -> None:
    world = world_of(2)
    queued, a, running, b = world.dispatch(0, 4)
    world.say("harness", "execution.started", running, e.ExecutionStarted(attempt=1))
    settle(world, a, 1.0)
    assert world.of("group.ready") == []
    world.say("harness", "execution.finished", b, finished())
    world.say("trajectories", "execution.tree-frozen", b, tree())
    last = world.say("evaluator", "evaluation.scored", evaluation_id(b, 1), scored(b, 0.0))
    assert kinds(last) == [
        ("execution.settled", b),
        ("execution.cancelled", queued),
        ("execution.cancelled", running),
        ("group.ready", "g-000000"),
        ("group.materialized", "g-000000"),
    ]
    [reason] = last[1].data.checks
    assert (last[1].data.reason, reason.left, reason.op, reason.right) == ("surplus", 2.0, ">=", 2.0)
    ready = last[3].data
    assert [reward.execution for reward in ready.rewards] == [a, b] and ready.surplus == [queued, running]
    assert (ready.mean, [row.execution for row in last[4].data.rows]) == (0.5, [a, b])
    # They end whenever they do, by cancellation or by themselves: it counts for nothing.
    [gone] = world.say("harness", "execution.finished", queued, finished("surplus", attempt=0, workspace=""))
    [late] = world.say("harness", "execution.finished", running, finished("completed"))
    for decision, attempt in ((gone, 0), (late, 1)):
        assert (decision.kind, decision.data.outcome, decision.data.reason) == ("execution.settled", "excluded", "surplus")
        assert decision.data.attempt == attempt
    assert world.say("harness", "execution.finished", running, finished()) == []
    assert world.say("trajectories", "execution.tree-frozen", running, tree()) == []
    state = world.driver.state
    assert state.groups == {} and state.cancelled == {}


def test_one_that_waits_for_its_score_is_surplus_and_what_its_tests_say_comes_late() -> None:
    world = world_of(2)
    a, b, c, d = world.dispatch(0, 4)
    for name in (c, d):
        world.say("harness", "execution.finished", name, finished())
    settle(world, a, 1.0)
    settle(world, b, 0.5)
    [ready] = world.of("group.ready")
    assert ready.data.surplus == [c, d] and world.of("execution.cancelled") == []
    said = {decision.entity: decision.data for decision in world.of("execution.settled")}
    assert [said[name].outcome for name in (a, b, c, d)] == ["valid", "valid", "excluded", "excluded"]
    assert said[c].reason == "surplus"
    assert world.say("evaluator", "evaluation.scored", evaluation_id(c, 1), scored(c, 1.0)) == []
    failed = e.EvaluationFailed(execution=d, attempt=1, reason="crashed", tries=1)
    assert world.say("evaluator", "evaluation.failed", evaluation_id(d, 1), failed) == [], "nobody asks again"


def test_surplus_saves_a_group_whose_executions_fail() -> None:
    world = world_of(2)
    a, b, c, d = world.dispatch(0, 4)
    world.say("harness", "execution.finished", a, finished("overall_timeout", workspace=""))
    world.say("harness", "execution.finished", b, finished("total_failure", workspace=""))
    settle(world, c, 1.0)
    settle(world, d, 0.0)
    [ready] = world.of("group.ready")
    assert [(reward.execution, reward.outcome) for reward in ready.data.rewards] == [
        (a, "excluded"),
        (c, "valid"),
        (d, "valid"),
    ]
    assert ready.data.surplus == [b], "N are valid: a placeholder stands for nobody"
    assert ready.data.mean == 0.5


def test_what_even_surplus_can_not_save_closes_with_what_it_has_or_is_discarded() -> None:
    world = world_of(3, trajectories={"advantage": "mean"})
    names = world.dispatch(0, 5)
    settle(world, names[0], 1.0)
    for name in names[1:4]:
        world.say("harness", "execution.finished", name, finished("total_failure", workspace=""))
    assert world.of("group.ready") == [], "the fifth may be valid"
    world.say("harness", "execution.finished", names[4], finished("overall_timeout", workspace=""))
    [ready] = world.of("group.ready")
    counted = [reward for reward in ready.data.rewards if reward.outcome != "excluded"]
    assert [reward.outcome for reward in counted] == ["valid", "placeholder", "placeholder"], "as many as are missing"
    assert ready.data.surplus == [names[3]] and abs(ready.data.mean - 1 / 3) < 1e-9
    lost = world.dispatch(1, 5)
    settle(world, lost[0], 1.0)
    for name in lost[1:]:
        world.say("harness", "execution.finished", name, finished("overall_timeout", workspace=""))
    [discarded] = world.of("group.discarded")
    assert discarded.data.valid == 1 and world.of("execution.cancelled") == []


def test_a_cancelled_execution_whose_attempt_is_lost_settles_with_the_attempt_that_ends() -> None:
    world = world_of(2)
    a, b, c, _ = world.dispatch(0, 4)
    settle(world, a, 1.0)
    settle(world, b, 1.0)
    world.say("harness", "execution.lost", c, e.ExecutionLost(attempt=1, reason="test"))
    assert world.say("harness", "execution.finished", c, finished("completed")) == [], "of an attempt that was lost"
    [settled] = world.say("harness", "execution.finished", c, finished("surplus", attempt=2, workspace=""))
    assert settled.data.attempt == 2


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), N=st.integers(2, 4), surplus=st.integers(0, 3), valid=st.sampled_from([0.2, 0.6, 0.95]))
def test_any_order_closes_every_group_once_with_at_most_n_and_says_the_same_again(
    seed: int, N: int, surplus: int, valid: float
) -> None:
    rng = random.Random(seed)
    world = World(scheduler={"N": N, "B": 2, "oversample": surplus})
    names = [name for group in range(3) for name in world.dispatch(group, N + surplus)]
    owed: list[tuple[str, str, str, Any]] = []
    for name in names:
        if rng.random() < valid:
            owed.append(("harness", "execution.finished", name, finished()))
        else:
            reason = rng.choice(["overall_timeout", "total_failure"])
            owed.append(("harness", "execution.finished", name, finished(reason, workspace="")))
    while owed:
        owner, kind, entity, data = owed.pop(rng.randrange(len(owed)))
        world.say(owner, kind, entity, data)
        if rng.random() < 0.2:
            world.say(owner, kind, entity, data)
        if kind == "execution.finished" and data.workspace:
            owed.append(("trajectories", "execution.tree-frozen", entity, tree()))
            owed.append(("evaluator", "evaluation.scored", evaluation_id(entity, 1), scored(entity, rng.choice([0.0, 1.0]))))
    closed = world.of("group.ready") + world.of("group.discarded")
    assert sorted(decision.entity for decision in closed) == ["g-000000", "g-000001", "g-000002"]
    settled = [decision.entity for decision in world.of("execution.settled")]
    assert sorted(settled) == sorted(names), "each has one outcome"
    for decision in world.of("group.ready"):
        inside = [reward for reward in decision.data.rewards if reward.outcome != "excluded"]
        count = sum(reward.outcome == "valid" for reward in inside)
        assert 2 <= len(inside) <= N and (count == N or not world_cancelled(world, decision.data.surplus))
    assert world.driver.state.groups == {} and world.driver.state.cancelled == {}
    again: Driver[State] = Driver(Outcome())
    decided = [decision for event in world.log for decision in again.feed(event)]
    assert decided == world.decisions and again.snapshot() == world.driver.snapshot()


def world_cancelled(world: World, names: list[str]) -> bool:
    cancelled = {decision.entity for decision in world.of("execution.cancelled")}
    return bool(cancelled.intersection(names))
