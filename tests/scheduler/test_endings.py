"""How executions end, one by one, in the two deciders that it concerns: what each ending does to the ledger and to the group.

| ending | p, f | group |
| --- | --- | --- |
| completed, failed, harness time-out | f rises at the end, before anybody knows the score | waits for the score, which counts |
| evaluator pending | nothing moves | waits, keeps its slot; excluded when the budget is spent |
| overall time-out | f rises | excluded: in no baseline |
| total failure before the start | p and f rise together | a placeholder of reward 0 in the baseline |
| cancelled as surplus | f rises at the cancellation | closed without it |
"""

from __future__ import annotations

from typing import Any

import pytest

from schemas import events as e
from schemas.envelope import Decision
from schemas.ids import evaluation_id
from schemas.units import FinishReason, TaskRef
from services.mesh.decider import Driver
from services.scheduler.core.state import State
from services.scheduler.decider import Scheduler
from services.trajectories.core.outcome import Outcome
from tests.facts import fact, scored
from tests.scheduler.world import RUN, small_config

SCORED: list[FinishReason] = ["completed", "failed", "harness_timeout"]


class Pair:
    """Scheduler and outcome decider on one log, each input read by both before the next."""

    def __init__(self, **overrides: Any) -> None:
        config = small_config(scheduler__N=2, scheduler__phi=0.0, harness__overall_timeout_s=36000.0, **overrides)
        self.drivers: list[Driver[Any]] = [Driver(Scheduler()), Driver(Outcome())]
        self.seq, self.now_us = 0, 1_000_000
        self.decisions: list[Decision] = []
        tasks = [TaskRef(name="t", digest="d")]
        self.say("operator", "run.started", RUN, e.RunStarted(seed=0, config=config, tasks=tasks, code="test"))
        for index in range(3):
            joined = e.CellJoined(index=index, capacity=8, url="", engine="", version=0, capabilities=[])
            self.say("rollout", "cell.joined", f"cell-{index}", joined)

    @property
    def state(self) -> State:
        state: State = self.drivers[0].state
        return state

    @property
    def counters(self) -> tuple[int, int, int, int]:
        return self.state.d, self.state.p, self.state.f, self.state.a

    def say(self, owner: str, kind: str, entity: str, data: Any) -> None:
        """The fact, and whatever is decided on it and on that."""
        said = [(owner, kind, entity, data)]
        while said:
            owner, kind, entity, data = said.pop(0)
            self.seq += 1
            event = fact(self.seq, owner, kind, entity, data, time_us=self.now_us)
            for driver in self.drivers:
                if driver.is_input(event):
                    decided = driver.feed(event)
                    self.decisions += decided
                    said += [(driver.decider.name, each.kind, each.entity, each.data) for each in decided]

    def start(self, *executions: str) -> None:
        for execution in executions:
            self.say("harness", "execution.started", execution, e.ExecutionStarted(attempt=0))

    def finish(self, execution: str, reason: FinishReason, *, workspace: bool = True) -> None:
        finished = e.ExecutionFinished(
            attempt=0,
            reason=reason,
            exit_code=None,
            seconds=1.0,
            workspace="w" if workspace else "",
            workspace_digest="wd" if workspace else "",
        )
        self.say("harness", "execution.finished", execution, finished)
        tree = e.ExecutionTreeFrozen(
            attempt=0, blob="b", digest="d", parents=[-1], tokens=[9], trainable=[4], leaves=[0], classes=[0]
        )
        self.say("trajectories", "execution.tree-frozen", execution, tree)

    def score(self, execution: str, score: float = 1.0) -> None:
        self.say("evaluator", "evaluation.scored", evaluation_id(execution, 0), scored(execution, score, attempt=0))

    def outcomes(self) -> list[tuple[str, float]]:
        [ready] = [each.data for each in self.decisions if each.kind == "group.ready"]
        return [(reward.outcome, reward.reward) for reward in ready.rewards]

    @property
    def status(self) -> str:
        """Of the first group."""
        group = self.state.groups.get("g-000000")
        return group.status if group is not None else "gone"


A, B, C = "e-000000.00", "e-000000.01", "e-000000.02"


