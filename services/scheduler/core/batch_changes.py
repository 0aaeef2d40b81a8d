"""What events change in bursts and batches: steps, the groups that they train, micro-steps, versions, the supply check."""

from __future__ import annotations

from collections.abc import Callable

from schemas import events as e
from schemas.envelope import Event
from services.scheduler.core.index import settle
from services.scheduler.core.state import Batch, Burst, State, Trained, training


def burst_opened(state: State, event: Event) -> None:
    data: e.BurstOpened = event.data
    state.bursts = data.index
    state.burst = Burst(id=event.entity, index=data.index, steps=data.steps, first_step=data.first_step)


def burst_ended(state: State, event: Event) -> None:
    data: e.BurstEnded = event.data
    state.burst, state.publishing, state.published = None, -1, data.version
    settle(state)
    state.recall_reason = list(data.reason)
    staying = set(data.stays)
    state.recall = [name for name in training(state) if name not in staying]


def batch_opened(state: State, event: Event) -> None:
    data: e.BatchOpened = event.data
    state.batches += 1
    state.batch = Batch(id=event.entity, step=data.step, version=data.version, final=data.final)
    reset_supply(state)


def stream_closed(state: State, event: Event) -> None:
    data: e.BatchStreamClosed = event.data
    if state.batch is not None and state.batch.id == event.entity:
        state.batch.micro_steps = data.micro_steps


def micro_step_claimed(state: State, event: Event) -> None:
    data: e.MicroStepClaimed = event.data
    if state.batch is not None and state.batch.id == data.batch:
        state.batch.claims[event.entity] = data.cell


def micro_step_done(state: State, event: Event) -> None:
    data: e.MicroStepDone = event.data
    batch, name = state.batch, event.entity
    if batch is None or batch.id != data.batch or batch.claims.get(name) != data.cell:
        return
    mine = batch.gradients.setdefault(data.cell, set())
    # A cell that was put out says late what counts no more.
    if name not in mine and state.cells[data.cell].place == "training":
        mine.add(name)
        batch.done += 1


def micro_step_released(state: State, event: Event) -> None:
    data: e.MicroStepReleased = event.data
    batch = state.batch
    if batch is not None and batch.id == data.batch:
        mine = batch.gradients.get(batch.claims.pop(event.entity, ""), set())
        batch.done -= event.entity in mine
        mine.discard(event.entity)


def join_closed(state: State, event: Event) -> None:
    data: e.BatchJoinClosed = event.data
    assert state.batch is not None
    state.batch.join_closed, state.batch.joined = True, list(data.members)


def batch_stepped(state: State, event: Event) -> None:
    data: e.BatchStepped = event.data
    if state.batch is None or state.batch.id != event.entity or state.batch.stepped or state.burst is None:
        return
    state.batch.stepped = True
    state.trained.append(Trained(version=state.batch.version))
    state.burst.done += 1
    state.version = data.version


def group_claimed(state: State, event: Event) -> None:
    data: e.GroupClaimed = event.data
    group = state.groups.get(event.entity)
    if group is None or group.status != "ready" or state.batch is None or state.batch.id != data.batch:
        return
    group.status = "claimed"
    state.index.ready -= 1
    state.batch.groups.append(event.entity)
    state.batch.claimed += 1


def group_consumed(state: State, event: Event) -> None:
    assert state.batch is not None
    state.batch.groups.remove(event.entity)
    state.trained[-1].groups[event.entity] = state.groups.pop(event.entity)
    if not state.batch.groups:
        state.batch = None


def checkpoint_restored(state: State, event: Event) -> None:
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
    reset_supply(state)


def weights_exposed(state: State, event: Event) -> None:
    data: e.WeightsExposed = event.data
    if data.purpose == "publish" and data.version > state.published:
        state.publishing = data.version
        # What has left the training cells is never undone.
        state.trained = [each for each in state.trained if each.version >= data.version]


def take_back(batch: Batch | None, cell: str) -> None:
    """What the cell did for the batch went with it."""
    if batch is None:
        return
    batch.done -= len(batch.gradients.pop(cell, ()))
    if cell in batch.joined:
        batch.join_closed, batch.joined = False, []


def reset_supply(state: State) -> None:
    state.supply_timer, state.supply_held = "", False


CHANGES: dict[str, Callable[[State, Event], None]] = {
    "burst.opened": burst_opened,
    "burst.ended": burst_ended,
    "group.claimed": group_claimed,
    "group.consumed": group_consumed,
    "batch.opened": batch_opened,
    "batch.stream-closed": stream_closed,
    "batch.join-closed": join_closed,
    "micro-step.claimed": micro_step_claimed,
    "micro-step.done": micro_step_done,
    "micro-step.released": micro_step_released,
    "batch.stepped": batch_stepped,
    "checkpoint.restored": checkpoint_restored,
    "weights.exposed": weights_exposed,
}
