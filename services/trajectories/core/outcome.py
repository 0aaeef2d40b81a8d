"""The outcome of executions and groups (paper, sections 'Partial scoring' and 'Trajectory sampling').

    finished ──> evaluation.requested ──> scored ──┐
                     ^──── failed, in budget       ├──> settled ── N valid, or all of the group ──> ready, materialized
    sealed ──> tree-frozen ────────────────────────┘                                           └──> discarded

A group closes at its N-th valid execution, or when all are settled. Oversampling dispatches more than N: what is not
settled at the N-th is surplus. It is cancelled where it has not finished, and settles as excluded, whatever it still
brings. Of placeholders as many are in the baseline as valid ones are missing from N.

How an execution settles, the first that holds
 1. its group is closed without it, or it ended cancelled or by the overall time-out: excluded;
 2. a total failure, or nothing preserved to evaluate: placeholder with reward 0, in the baseline, without targets;
 3. its records are not those that were sealed: excluded;
 4. a valid score of the state that was preserved: valid, however the harness ended, also without records;
 5. a score that isn't valid, or is of another state: excluded (the evaluation was answered, it won't be again);
 6. the evaluation failed: requested again while the execution's age is below its budget, else excluded.

A held-out execution (`eval`) settles by the same rules and that is all: no group, no admission, no rows.

An attempt that is lost leaves nothing: the execution goes on with the next, and only what finished is settled.
Nothing here looks at elapsed time, length or termination to make a reward. Invariants: a group ends ready (and
materialized) or discarded, once; an event that says again what is known changes nothing; closed groups leave no state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from schemas import events as e
from schemas.envelope import Decision, Event
from schemas.ids import evaluation_id, group_of, order_of
from schemas.units import Outcome as Verdict
from schemas.units import Reward, Value, check
from services.trajectories.core.admission import admit
from services.trajectories.core.advantages import advantage, baseline
from services.trajectories.core.state import Group, Member, State, Tree

EXCLUDING = ("cancelled", "surplus", "overall_timeout")
"""Reasons of `execution.finished` after which nothing is evaluated."""
SURPLUS: Final = "surplus"
"""Reason of the outcome of an execution that its group was closed without."""
LEAST_BASELINE = 2
"""Rewards without which a group cannot compare its executions."""


class Outcome:
    """Decider of `evaluation.requested`, `execution.settled` and `.cancelled`, `group.ready`, `.materialized`, `.discarded`."""

    name = "trajectories"
    state_type = State

    def initial(self) -> State:
        return State()

    def timers(self, state: State) -> dict[str, tuple[str, int]]:
        return {}

    def evolve(self, state: State, event: Event) -> None:
        match event.data:
            case e.RunStarted() as data:
                state.seed = data.seed
                state.N = data.config.scheduler.N
                state.limit = data.config.trajectories.J_max
                state.advantage = data.config.trajectories.advantage
                state.budget_us = round(data.config.harness.overall_timeout_s * 1e6)
            case e.GroupDispatched() as data:
                if order_of(event.entity) > order_of(state.newest):
                    state.newest = event.entity
                    state.groups[event.entity] = Group(
                        task=data.task,
                        task_digest=data.task_digest,
                        executions=list(data.executions),
                        members={execution: Member() for execution in data.executions},
                    )
            case e.ExecutionDispatched() as data:
                if data.measurement and order_of(event.entity) > order_of(state.newest_held_out):
                    state.newest_held_out = event.entity
                    state.held_out[event.entity] = Group(
                        task=data.task,
                        task_digest=data.task_digest,
                        executions=[event.entity],
                        members={event.entity: Member()},
                    )
            case e.GroupMaterialized() | e.GroupDiscarded():
                state.groups.pop(event.entity, None)
            case e.ExecutionCancelled():
                state.cancelled[event.entity] = state.groups[group_of(event.entity)].members[event.entity].lost
            case e.ExecutionLost() as data if event.entity in state.cancelled:
                state.cancelled[event.entity] = max(state.cancelled[event.entity], data.attempt)
            case e.ExecutionSettled() if event.entity in state.cancelled:
                del state.cancelled[event.entity]
            case _:
                member = _unsettled(state, event)
                if member is not None:
                    _evolve_member(state, member, event)
                    if isinstance(event.data, e.ExecutionSettled):
                        state.held_out.pop(event.entity, None)

    def decide(self, state: State, event: Event) -> Iterator[Decision]:
        if event.entity in state.cancelled:
            if isinstance(event.data, e.ExecutionFinished) and event.data.attempt > state.cancelled[event.entity]:
                yield _surplus(event.entity, event.data.attempt)
            return
        member = _unsettled(state, event)
        if member is None:
            return
        execution = _execution_of(event)
        held_out = execution in state.held_out
        group = state.held_out[execution] if held_out else state.groups[group_of(execution)]
        settled = _settle(member, execution, state.budget_us)
        if settled is None:
            yield from _request(member, execution, group, held_out)
            return
        yield Decision(kind="execution.settled", entity=execution, data=settled)
        if held_out:
            return
        valid = sum(_is_valid(other) for other in group.members.values())
        if valid == state.N or all(other.settled is not None for other in group.members.values()):
            yield from _give_up_surplus(group, valid=valid, N=state.N)
            yield from _close(state, group_of(execution), group)


_OF_EVALUATIONS = (e.EvaluationRequested, e.EvaluationScored, e.EvaluationFailed)
_OF_EXECUTIONS = (e.ExecutionStarted, e.ExecutionLost, e.ExecutionFinished, e.ExecutionTreeFrozen, e.ExecutionSettled)


def _execution_of(event: Event) -> str:
    if isinstance(event.data, _OF_EXECUTIONS):
        return event.entity
    return str(event.data.execution) if isinstance(event.data, _OF_EVALUATIONS) else ""


def _unsettled(state: State, event: Event) -> Member | None:
    """The execution that the event is about, when its group is open or it is held out, and its outcome isn't known."""
    execution = _execution_of(event)
    group = (state.held_out.get(execution) or state.groups.get(group_of(execution))) if execution else None
    member = group.members.get(execution) if group else None
    return member if member is not None and member.settled is None else None


