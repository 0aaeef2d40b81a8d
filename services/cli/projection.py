"""What each kind of event changes in a run's `Progress`: a pure projection of the log, event by event, each once.

A kind that concerns nobody here is passed over, and so is one of a later version.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from schemas import events as e
from schemas.envelope import Event
from services.cli.progress import RATE_WINDOW_US, CellView, Measured, Progress, Step


def evolve(progress: Progress, event: Event) -> None:
    """Apply one event, the next of the log."""
    if event.kind == "run.continued":
        progress.down_us += max(0, event.time_us - progress.now_us)
    progress.now_us = max(progress.now_us, event.time_us)
    change = _CHANGES.get(event.kind)
    if change is not None and not isinstance(event.data, msgspec.Raw):
        change(progress, event)


def _run_started(progress: Progress, event: Event) -> None:
    data: e.RunStarted = event.data
    progress.run, progress.config, progress.started_us = event.entity, data.config, event.time_us


def _run_finished(progress: Progress, event: Event) -> None:
    data: e.RunFinished = event.data
    if not progress.finished:
        progress.finished, progress.finished_us = data.reason, event.time_us


def _dispatched(progress: Progress, event: Event) -> None:
    data: e.ExecutionDispatched = event.data
    if event.entity not in progress.open:
        progress.open[event.entity] = ""
        if not data.measurement:
            progress.d += 1


def _placed(progress: Progress, event: Event) -> None:
    data: e.ExecutionPlaced = event.data
    _move(progress, event.entity, data.cell)


def _route_moved(progress: Progress, event: Event) -> None:
    data: e.RouteMoved = event.data
    _move(progress, event.entity, data.target)


def _move(progress: Progress, execution: str, cell: str) -> None:
    if execution not in progress.open:
        return
    before = progress.open[execution]
    if before in progress.cells:
        progress.cells[before].load -= 1
    if cell in progress.cells:
        progress.cells[cell].load += 1
    progress.open[execution] = cell


def _started(progress: Progress, event: Event) -> None:
    if event.entity in progress.open and event.entity not in progress.running:
        progress.running.add(event.entity)
        progress.p += event.entity not in progress.held_out


def _lost(progress: Progress, event: Event) -> None:
    data: e.ExecutionLost = event.data
    # Attempts count from zero, and each is lost once.
    progress.lost[event.entity] = max(progress.lost.get(event.entity, 0), data.attempt + 1)


def _finished(progress: Progress, event: Event) -> None:
    data: e.ExecutionFinished = event.data
    if event.entity not in progress.cancelled and not _end(progress, event.entity):
        return
    progress.harness_calls += data.counters.calls
    progress.reconnects += data.counters.reconnects
    # What is cancelled is refused: for its harness that is an error, and for us as it should be.
    if event.entity not in progress.cancelled:
        progress.harness_errors += data.counters.harness_errors
    progress.cancelled.discard(event.entity)


def _cancelled(progress: Progress, event: Event) -> None:
    if _end(progress, event.entity):
        progress.cancelled.add(event.entity)


def _end(progress: Progress, execution: str) -> bool:
    """Whether it was open: it is not any more."""
    if execution not in progress.open:
        return False
    _move(progress, execution, "")
    del progress.open[execution]
    trains = execution not in progress.held_out
    if execution in progress.running:
        progress.running.discard(execution)
    else:
        progress.p += trains
    progress.f += trains
    return True


def _settled(progress: Progress, event: Event) -> None:
    data: e.ExecutionSettled = event.data
    progress.held_out.discard(event.entity)
    progress.surplus += data.reason == "surplus"


def _measurement_opened(progress: Progress, event: Event) -> None:
    data: e.MeasurementOpened = event.data
    progress.measuring = data.version
    progress.held_out.update(data.executions)


def _measurement_closed(progress: Progress, event: Event) -> None:
    data: e.MeasurementClosed = event.data
    progress.measuring = -1
    progress.measured.append(
        Measured(
            version=data.version,
            mean=data.mean,
            std=data.std,
            averaged=data.valid + data.placeholder,
            excluded=data.excluded,
            late=data.late,
        )
    )


def _tree_frozen(progress: Progress, event: Event) -> None:
    data: e.ExecutionTreeFrozen = event.data
    tokens = sum(data.trainable)
    progress.sampled += tokens
    progress.recent.append((event.time_us, tokens))
    while progress.recent and progress.recent[0][0] < event.time_us - RATE_WINDOW_US:
        progress.recent.popleft()


def _group_ready(progress: Progress, event: Event) -> None:
    progress.groups_ready += 1


def _group_discarded(progress: Progress, event: Event) -> None:
    progress.groups_discarded += 1


def _group_consumed(progress: Progress, event: Event) -> None:
    data: e.GroupConsumed = event.data
    progress.groups_consumed += 1
    progress.staleness.append((progress.burst_of.get(data.batch, 0), data.version_trained, data.staleness))


def _restored(progress: Progress, event: Event) -> None:
    """Steps that made later versions count no more."""
    data: e.CheckpointRestored = event.data
    progress.steps = [step for step in progress.steps if step.version <= data.version]
    progress.staleness = [each for each in progress.staleness if each[1] < data.version]
    progress.groups_consumed = len(progress.staleness)
    progress.batch_open = False


def _cell_lost(progress: Progress, event: Event) -> None:
    if event.entity in progress.cells:
        progress.cells[event.entity].phase = "lost"


def _cell_joined(progress: Progress, event: Event) -> None:
    data: e.CellJoined = event.data
    cell = progress.cells.get(event.entity)
    if cell is None:
        progress.cells[event.entity] = CellView(index=data.index, capacity=data.capacity, version=data.version)
    else:
        cell.version = max(cell.version, data.version)
        if cell.phase == "lost" and cell.role == "rollout":
            cell.phase = ""


def _role_transition(progress: Progress, event: Event) -> None:
    data: e.CellRoleTransition = event.data
    cell = progress.cells.get(event.entity)
    if cell is None:
        return
    if data.phase == "completed":
        cell.role, cell.phase = data.target, ""
        progress.transitions += 1
    elif data.phase == "failed":
        cell.phase = "out"
    else:
        cell.phase = f"{data.phase} to {data.target}"
    if data.version >= 0:
        cell.version = max(cell.version, data.version)


def _burst_opened(progress: Progress, event: Event) -> None:
    data: e.BurstOpened = event.data
    progress.burst = data.index


def _burst_ended(progress: Progress, event: Event) -> None:
    data: e.BurstEnded = event.data
    progress.published = data.version


def _batch_opened(progress: Progress, event: Event) -> None:
    progress.batch_open = True
    progress.burst_of[event.entity] = progress.burst


def _batch_stepped(progress: Progress, event: Event) -> None:
    data: e.BatchStepped = event.data
    if progress.steps and data.step <= progress.steps[-1].step:
        return
    before = progress.started_us + round(sum(step.seconds for step in progress.steps) * 1e6)
    progress.batch_open = False
    progress.steps.append(
        Step(
            step=data.step,
            version=data.version,
            reward=data.reward,
            loss=data.loss,
            grad_norm=data.grad_norm,
            tokens=data.tokens,
            targets=data.targets,
            executions=data.executions,
            masked=data.masked,
            gap=data.gap.sum_abs / data.gap.count if data.gap.count else 0.0,
            seconds=(event.time_us - progress.down_us - before) / 1e6,
        )
    )
    progress.gap_sum += data.gap.sum_abs
    progress.gap_count += data.gap.count
    progress.gap_max = max(progress.gap_max, data.gap.max_abs)


def _batch_failed(progress: Progress, event: Event) -> None:
    data: e.BatchFailed = event.data
    progress.last_error = f"{event.entity}: {data.reason}"


def _published(progress: Progress, event: Event) -> None:
    data: e.WeightsPublished = event.data
    if event.entity in progress.cells:
        progress.cells[event.entity].version = max(progress.cells[event.entity].version, data.version)


def _saved(progress: Progress, event: Event) -> None:
    data: e.CheckpointSaved = event.data
    progress.checkpoint = data.path


def _joined(progress: Progress, event: Event) -> None:
    data: e.ServiceJoined = event.data
    progress.services[event.entity] = data.url


def _left(progress: Progress, event: Event) -> None:
    progress.services.pop(event.entity, None)


_CHANGES: dict[str, Callable[[Progress, Any], None]] = {
    "run.started": _run_started,
    "run.finished": _run_finished,
    "execution.dispatched": _dispatched,
    "execution.placed": _placed,
    "execution.started": _started,
    "execution.lost": _lost,
    "execution.finished": _finished,
    "execution.cancelled": _cancelled,
    "execution.settled": _settled,
    "execution.tree-frozen": _tree_frozen,
    "measurement.opened": _measurement_opened,
    "measurement.closed": _measurement_closed,
    "route.moved": _route_moved,
    "group.ready": _group_ready,
    "group.discarded": _group_discarded,
    "group.consumed": _group_consumed,
    "cell.joined": _cell_joined,
    "cell.role-transition": _role_transition,
    "burst.opened": _burst_opened,
    "burst.ended": _burst_ended,
    "batch.opened": _batch_opened,
    "batch.stepped": _batch_stepped,
    "batch.failed": _batch_failed,
    "weights.published": _published,
    "checkpoint.saved": _saved,
    "checkpoint.restored": _restored,
    "cell.lost": _cell_lost,
    "service.joined": _joined,
    "service.left": _left,
}
