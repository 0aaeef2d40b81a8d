"""What each kind of event changes in the scheduler's state: the only code that does.

Repetitions and late facts change nothing; a kind that concerns nobody here is passed over.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from schemas import events as e
from schemas.envelope import Event
from schemas.ids import in_pool
from services.scheduler.core import measurements
from services.scheduler.core.index import add, change, leave, settle, take
from services.scheduler.core.state import (
    Batch,
    Burst,
    Cell,
    Execution,
    Group,
    State,
    Trained,
    supplied,
    training,
)
from services.scheduler.core.strategies import STRATEGIES

_COMPACT = 1024


def concerns(event: Event) -> bool:
    """Whether the event can change anything."""
    return event.kind in _CHANGES


def evolve(state: State, event: Event) -> None:
    """Apply one event. Kinds that concern nobody here, repetitions and late facts change nothing."""
    change = _CHANGES.get(event.kind)
    if change is None or isinstance(event.data, msgspec.Raw):
        return
    change(state, event)
    if (state.supply_timer or state.supply_held) and not supplied(state):
        _reset_supply(state)


def _reset_supply(state: State) -> None:
    state.supply_timer, state.supply_held = "", False


def _run_started(state: State, event: Event) -> None:
    data: e.RunStarted = event.data
    state.run = event.entity
    state.config, state.seed, state.tasks = data.config, data.seed, list(data.tasks)
    state.held_out = list(data.held_out)


def _run_finished(state: State, event: Event) -> None:
    state.finished = True
    _reset_supply(state)


def _run_paused(state: State, event: Event) -> None:
    state.paused = True


def _run_resumed(state: State, event: Event) -> None:
    state.paused = False


def _cell_withdrawn(state: State, event: Event) -> None:
    cell = state.cells.get(event.entity)
    # Without the core nothing is trained: it cannot be left out.
    if cell is not None and (cell.pool or cell.index > 0):
        change(state, event.entity, withdrawn=True)


def _cell_reinstated(state: State, event: Event) -> None:
    if event.entity in state.cells:
        change(state, event.entity, withdrawn=False)


def _cell_added(state: State, event: Event) -> None:
    state.added += 1


def _service_joined(state: State, event: Event) -> None:
    if event.owner not in ("rollout", "trainer"):
        return
    state.processes[event.entity] = event.seq
    name = event.entity.removeprefix(f"{event.owner}-")
    cell = state.cells.get(name)
    # A rollout process serves once its engine has joined.
    if cell is not None and event.owner == cell.lost == "trainer":
        change(state, name, lost="")


def _cell_lost(state: State, event: Event) -> None:
    data: e.CellLost = event.data
    cell = state.cells.get(event.entity)
    if cell is None or data.process != state.processes.get(f"{data.service}-{event.entity}"):
        return
    # The batch waits for its core, whatever happens.
    if data.service == "rollout" or cell.index > 0:
        change(state, event.entity, lost=data.service)


def _cell_joined(state: State, event: Event) -> None:
    data: e.CellJoined = event.data
    name, cells = event.entity, state.rules.cells
    if name not in state.cells:
        add(state, name, Cell(index=data.index, pool=in_pool(name), capacity=cells.capacity_of(name)))
    cell = state.cells[name]
    split = STRATEGIES[state.rules.scheduler.strategy].split and not cell.pool
    change(
        state,
        name,
        reserved=split and data.index < cells.trainers(state.added),
        version=max(cell.version, data.version),
        lost="" if cell.lost == "rollout" else cell.lost,
    )


def _role_transition(state: State, event: Event) -> None:
    data: e.CellRoleTransition = event.data
    cell = state.cells.get(event.entity)
    if cell is None:
        return
    name = event.entity
    if data.phase == "decided":
        place = "leaving" if data.target == "train" else "returning"
        change(state, name, place=place, epoch=data.epoch, arrived=False)
        _take_back(state.batch, name)
        state.held = ("", "")
        _not_recalled(state, name)
    elif data.epoch != cell.epoch:
        return
    elif data.phase == "acquired":
        version = max(cell.version, data.version) if data.target == "rollout" else cell.version
        change(state, name, arrived=cell.place in ("leaving", "returning"), version=version)
        return
    elif data.phase == "completed":
        change(state, name, place="training" if data.target == "train" else "serving", arrived=False)
    elif data.phase == "failed":
        change(state, name, place="out", arrived=False)
        _not_recalled(state, name)
        _take_back(state.batch, name)
    else:
        return
    _reset_supply(state)


def _not_recalled(state: State, name: str) -> None:
    if state.recall and state.recall[-1] == name:
        state.recall.pop()
    elif name in state.recall:
        state.recall.remove(name)


def _cell_held(state: State, event: Event) -> None:
    data: e.CellHeld = event.data
    state.held = (event.entity, next(each.rule for each in data.reason if not each.holds))


def _take_back(batch: Batch | None, cell: str) -> None:
    """What the cell did for the batch went with it."""
    if batch is None:
        return
    batch.done -= len(batch.gradients.pop(cell, ()))
    if cell in batch.joined:
        batch.join_closed, batch.joined = False, []


def _burst_opened(state: State, event: Event) -> None:
    data: e.BurstOpened = event.data
    state.bursts = data.index
    state.burst = Burst(id=event.entity, index=data.index, steps=data.steps, first_step=data.first_step)


def _burst_ended(state: State, event: Event) -> None:
    data: e.BurstEnded = event.data
    state.burst, state.publishing, state.published = None, -1, data.version
    settle(state)
    state.recall_reason = list(data.reason)
    staying = set(data.staying)
    state.recall = [name for name in training(state) if name not in staying]


def _group_dispatched(state: State, event: Event) -> None:
    data: e.GroupDispatched = event.data
    state.groups[event.entity] = Group(version=data.version)
    state.index.undecided += 1
    state.next_group += 1
    if data.reason in ("replacement", "refill"):
        state.owed -= 1


def _execution_dispatched(state: State, event: Event) -> None:
    data: e.ExecutionDispatched = event.data
    if data.measurement:
        measurements.dispatched(state, event)
        return
    state.d += 1
    state.line.append(event.entity)
    state.executions[event.entity] = Execution(group=data.group)


def _execution_placed(state: State, event: Event) -> None:
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


def _execution_started(state: State, event: Event) -> None:
    data: e.ExecutionStarted = event.data
    execution = state.executions.get(event.entity)
    if execution is None or execution.status != "placed" or execution.attempt != data.attempt:
        return
    execution.status = "running"
    if not execution.measurement:
        state.a -= 1
        state.p += 1


def _execution_lost(state: State, event: Event) -> None:
    data: e.ExecutionLost = event.data
    execution = state.executions.get(event.entity)
    if execution is not None and execution.status in ("placed", "running") and execution.attempt == data.attempt:
        execution.lost = True
        state.index.lost.add(event.entity)


def _execution_finished(state: State, event: Event) -> None:
    data: e.ExecutionFinished = event.data
    execution = state.executions.get(event.entity)
    if execution is None or execution.status == "finished" or data.attempt < execution.attempt + execution.lost:
        return
    # 1. queued: it never had a slot. 2. placed: it ends before it started, p and f advance together. 3. running.
    counts, name = not execution.measurement, event.entity
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


def _route_moved(state: State, event: Event) -> None:
    data: e.RouteMoved = event.data
    state.executions[event.entity].cell = data.target
    leave(state, data.source, event.entity)
    take(state, data.target, event.entity)


def _group_ready(state: State, event: Event) -> None:
    group = state.groups.get(event.entity)
    if group is not None and group.status == "dispatched":
        group.status = "ready"
        state.index.undecided -= 1
        state.index.ready += 1


def _group_claimed(state: State, event: Event) -> None:
    data: e.GroupClaimed = event.data
    group = state.groups.get(event.entity)
    if group is None or group.status != "ready" or state.batch is None or state.batch.id != data.batch:
        return
    group.status = "claimed"
    state.index.ready -= 1
    state.batch.groups.append(event.entity)
    state.batch.claimed += 1


def _group_discarded(state: State, event: Event) -> None:
    group = state.groups.pop(event.entity, None)
    if group is not None:
        state.owed += 1
        state.index.undecided -= group.status == "dispatched"
        state.index.ready -= group.status == "ready"


def _group_consumed(state: State, event: Event) -> None:
    assert state.batch is not None
    state.batch.groups.remove(event.entity)
    state.trained[-1].groups[event.entity] = state.groups.pop(event.entity)
    if not state.batch.groups:
        state.batch = None


def _checkpoint_restored(state: State, event: Event) -> None:
    """Batches that made later versions are undone, and the one that is open: their groups are ready again."""
    data: e.CheckpointRestored = event.data
    if data.version >= state.version or state.burst is None:
        return
    if state.batch is not None:
        for name in state.batch.groups:
            state.groups[name].status = "ready"
        state.index.ready += len(state.batch.groups)
        state.batch = None
    for undone in [each for each in state.trained if each.version >= data.version]:
        for name, group in undone.groups.items():
            group.status = "ready"
            state.groups[name] = group
            state.index.ready += 1
        state.trained.remove(undone)
        state.burst.done -= 1
    state.version = data.version
    _reset_supply(state)


def _batch_opened(state: State, event: Event) -> None:
    data: e.BatchOpened = event.data
    state.batches += 1
    state.batch = Batch(id=event.entity, step=data.step, version=data.version, final=data.final)
    _reset_supply(state)


def _stream_closed(state: State, event: Event) -> None:
    data: e.BatchStreamClosed = event.data
    if state.batch is not None and state.batch.id == event.entity:
        state.batch.micro_steps = data.micro_steps


def _micro_step_claimed(state: State, event: Event) -> None:
    data: e.MicroStepClaimed = event.data
    if state.batch is not None and state.batch.id == data.batch:
        state.batch.claims[event.entity] = data.cell


def _micro_step_done(state: State, event: Event) -> None:
    data: e.MicroStepDone = event.data
    batch, name = state.batch, event.entity
    if batch is None or batch.id != data.batch or batch.claims.get(name) != data.cell:
        return
    mine = batch.gradients.setdefault(data.cell, set())
    # A cell that was put out says late what counts no more.
    if name not in mine and state.cells[data.cell].place == "training":
        mine.add(name)
        batch.done += 1


def _micro_step_released(state: State, event: Event) -> None:
    data: e.MicroStepReleased = event.data
    batch = state.batch
    if batch is not None and batch.id == data.batch:
        mine = batch.gradients.get(batch.claims.pop(event.entity, ""), set())
        batch.done -= event.entity in mine
        mine.discard(event.entity)


def _join_closed(state: State, event: Event) -> None:
    data: e.BatchJoinClosed = event.data
    assert state.batch is not None
    state.batch.join_closed, state.batch.joined = True, list(data.members)


def _batch_stepped(state: State, event: Event) -> None:
    data: e.BatchStepped = event.data
    if state.batch is None or state.batch.id != event.entity or state.batch.stepped or state.burst is None:
        return
    state.batch.stepped = True
    state.trained.append(Trained(version=state.batch.version))
    state.burst.done += 1
    state.version = data.version


def _weights_exposed(state: State, event: Event) -> None:
    data: e.WeightsExposed = event.data
    if data.purpose == "publish" and data.version > state.published:
        state.publishing = data.version
        # What has left the training cells is never undone.
        state.trained = [each for each in state.trained if each.version >= data.version]


def _weights_published(state: State, event: Event) -> None:
    data: e.WeightsPublished = event.data
    cell = state.cells.get(event.entity)
    if cell is not None and cell.version < data.version:
        change(state, event.entity, version=data.version)


def _timer_set(state: State, event: Event) -> None:
    data: e.TimerSet = event.data
    state.timers += 1
    state.supply_timer, state.supply_due_us = event.entity, data.due_us


def _timer_fired(state: State, event: Event) -> None:
    if event.entity == state.supply_timer:
        state.supply_timer, state.supply_held = "", True


_CHANGES: dict[str, Callable[[State, Event], None]] = {
    "run.started": _run_started,
    "run.finished": _run_finished,
    "run.paused": _run_paused,
    "run.resumed": _run_resumed,
    "cell.withdrawn": _cell_withdrawn,
    "cell.reinstated": _cell_reinstated,
    "service.joined": _service_joined,
    "cell.added": _cell_added,
    "cell.lost": _cell_lost,
    "cell.joined": _cell_joined,
    "cell.role-transition": _role_transition,
    "cell.held": _cell_held,
    "burst.opened": _burst_opened,
    "burst.ended": _burst_ended,
    "group.dispatched": _group_dispatched,
    "group.ready": _group_ready,
    "group.claimed": _group_claimed,
    "group.discarded": _group_discarded,
    "group.consumed": _group_consumed,
    "execution.dispatched": _execution_dispatched,
    "execution.placed": _execution_placed,
    "execution.started": _execution_started,
    "execution.lost": _execution_lost,
    "execution.finished": _execution_finished,
    "execution.settled": measurements.settled,
    "measurement.opened": measurements.opened,
    "measurement.closed": measurements.closed,
    "route.moved": _route_moved,
    "batch.opened": _batch_opened,
    "batch.stream-closed": _stream_closed,
    "batch.join-closed": _join_closed,
    "micro-step.claimed": _micro_step_claimed,
    "micro-step.done": _micro_step_done,
    "micro-step.released": _micro_step_released,
    "batch.stepped": _batch_stepped,
    "checkpoint.restored": _checkpoint_restored,
    "weights.exposed": _weights_exposed,
    "weights.published": _weights_published,
    "timer.set": _timer_set,
    "timer.fired": _timer_fired,
}