def _evolve_member(state: State, member: Member, event: Event) -> None:
    match event.data:
        case e.ExecutionStarted():
            if member.started_us is None:
                member.started_us = event.time_us
        case e.ExecutionLost() as data:
            if member.finished is None:
                member.lost = max(member.lost, data.attempt)
        case e.ExecutionFinished() as data:
            if member.finished is None and data.attempt > member.lost:
                member.finished, member.finished_us = data, event.time_us
        case e.ExecutionTreeFrozen() as data:
            if member.tree is None and data.attempt > member.lost:
                limit = 0 if event.entity in state.held_out else state.limit
                rows = admit(data, execution=event.entity, limit=limit, seed=state.seed)
                member.tree = Tree(attempt=data.attempt, intact=bool(data.blob), rows=rows)
        case e.EvaluationRequested() as data:
            member.tries, member.failed_us = data.tries, None
        case e.EvaluationFailed() as data:
            if member.scored is None and _answers(member, data.attempt) and data.tries == member.tries:
                member.failed_us = event.time_us
        case e.EvaluationScored() as data:
            if member.scored is None and _answers(member, data.attempt):
                member.scored = data
        case e.ExecutionSettled() as data:
            member.settled = data
            member.finished = member.scored = member.failed_us = None
            if data.outcome != "valid":
                member.tree = None


def _answers(member: Member, attempt: int) -> bool:
    """Whether an evaluation of this attempt is one that was asked for."""
    return member.tries > 0 and member.finished is not None and member.finished.attempt == attempt