@pytest.mark.parametrize("reason", SCORED)
def test_one_that_is_scored_leaves_its_slot_at_its_end_and_its_group_at_its_score(reason: FinishReason) -> None:
    pair = Pair()
    pair.start(A, B)
    d, p, f, a = pair.counters
    pair.finish(A, reason)
    assert pair.counters == (d, p, f + 1, a) and pair.status == "dispatched"
    pair.score(A, 0.25)
    pair.finish(B, "completed")
    assert pair.counters == (d, p, f + 2, a) and pair.status == "dispatched", "an evaluation that is pending moves nothing"
    pair.score(B, 0.75)
    assert pair.counters == (d, p, f + 2, a) and pair.status == "ready"
    assert pair.outcomes() == [("valid", 0.25), ("valid", 0.75)]


def test_an_evaluator_that_fails_holds_its_group_until_the_budget_is_spent_and_no_slot() -> None:
    pair = Pair(scheduler__oversample=1)
    pair.start(A, B, C)
    pair.finish(A, "completed")
    pair.finish(B, "completed")
    pair.score(B)
    before = pair.counters
    for tries in (1, 2):
        pair.now_us += 20_000_000_000
        failed = e.EvaluationFailed(execution=A, attempt=0, reason="crashed", tries=tries)
        pair.say("evaluator", "evaluation.failed", evaluation_id(A, 0), failed)
        assert pair.counters == before
    assert pair.status == "dispatched", "the third may still be valid"
    asked = [each.data.tries for each in pair.decisions if each.kind == "evaluation.requested" and each.data.execution == A]
    assert asked == [1, 2]
    pair.finish(C, "completed")
    pair.score(C, 0.0)
    assert pair.status == "ready"
    assert pair.outcomes() == [("excluded", 0.0), ("valid", 1.0), ("valid", 0.0)]


def test_an_overall_timeout_is_excluded_and_a_group_that_is_left_with_one_reward_is_owed() -> None:
    pair = Pair()
    pair.start(A, B)
    d, p, f, _ = pair.counters
    pair.finish(A, "overall_timeout", workspace=False)
    assert (pair.state.d, pair.state.p, pair.state.f) == (d, p, f + 1)
    pair.finish(B, "completed")
    pair.score(B)
    assert pair.status == "gone"
    [discarded] = [each.data for each in pair.decisions if each.kind == "group.discarded"]
    assert discarded.valid == 1
    # With phi = 0 the burst can't do without it: it is replaced at once, and w rises by that named refill alone.
    dispatched = [each for each in pair.decisions if each.kind == "group.dispatched"]
    assert (dispatched[-1].data.reason, pair.state.d, pair.state.owed) == ("refill", d + 2, 0)


def test_a_total_failure_before_the_start_moves_p_and_f_together_and_counts_as_zero() -> None:
    pair = Pair()
    pair.start(B)
    d, p, f, a = pair.counters
    pair.finish(A, "total_failure", workspace=False)
    # What was queued may take its slot.
    assert (pair.state.d, pair.state.p, pair.state.f) == (d, p + 1, f + 1) and pair.state.a <= a
    pair.finish(B, "completed")
    pair.score(B)
    assert pair.status == "ready" and pair.outcomes() == [("placeholder", 0.0), ("valid", 1.0)]


def test_surplus_is_cancelled_with_the_closing_of_its_group() -> None:
    pair = Pair(scheduler__oversample=1)
    pair.start(A, B, C)
    for execution in (A, C):
        pair.finish(execution, "completed")
    pair.score(A)
    d, p, f, _ = pair.counters
    pair.score(C)
    assert (pair.state.d, pair.state.p, pair.state.f) == (d, p, f + 1) and pair.status == "ready"
    assert B not in pair.state.executions
    pair.finish(B, "surplus", workspace=False)
    assert (pair.state.d, pair.state.p, pair.state.f) == (d, p, f + 1)
    [settled] = [each.data for each in pair.decisions if each.kind == "execution.settled" and each.entity == B]
    assert (settled.outcome, settled.reason) == ("excluded", "surplus")
    assert pair.outcomes() == [("valid", 1.0), ("valid", 1.0)]
