"""Held-out measurements: what is due, what events change in the open one, and what is decided about it.

    opened ──> executions: dispatched, placed, ... as all others ──> the last is settled ──> closed

Version 0 is measured at the start, a later one when it is published and `eval.every` steps passed since the measurement
before, the last one after the last burst. One is open at a time; it opens at a boundary, before the next batch does.

Invariants
- held-out executions take slots on engines (equation 1 and the loads of cells count them) and nothing else of the
  ledger: not d, p, f, a, w, no group, no place in the training queue;
- they are placed before training executions, so that they run at the version that is measured;
- while one is queued or running no cell leaves for training whose room it may need.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator

from schemas import events as e
from schemas import ids
from schemas.envelope import Decision, Event
from schemas.units import Check, TaskRef, check
from services.scheduler.core import equations as eq
from services.scheduler.core.reasons import told
from services.scheduler.core.state import Execution, Measurement, State, least_loaded, served_capacity

Decisions = Iterator[Decision]


def opened(state: State, event: Event) -> None:
    data: e.MeasurementOpened = event.data
    steps = data.version - max(state.measured, 0)
    state.measured = data.version
    state.measurement = Measurement(id=event.entity, version=data.version, steps=steps)


def dispatched(state: State, event: Event) -> None:
    """`execution.dispatched` of a held-out execution."""
    data: e.ExecutionDispatched = event.data
    assert state.measurement is not None
    state.measurement.queue.append(event.entity)
    state.measurement.open.append(event.entity)
    state.measurement.unfinished += 1
    state.executions[event.entity] = Execution(group="", measurement=data.measurement)


def finished(state: State, *, had_slot: bool) -> None:
    """A held-out execution finished."""
    assert state.measurement is not None
    state.measurement.unfinished -= 1
    state.measurement.slots -= had_slot
    state.measurement.late += state.index.newest > state.measurement.version


def settled(state: State, event: Event) -> None:
    data: e.ExecutionSettled = event.data
    measurement = state.measurement
    if measurement is None or event.entity not in measurement.open:
        return
    measurement.open.remove(event.entity)
    del state.executions[event.entity]
    measurement.outcomes[data.outcome] = measurement.outcomes.get(data.outcome, 0) + 1
    if data.outcome != "excluded":
        measurement.rewards.append(data.reward)


def closed(state: State, event: Event) -> None:
    state.measurement = None


def due(state: State) -> bool:
    """Whether the version published last is to be measured now."""
    every, burst = state.rules.eval.every, state.burst
    if not every or not state.held_out or state.measurement is not None:
        return False
    if burst is None:
        return state.measured < state.published
    if burst.done or state.batch is not None:
        return False
    return state.measured < 0 or state.published - state.measured >= every


def close(state: State) -> Decisions:
    """The last execution is settled. Excluded ones are counted and not averaged."""
    found = state.measurement
    if found is None or found.open:
        return
    yield Decision(
        kind="measurement.closed",
        entity=found.id,
        data=e.MeasurementClosed(
            version=found.version,
            mean=statistics.fmean(found.rewards) if found.rewards else None,
            std=statistics.pstdev(found.rewards) if found.rewards else None,
            valid=found.outcomes.get("valid", 0),
            placeholder=found.outcomes.get("placeholder", 0),
            excluded=found.outcomes.get("excluded", 0),
            steps=found.steps,
            late=found.late,
            reason=told(state, check("executions without outcome", len(found.open), "==", 0)),
        ),
    )


def open_due(state: State) -> Decisions:
    """Opens the measurement that is due and dispatches its executions."""
    if not due(state):
        return
    version, count = state.published, state.rules.eval.executions
    name = ids.measurement_id(version)
    executions = [ids.held_out_id(version, member) for member in range(count)]
    yield Decision(
        kind="measurement.opened",
        entity=name,
        data=e.MeasurementOpened(version=version, executions=executions, reason=told(state, *_why(state))),
    )
    for member, (execution, task) in enumerate(zip(executions, tasks_of(state, count), strict=True)):
        yield Decision(
            kind="execution.dispatched",
            entity=execution,
            data=e.ExecutionDispatched(
                group="", member=member, task=task.name, measurement=name, task_digest=task.digest
            ),
        )


def _why(state: State) -> list[Check]:
    """Why the version published last is due."""
    if state.measured < 0 or state.burst is None:
        due = check("version measured last", state.measured, "<", state.published)
    else:
        due = check("steps since the last measurement", state.published - state.measured, ">=", state.rules.eval.every)
    begun = state.burst.done if state.burst is not None else 0
    return [due, check("steps made since the boundary", begun, "==", 0)]


def place(state: State) -> Decisions:
    """The start rule's room, taken before training executions are: on the least loaded engine that has the version."""
    while state.measurement is not None and state.measurement.queue and not state.paused:
        C_R, taken = served_capacity(state), state.p - state.f + state.a + slots(state)
        engine = least_loaded(state)
        if taken >= C_R or engine is None:
            return
        load, name = engine
        yield Decision(
            kind="execution.placed",
            entity=state.measurement.queue[0],
            data=e.ExecutionPlaced(
                cell=name,
                epoch=state.cells[name].epoch,
                attempt=0,
                reason=[
                    check("capacity (1)", taken, "<", C_R),
                    check("engine has room", load, "<", state.cells[name].capacity),
                ],
            ),
        )


def slots(state: State) -> int:
    """Held-out executions that are placed and not finished."""
    return state.measurement.slots if state.measurement is not None else 0


def leaves_room(state: State, leaving: int) -> Check | None:
    """Whether what is queued and runs of a measurement fits, with the waterlevel, when `leaving` fewer are served.

    None while there is nothing: (2) alone decides then."""
    unfinished = state.measurement.unfinished if state.measurement is not None else 0
    if not unfinished:
        return None
    w = eq.waterlevel(d=state.d, f=state.f)
    return check("held-out executions fit", w + unfinished, "<=", served_capacity(state) - leaving)


def tasks_of(state: State, count: int) -> list[TaskRef]:
    """The first `count` held-out tasks of an order drawn from the run's seed, the same for every measurement."""
    known = state.held_out
    order = random.Random(f"{state.seed}:held-out").sample(range(len(known)), len(known))
    return [known[order[index % len(known)]] for index in range(count)]