def _settle(member: Member, execution: str, budget_us: int) -> e.ExecutionSettled | None:
    """The outcome by the rules in the module's docstring, in their order; None while it is open."""
    finished, scored, tree = member.finished, member.scored, member.tree
    if finished is None:
        return None
    attempt = finished.attempt

    def settled(outcome: Verdict, reason: str, reward: float = 0.0) -> e.ExecutionSettled:
        evaluation = evaluation_id(execution, attempt) if outcome == "valid" else ""
        return e.ExecutionSettled(attempt=attempt, outcome=outcome, reward=reward, evaluation=evaluation, reason=reason)

    if finished.reason in EXCLUDING:
        return settled("excluded", finished.reason)
    if finished.reason == "total_failure" or not finished.workspace:
        return settled("placeholder", "nothing to evaluate")
    if tree is not None and not tree.intact:
        return settled("excluded", "records are not what was sealed")
    if tree is not None and tree.attempt != attempt:
        return settled("excluded", "the tree is of another attempt")
    if scored is not None:
        if scored.workspace_digest != finished.workspace_digest or scored.branch != -1:
            return settled("excluded", "another state was evaluated")
        if not scored.valid or not math.isfinite(scored.score):
            return settled("excluded", "the score is not valid")
        return settled("valid", finished.reason, scored.score) if tree is not None else None
    if member.failed_us is not None and member.failed_us - _started_us(member) >= budget_us:
        return settled("excluded", "evaluation failed until the budget was spent")
    return None


def _started_us(member: Member) -> int:
    return member.finished_us if member.started_us is None else member.started_us


def _request(member: Member, execution: str, group: Group, held_out: bool) -> Iterator[Decision]:
    """Asks for the first evaluation, or for the next after one that failed."""
    finished = member.finished
    if finished is None or member.scored is not None or (member.tries and member.failed_us is None):
        return
    yield _decision(
        "evaluation.requested",
        evaluation_id(execution, finished.attempt),
        e.EvaluationRequested(
            execution=execution,
            attempt=finished.attempt,
            task=group.task,
            task_digest=group.task_digest,
            workspace=finished.workspace,
            workspace_digest=finished.workspace_digest,
            tries=member.tries + 1,
            held_out=held_out,
        ),
    )


def _is_valid(member: Member) -> bool:
    return member.settled is not None and member.settled.outcome == "valid"


def _surplus(execution: str, attempt: int) -> Decision:
    settled = e.ExecutionSettled(attempt=attempt, outcome="excluded", reward=0.0, reason=SURPLUS)
    return Decision(kind="execution.settled", entity=execution, data=settled)


def _give_up_surplus(group: Group, *, valid: int, N: int) -> Iterator[Decision]:
    """Whatever is not settled when its group closes: an end that waits for its score has come, any other comes now. What was
    never started goes first, or it would be placed on the slots that the others leave."""
    for execution in sorted(group.executions, key=lambda name: group.members[name].started_us is not None):
        member = group.members[execution]
        if member.settled is None and member.finished is not None:
            yield _surplus(execution, member.finished.attempt)
        elif member.settled is None:
            checks = [check("valid executions N", valid, ">=", N)]
            yield _decision("execution.cancelled", execution, e.ExecutionCancelled(reason=SURPLUS, checks=checks))


def _close(state: State, name: str, group: Group) -> Iterator[Decision]:
    """Ready and materialized, or discarded when fewer than two rewards can be compared."""
    missing = state.N - sum(_is_valid(member) for member in group.members.values())
    settled, surplus = [], []
    for execution in group.executions:
        member = group.members[execution]
        outcome = member.settled
        if outcome is not None and outcome.outcome == "placeholder":
            missing -= 1
        if outcome is None or outcome.reason == SURPLUS or (outcome.outcome == "placeholder" and missing < 0):
            surplus.append(execution)
        else:
            settled.append((execution, outcome, member.tree))
    counted = [outcome.reward for _, outcome, _ in settled if outcome.outcome != "excluded"]
    if len(counted) < LEAST_BASELINE:
        data = e.GroupDiscarded(reason="fewer than two rewards in the baseline", valid=len(counted))
        yield _decision("group.discarded", name, data)
        return
    against = baseline(counted)
    rewards = [
        Reward(
            execution=execution,
            attempt=outcome.attempt,
            outcome=outcome.outcome,
            reward=outcome.reward,
            advantage=0.0 if outcome.outcome == "excluded" else advantage(outcome.reward, against, state.advantage),
        )
        for execution, outcome, _ in settled
    ]
    yield _decision("group.ready", name, e.GroupReady(rewards=rewards, mean=against.mean, std=against.std, surplus=surplus))
    rows = [row for _, _, tree in settled if tree is not None for row in tree.rows]
    yield _decision("group.materialized", name, e.GroupMaterialized(rows=rows))


def _decision(kind: str, entity: str, data: Value) -> Decision:
    return Decision(kind=kind, entity=entity, data=data)
