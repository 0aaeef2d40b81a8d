"""What events change in the scene's batches: micro-steps, who holds them, and steps."""

from __future__ import annotations

from collections.abc import Callable

from replay.invariants.scene import BatchSeen, Scene
from schemas.envelope import Event


def _batch_opened(scene: Scene, event: Event) -> None:
    scene.batches[event.entity] = BatchSeen(opened=event.data)
    scene.batch = event.entity


def _stream_closed(scene: Scene, event: Event) -> None:
    if (batch := scene.batches.get(event.entity)) is not None:
        batch.closed = event.data


def _join_closed(scene: Scene, event: Event) -> None:
    if (batch := scene.batches.get(event.entity)) is not None:
        batch.join = event.data


def _batch_stepped(scene: Scene, event: Event) -> None:
    batch = scene.batches.get(event.entity)
    if batch is not None and not batch.stepped and not batch.undone:
        batch.stepped = True
        scene.burst_done += 1
        scene.version = event.data.version


def _micro_step_enqueued(scene: Scene, event: Event) -> None:
    if (batch := scene.batches.get(event.data.batch)) is not None:
        batch.told.append(event)
        batch.micro_steps.setdefault(event.entity, "")


def _micro_step_claimed(scene: Scene, event: Event) -> None:
    if (batch := scene.batches.get(event.data.batch)) is not None:
        batch.told.append(event)
        batch.micro_steps[event.entity] = event.data.cell


def _micro_step_done(scene: Scene, event: Event) -> None:
    batch, cell = scene.batches.get(event.data.batch), scene.cells.get(event.data.cell)
    if batch is None:
        return
    batch.told.append(event)
    # A cell that was put out says late what counts no more.
    trains = cell is None or cell.place == "training"
    if trains and batch.micro_steps.get(event.entity, event.data.cell) == event.data.cell:
        batch.done[event.entity] = event.data


def _micro_step_released(scene: Scene, event: Event) -> None:
    if (batch := scene.batches.get(event.data.batch)) is not None:
        batch.told.append(event)
        batch.micro_steps[event.entity] = ""
        batch.done.pop(event.entity, None)


CHANGES: dict[str, Callable[[Scene, Event], None]] = {
    "batch.opened": _batch_opened,
    "batch.stream-closed": _stream_closed,
    "batch.join-closed": _join_closed,
    "batch.stepped": _batch_stepped,
    "micro-step.enqueued": _micro_step_enqueued,
    "micro-step.claimed": _micro_step_claimed,
    "micro-step.done": _micro_step_done,
    "micro-step.released": _micro_step_released,
}
