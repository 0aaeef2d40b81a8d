"""What each kind of event changes in the scene. Lenient: what makes no sense changes as little as it can."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from replay.invariants import batch_folding
from replay.invariants.scene import CellSeen, ExecutionSeen, GroupSeen, Scene
from schemas import events as e
from schemas.envelope import Event
from schemas.ids import in_pool


def apply(scene: Scene, event: Event) -> None:
    """One event, in whichever order. Kinds and schema versions that this version does not know change nothing."""
    change = CHANGES.get(event.kind)
    if change is not None and not isinstance(event.data, msgspec.Raw):
        change(scene, event)


def _run_started(scene: Scene, event: Event) -> None:
    scene.run, scene.config = event.entity, event.data.config
    scene.flags = frozenset(event.data.flags)


def _run_finished(scene: Scene, event: Event) -> None:
    scene.finished = True


def _run_paused(scene: Scene, event: Event) -> None:
    scene.paused = event.kind == "run.paused"


def _cell_joined(scene: Scene, event: Event) -> None:
    data: e.CellJoined = event.data
    cell = scene.cells.setdefault(event.entity, CellSeen(index=data.index, capacity=data.capacity))
    cell.pool = in_pool(event.entity)
    cell.reserved = (
        not cell.pool and scene.config is not None and scene.strategy == "async" and data.index < scene.trainers
    )
    cell.version = max(cell.version, data.version)
    if cell.lost == "rollout":
        cell.lost = ""


def _cell_added(scene: Scene, event: Event) -> None:
    scene.added += 1


def _service_joined(scene: Scene, event: Event) -> None:
    if event.owner not in ("rollout", "trainer"):
        return
    scene.processes[event.entity] = event.seq
    cell = scene.cells.get(event.entity.removeprefix(f"{event.owner}-"))
    # A rollout process serves once its engine has joined.
    if cell is not None and event.owner == cell.lost == "trainer":
        cell.lost = ""


def _cell_lost(scene: Scene, event: Event) -> None:
    cell, service = scene.cells.get(event.entity), event.data.service
    if cell is None or event.data.process != scene.processes.get(f"{service}-{event.entity}"):
        return
    # The batch waits for its core, whatever happens.
    if service == "rollout" or cell.index > 0:
        cell.lost = service


def _cell_withdrawn(scene: Scene, event: Event) -> None:
    cell = scene.cells.get(event.entity)
    if cell is not None and (cell.pool or cell.index > 0):
        cell.withdrawn = event.kind == "cell.withdrawn"


def _role_transition(scene: Scene, event: Event) -> None:
    data: e.CellRoleTransition = event.data
    cell = scene.cells.get(event.entity)
    if cell is None:
        return
    if data.phase == "decided":
        cell.place, cell.epoch, cell.arrived = ("leaving" if data.target == "train" else "returning"), data.epoch, False
    elif data.epoch == cell.epoch and data.phase == "acquired":
        cell.arrived = True
        if data.target == "rollout":
            cell.version = max(cell.version, data.version)
    elif data.epoch == cell.epoch and data.phase == "completed":
        cell.place, cell.arrived = ("training" if data.target == "train" else "serving"), False
    elif data.epoch == cell.epoch and data.phase == "failed":
        cell.place, cell.arrived, cell.failed_epoch = "out", False, cell.epoch
        batch = scene.batches.get(scene.batch)
        if batch is not None:
            batch.done = {name: done for name, done in batch.done.items() if done.cell != event.entity}
            if batch.join is not None and event.entity in batch.join.members:
                batch.join = None


def _weights_published(scene: Scene, event: Event) -> None:
    cell = scene.cells.get(event.entity)
    if cell is not None:
        cell.version = max(cell.version, event.data.version)


def _burst_opened(scene: Scene, event: Event) -> None:
    scene.bursts += 1
    scene.burst, scene.burst_id, scene.burst_done = event.data, event.entity, 0


def _burst_ended(scene: Scene, event: Event) -> None:
    scene.burst, scene.burst_id, scene.published = None, "", event.data.version


def _group_dispatched(scene: Scene, event: Event) -> None:
    data: e.GroupDispatched = event.data
    scene.groups[event.entity] = GroupSeen(version=data.version, reason=data.reason, executions=data.executions)
    scene.alive += 1
    if data.reason in ("replacement", "refill"):
        scene.owed -= 1


def _group_ready(scene: Scene, event: Event) -> None:
    group = scene.groups.get(event.entity)
    if group is not None and group.status == "dispatched":
        group.status = "ready"
        scene.ready.add(event.entity)


def _group_claimed(scene: Scene, event: Event) -> None:
    data: e.GroupClaimed = event.data
    batch, group = scene.batches.get(data.batch), scene.groups.get(event.entity)
    if batch is not None and batch.undone:
        return
    if batch is not None:
        batch.claimed.append(event.entity)
    if group is not None and group.status in ("dispatched", "ready"):
        group.status, group.batch = "claimed", data.batch
        scene.ready.discard(event.entity)


def _group_consumed(scene: Scene, event: Event) -> None:
    data: e.GroupConsumed = event.data
    group, batch = scene.groups.get(event.entity), scene.batches.get(data.batch)
    if batch is not None and batch.undone:
        return
    if group is not None and group.status != "consumed":
        group.status = "consumed"
        scene.ready.discard(event.entity)
        scene.alive -= 1
    if batch is not None:
        batch.consumed += 1
        if batch.consumed >= batch.opened.groups and scene.batch == data.batch:
            scene.batch = ""


def _group_discarded(scene: Scene, event: Event) -> None:
    group = scene.groups.get(event.entity)
    if group is not None and group.status not in ("consumed", "discarded"):
        group.status = "discarded"
        scene.ready.discard(event.entity)
        scene.alive -= 1
        scene.owed += 1


def _execution_dispatched(scene: Scene, event: Event) -> None:
    data: e.ExecutionDispatched = event.data
    if event.entity in scene.executions:
        return
    scene.executions[event.entity] = ExecutionSeen(group=data.group)
    if data.group:
        scene.d += 1
        scene.queued += 1
    else:
        scene.held_out += 1
        scene.queued_held_out += 1


def _execution_placed(scene: Scene, event: Event) -> None:
    data: e.ExecutionPlaced = event.data
    execution, cell = scene.executions.get(event.entity), scene.cells.get(data.cell)
    if execution is None or execution.status == "finished":
        return
    if execution.status == "queued":
        execution.status = "placed"
        _dequeue(scene, execution)
        scene.a += not execution.held_out
    elif execution.cell in scene.cells:
        scene.cells[execution.cell].load -= 1
    if cell is not None:
        cell.load += 1
    execution.cell, execution.attempt, execution.lost = data.cell, data.attempt, False


def _execution_started(scene: Scene, event: Event) -> None:
    execution = scene.executions.get(event.entity)
    if execution is not None and execution.status == "placed" and execution.attempt == event.data.attempt:
        execution.status = "running"
        if not execution.held_out:
            scene.a -= 1
            scene.p += 1


def _execution_lost(scene: Scene, event: Event) -> None:
    execution = scene.executions.get(event.entity)
    if execution is not None and execution.status in ("placed", "running") and execution.attempt == event.data.attempt:
        execution.lost = True


def _execution_finished(scene: Scene, event: Event) -> None:
    data: e.ExecutionFinished = event.data
    execution = scene.executions.get(event.entity)
    if execution is None or execution.status == "finished" or data.attempt < execution.attempt + execution.lost:
        return
    _end(scene, execution)


def _execution_cancelled(scene: Scene, event: Event) -> None:
    execution = scene.executions.get(event.entity)
    if execution is not None and execution.status != "finished":
        execution.cancelled = True
        _end(scene, execution)


def _end(scene: Scene, execution: ExecutionSeen) -> None:
    counts = not execution.held_out
    if execution.status == "queued":
        _dequeue(scene, execution)
        scene.p += counts
    elif execution.status == "placed":
        scene.a -= counts
        scene.p += counts
    if execution.cell in scene.cells:
        scene.cells[execution.cell].load -= 1
    scene.f += counts
    scene.held_out -= not counts
    execution.status, execution.lost = "finished", False


def _dequeue(scene: Scene, execution: ExecutionSeen) -> None:
    scene.queued -= not execution.held_out
    scene.queued_held_out -= execution.held_out


def _route_moved(scene: Scene, event: Event) -> None:
    data: e.RouteMoved = event.data
    execution = scene.executions.get(event.entity)
    if execution is None or execution.status not in ("placed", "running"):
        return
    for name, change in ((execution.cell, -1), (data.target, 1)):
        if name in scene.cells:
            scene.cells[name].load += change
    execution.cell = data.target


def _checkpoint_restored(scene: Scene, event: Event) -> None:
    """Batches that made later versions are undone, and the one that is open: their groups are ready again."""
    version: int = event.data.version
    if version >= scene.version or scene.burst is None:
        return
    for batch in scene.batches.values():
        if batch.undone or batch.opened.version < version:
            continue
        batch.undone = True
        scene.burst_done -= batch.stepped
        for name in batch.claimed:
            group = scene.groups.get(name)
            if group is None:
                continue
            scene.alive += group.status == "consumed"
            group.status = "ready"
            scene.ready.add(name)
    scene.version, scene.batch = version, ""


CHANGES: dict[str, Callable[[Scene, Event], None]] = {
    "run.started": _run_started,
    "run.finished": _run_finished,
    "run.paused": _run_paused,
    "run.resumed": _run_paused,
    "cell.joined": _cell_joined,
    "cell.added": _cell_added,
    "cell.lost": _cell_lost,
    "service.joined": _service_joined,
    "checkpoint.restored": _checkpoint_restored,
    "cell.withdrawn": _cell_withdrawn,
    "cell.reinstated": _cell_withdrawn,
    "cell.role-transition": _role_transition,
    "weights.published": _weights_published,
    "burst.opened": _burst_opened,
    "burst.ended": _burst_ended,
    "group.dispatched": _group_dispatched,
    "group.ready": _group_ready,
    "group.claimed": _group_claimed,
    "group.consumed": _group_consumed,
    "group.discarded": _group_discarded,
    "execution.dispatched": _execution_dispatched,
    "execution.placed": _execution_placed,
    "execution.started": _execution_started,
    "execution.lost": _execution_lost,
    "execution.finished": _execution_finished,
    "execution.cancelled": _execution_cancelled,
    "route.moved": _route_moved,
    **batch_folding.CHANGES,
}
