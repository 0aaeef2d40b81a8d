"""When groups enter the queue: the initial dispatch, one at each boundary, replacements, and refills inside a burst."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator

from schemas import events as e
from schemas import ids
from schemas.envelope import Decision
from schemas.units import TaskRef
from services.scheduler.core.state import State
from services.scheduler.core.strategies import strategy_of

Decisions = Iterator[Decision]


def end_burst(state: State) -> Decisions:
    """Once the burst's last weights are served by every rollout engine. Who stays is the strategy's word; the others
    return before the next burst's dispatch is counted, and all do after the last burst, but for a fixed split.

    A paused run ends no burst: what follows would be dispatched, or the run would be over."""
    burst = state.burst
    if state.paused or burst is None or burst.done < burst.steps or state.batch is not None or state.publishing < 0:
        return
    if any(int(version) < state.publishing for version in state.index.versions):
        return
    s = state.rules.scheduler
    last = burst.first_step + burst.steps > state.rules.steps
    stays, reason = strategy_of(state).staying(state)
    if last and ids.cell_id(0) in stays and not strategy_of(state).split:
        stays = []
    yield Decision(
        kind="burst.ended",
        entity=burst.id,
        data=e.BurstEnded(version=state.publishing, reason=reason, stays=stays),
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
    wanted = (burst.steps - burst.done) * state.rules.scheduler.B
    yield from dispatch(state, min(state.owed, wanted - len(state.groups)), "refill")


def open_burst(state: State) -> Decisions:
    index = state.bursts + 1
    mu = state.rules.scheduler.mu
    yield Decision(
        kind="burst.opened",
        entity=ids.burst_id(index),
        data=e.BurstOpened(index=index, steps=mu, first_step=(index - 1) * mu + 1, version=state.published),
    )


def dispatch(state: State, groups: int, reason: e.DispatchReason) -> Decisions:
    assert state.burst is not None
    for _ in range(groups):
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
            ),
        )
        for member, execution in enumerate(executions):
            yield Decision(
                kind="execution.dispatched",
                entity=execution,
                data=e.ExecutionDispatched(group=group, member=member, task=task.name),
            )


def task_of(state: State, index: int) -> TaskRef:
    """The task of the group with this index: every pass over the tasks is a new order drawn from the run's seed."""
    lap, position = divmod(index, len(state.tasks))
    return state.tasks[_lap(state.seed, lap, len(state.tasks))[position]]


@functools.lru_cache(maxsize=8)
def _lap(seed: int, lap: int, count: int) -> list[int]:
    return random.Random(f"{seed}:tasks:{lap}").sample(range(count), count)
