"""When groups enter the queue: the initial dispatch, one at each boundary, replacements, and refills inside a burst."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator

from schemas import events as e
from schemas import ids
from schemas.envelope import Decision
from schemas.units import Check, TaskRef, check
from services.scheduler.core.reasons import told
from services.scheduler.core.state import Burst, State
from services.scheduler.core.strategies import strategy_of

Decisions = Iterator[Decision]


def end_burst(state: State) -> Decisions:
    """Once the burst's last weights are served by every rollout engine. Who stays is the strategy's word; the others
    return before the next burst's dispatch is counted, and all do after the last burst, but for a fixed split.

    A paused run ends no burst: what follows would be dispatched, or the run would be over."""
    burst = state.burst
    if state.paused or burst is None or burst.done < burst.steps or state.batch is not None or state.publishing < 0:
        return
    behind = sum(count for version, count in state.index.versions.items() if int(version) < state.publishing)
    if behind:
        return
    s = state.rules.scheduler
    follow = state.rules.steps - (burst.first_step + burst.steps - 1)
    last = follow <= 0
    stays, reason = strategy_of(state).staying(state)
    if last and ids.cell_id(0) in stays and not strategy_of(state).split:
        stays = []
        reason = [*told(state, check("steps that follow", follow, ">", 0)), *reason]
    yield Decision(
        kind="burst.ended",
        entity=burst.id,
        data=e.BurstEnded(
            version=state.publishing,
            reason=reason,
            stays=stays,
            checks=told(
                state,
                check("steps of the burst", burst.done, ">=", burst.steps),
                check("engines behind the version", behind, "==", 0),
            ),
        ),
    )
    if last:
        return
    yield from open_burst(state)
    yield from dispatch(state, s.mu * s.B, "boundary")
    yield from dispatch(state, state.owed, "replacement")


def refill(state: State) -> Decisions:
    """Discarded groups come back with the next publication, except those that the burst cannot do without."""
    burst = state.burst
    if burst is None or state.owed == 0:
        return
    yield from dispatch(state, min(state.owed, _wanted(state, burst) - len(state.groups)), "refill")


def _wanted(state: State, burst: Burst) -> int:
    """Groups of the steps that the burst has still to make."""
    return (burst.steps - burst.done) * state.rules.scheduler.B


def open_burst(state: State) -> Decisions:
    index = state.bursts + 1
    mu = state.rules.scheduler.mu
    before = (index - 1) * mu
    yield Decision(
        kind="burst.opened",
        entity=ids.burst_id(index),
        data=e.BurstOpened(
            index=index,
            steps=mu,
            first_step=before + 1,
            version=state.published,
            reason=told(state, check("steps of the run", before, "<", state.rules.steps)),
        ),
    )


def dispatch(state: State, groups: int, reason: e.DispatchReason) -> Decisions:
    assert state.burst is not None
    for done in range(groups):
        index = state.next_group
        group = ids.group_id(index)
        task = task_of(state, index)
        executions = [ids.execution_id(index, member) for member in range(state.rules.scheduler.group_size)]
        yield Decision(
            kind="group.dispatched",
            entity=group,
            data=e.GroupDispatched(
                task=task.name,
                task_digest=task.digest,
                reason=reason,
                burst=state.burst.id,
                version=state.published,
                executions=executions,
                checks=told(state, *_why(state, reason, done, groups)),
            ),
        )
        for member, execution in enumerate(executions):
            yield Decision(
                kind="execution.dispatched",
                entity=execution,
                data=e.ExecutionDispatched(group=group, member=member, task=task.name),
            )


def _why(state: State, reason: e.DispatchReason, done: int, groups: int) -> list[Check]:
    """`done` groups of the `groups` that are dispatched now went before."""
    if reason == "initial":
        return [check("initial dispatch (phi + mu) B", done, "<", groups)]
    if reason == "boundary":
        return [check("boundary dispatch mu B", done, "<", groups)]
    discarded = check("discarded groups", state.owed, ">", 0)
    if reason == "replacement":
        return [discarded]
    assert state.burst is not None
    return [discarded, check("groups of the burst", len(state.groups), "<", _wanted(state, state.burst))]


def task_of(state: State, index: int) -> TaskRef:
    """The task of the group with this index: every pass over the tasks is a new order drawn from the run's seed."""
    lap, position = divmod(index, len(state.tasks))
    return state.tasks[_lap(state.seed, lap, len(state.tasks))[position]]


@functools.lru_cache(maxsize=8)
def _lap(seed: int, lap: int, count: int) -> list[int]:
    return random.Random(f"{seed}:tasks:{lap}").sample(range(count), count)
