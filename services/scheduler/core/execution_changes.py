"""What events change in the ledger: groups and their executions, from dispatch to their end, and the slots that they hold."""

from __future__ import annotations

from collections.abc import Callable

from schemas import events as e
from schemas.envelope import Event
from services.scheduler.core import measurements
from services.scheduler.core.index import leave, take
from services.scheduler.core.state import Execution, Group, State

_COMPACT = 1024


def group_dispatched(state: State, event: Event) -> None:
    data: e.GroupDispatched = event.data
    state.groups[event.entity] = Group(version=data.version)
    state.index.undecided += 1
    state.next_group += 1
    if data.reason in ("replacement", "refill"):
        state.owed -= 1


def group_ready(state: State, event: Event) -> None:
    group = state.groups.get(event.entity)
    if group is not None and group.status == "dispatched":
        group.status = "ready"
        state.index.undecided -= 1
        state.index.ready += 1


def group_discarded(state: State, event: Event) -> None:
    group = state.groups.pop(event.entity, None)
    if group is not None:
        state.owed += 1
        state.index.undecided -= group.status == "dispatched"
        state.index.ready -= group.status == "ready"


def execution_dispatched(state: State, event: Event) -> None:
    data: e.ExecutionDispatched = event.data
    if data.measurement:
        measurements.dispatched(state, event)
        return
    state.d += 1
    state.line.append(event.entity)
    state.executions[event.entity] = Execution(group=data.group)


def execution_placed(state: State, event: Event) -> None:
    data: e.ExecutionPlaced = event.data
    execution = state.executions[event.entity]
    if execution.status == "queued":
        _dequeue(state, event.entity)
        execution.status = "placed"
        if execution.measurement:
            assert state.measurement is not None
            state.measurement.slots += 1
        else:
            state.a += 1
    else:
        # The next attempt takes over what the lost one had: its slot, and its place in the ledger.
        leave(state, execution.cell, event.entity)
    execution.cell, execution.attempt, execution.lost = data.cell, data.attempt, False
    state.index.lost.discard(event.entity)
    take(state, data.cell, event.entity)


def execution_started(state: State, event: Event) -> None:
    data: e.ExecutionStarted = event.data
    execution = state.executions.get(event.entity)
    if execution is None or execution.status != "placed" or execution.attempt != data.attempt:
        return
    execution.status = "running"
    if not execution.measurement:
        state.a -= 1
        state.p += 1


def execution_lost(state: State, event: Event) -> None:
    data: e.ExecutionLost = event.data
    execution = state.executions.get(event.entity)
    if execution is not None and execution.status in ("placed", "running") and execution.attempt == data.attempt:
        execution.lost = True
        state.index.lost.add(event.entity)


def execution_finished(state: State, event: Event) -> None:
    data: e.ExecutionFinished = event.data
    execution = state.executions.get(event.entity)
    if execution is None or execution.status == "finished" or data.attempt < execution.attempt + execution.lost:
        return
    _end(state, event.entity, execution)


def execution_cancelled(state: State, event: Event) -> None:
    """Its end, wherever it stands: what the harness still says of it finds nothing here."""
    execution = state.executions.get(event.entity)
    if execution is not None and execution.status != "finished":
        _end(state, event.entity, execution)


def _end(state: State, name: str, execution: Execution) -> None:
    # 1. queued: it never had a slot. 2. placed: it ends before it started, p and f advance together. 3. running.
    counts = not execution.measurement
    if execution.status == "queued":
        _dequeue(state, name)
        state.p += counts
    elif execution.status == "placed":
        state.a -= counts
        state.p += counts
    state.f += counts
    cell, execution.status, execution.cell, execution.lost = execution.cell, "finished", "", False
    state.index.lost.discard(name)
    if counts:
        del state.executions[name]
    else:
        measurements.finished(state, had_slot=bool(cell))
    if cell:
        leave(state, cell, name)


def _dequeue(state: State, name: str) -> None:
    if state.executions[name].measurement:
        assert state.measurement is not None
        state.measurement.queue.remove(name)
    elif state.line[state.line_from] == name:
        state.line_from += 1
        if state.line_from > _COMPACT and 2 * state.line_from > len(state.line):
            del state.line[: state.line_from]
            state.line_from = 0
    else:
        state.line.remove(name)


def route_moved(state: State, event: Event) -> None:
    data: e.RouteMoved = event.data
    state.executions[event.entity].cell = data.target
    leave(state, data.source, event.entity)
    take(state, data.target, event.entity)


CHANGES: dict[str, Callable[[State, Event], None]] = {
    "group.dispatched": group_dispatched,
    "group.ready": group_ready,
    "group.discarded": group_discarded,
    "execution.dispatched": execution_dispatched,
    "execution.placed": execution_placed,
    "execution.started": execution_started,
    "execution.lost": execution_lost,
    "execution.finished": execution_finished,
    "execution.cancelled": execution_cancelled,
    "route.moved": route_moved,
}
