"""The packer (DESIGN.md section 8): ready groups of the open batch become micro-steps, pulled as cells take them.

    group.ready, .materialized ──> window ──> group.claimed, micro-step.enqueued ... ──> batch.stream-closed
                                     ^ at most `reorder_groups` groups that aren't packed to the end

While fewer than `ahead` micro-steps wait for a cell, the next one is filled from the window: the batch's claimed groups
with rows left, then ready groups by dispatch version and id, as many as window and batch (B) allow. It is said when
 1. it is at least 85 % full, or its one execution is longer than T;
 2. or the window cannot grow: it is full, or holds the last of the batch's groups;
 3. or no micro-step waits for a cell, which would starve.
Otherwise it is kept back until a group gets ready or a cell takes a micro-step.

Without `scheduler.streaming` nothing is claimed before all groups of the burst, mu B of them, are ready.

A group counts as claimed when its first row leaves, so the supply check sees what is really left; one without a row is
claimed when its turn comes. Executions with advantage zero keep their rows: their loss is zero, yet they feed the
measured gap between engine and trainer, and leaving them out would make that alarm depend on rewards.

A core that begins again from an older version undoes the batches that made later ones, the open one included: their
groups are offered again, whole, to batches to come.

Invariants: of the batches that count, an admitted row is in one micro-step; an execution's rows share it; a batch holds
exactly B groups; what is decided depends on the state alone, so repeated events change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy

from schemas import events as e
from schemas.envelope import Decision, Event
from schemas.ids import group_of, micro_step_id, order_of
from schemas.streams import micro_step_blob
from schemas.units import RowPlan, RowRef
from services.packer.core.filling import GOOD_FILL, by_size, fill
from services.packer.core.state import Bundle, OpenBatch, State, Supply, Taken

_CONCERNS = frozenset(
    (
        e.RunStarted,
        e.GroupDispatched,
        e.GroupReady,
        e.GroupMaterialized,
        e.GroupDiscarded,
        e.BatchOpened,
        e.MicroStepClaimed,
        e.MicroStepDone,
        e.MicroStepReleased,
        e.GroupClaimed,
        e.MicroStepEnqueued,
        e.BatchStreamClosed,
        e.WeightsExposed,
        e.BatchStepped,
        e.CheckpointRestored,
    )
)
"""What `evolve` looks at: most events are of others."""


class Packer:
    """Decider of `group.claimed`, `micro-step.enqueued` and `batch.stream-closed`."""

    name = "packer"
    state_type = State

    def initial(self) -> State:
        return State()

    def timers(self, state: State) -> dict[str, tuple[str, int]]:
        return {}

    def evolve(self, state: State, event: Event) -> None:
        if type(event.data) not in _CONCERNS:
            return
        entity = event.entity
        match event.data:
            case e.RunStarted() as data:
                packer = data.config.packer
                state.capacity, state.reorder, state.ahead = packer.T, packer.reorder_groups, packer.ahead
                state.streaming, state.mu = data.config.scheduler.streaming, data.config.scheduler.mu
            case e.GroupDispatched() as data:
                if order_of(entity) > order_of(state.newest):
                    state.newest = entity
                    state.supplies[entity] = Supply(version=data.version)
            case e.GroupReady():
                if entity in state.supplies:
                    state.supplies[entity].ready = True
            case e.GroupMaterialized() as data:
                supply = state.supplies.get(entity)
                if supply is not None and supply.bundles is None:
                    supply.bundles = _bundles(data.rows)
            case e.GroupDiscarded():
                if not any(entity in batch.claimed for batch in state.batches):
                    state.supplies.pop(entity, None)
            case e.BatchOpened() as data:
                # One of another version was decided before the core went back: its scheduler knows by now, and opens another.
                if order_of(entity) > order_of(state.newest_batch) and data.version == state.stepped:
                    state.newest_batch = entity
                    left = state.mu - (data.step - 1) % state.mu
                    state.batches.append(OpenBatch(name=entity, groups=data.groups, left=left))
                    state.taken.append(Taken(batch=entity, version=data.version))
            case e.MicroStepClaimed() | e.MicroStepDone() as data:
                for batch in _named(state, data.batch):
                    batch.unclaimed = [waiting for waiting in batch.unclaimed if waiting != entity]
            case e.MicroStepReleased() as data:
                for batch in _named(state, data.batch):
                    if entity not in batch.unclaimed:
                        batch.unclaimed.append(entity)
            case e.GroupClaimed() as data:
                for batch in _named(state, data.batch):
                    batch.claimed.append(entity)
                    _keep(state, batch.name, entity)
                _drop_packed(state, entity)
            case e.MicroStepEnqueued() as data:
                _take(state, entity, data)
            case e.BatchStreamClosed():
                state.batches = [batch for batch in state.batches if batch.name != entity]
            case e.WeightsExposed() as data:
                if data.purpose == "publish":
                    state.taken = [each for each in state.taken if each.version >= data.version]
            case e.BatchStepped() as data:
                state.stepped = max(state.stepped, data.version)
            case e.CheckpointRestored() as data:
                _undo(state, data.version)

    def decide(self, state: State, event: Event) -> Iterator[Decision]:
        if type(event.data) not in _CONCERNS:
            # Nothing has changed since all was decided that there was to decide.
            return
        while state.batches:
            batch = state.batches[0]
            if _complete(state, batch):
                yield _close(batch)
            elif len(batch.unclaimed) >= state.ahead or _waits_for_burst(state, batch):
                return
            else:
                window = _window(state, batch)
                bare = next((group for group in window if group not in batch.claimed and not _left(state, group)), None)
                if bare is not None:
                    yield _claim(bare, batch)
                    continue
                chosen = fill([_left(state, group) for group in window], state.capacity) if window else []
                if not chosen or _keeps_back(state, batch, chosen, window):
                    return
                touched = {group_of(bundle.execution) for bundle in chosen}
                for group in window:
                    if group in touched and group not in batch.claimed:
                        yield _claim(group, batch)
                yield _enqueue(batch, chosen)


def fill_share(state: State) -> float:
    """Tokens of all micro-steps so far over the room that they had; 1.0 before the first."""
    return state.packed_tokens / state.packed_room if state.packed_room else 1.0


def _bundles(rows: list[RowPlan]) -> list[Bundle]:
    refs: dict[str, list[RowRef]] = {}
    for row in rows:
        ref = RowRef(execution=row.execution, draw=row.draw, tokens=row.tokens, targets=row.targets)
        refs.setdefault(row.execution, []).append(ref)
    return by_size(
        [
            Bundle(execution=execution, tokens=sum(row.tokens for row in bundle), rows=bundle)
            for execution, bundle in refs.items()
        ]
    )


def _named(state: State, batch: str) -> list[OpenBatch]:
    return [held for held in state.batches if held.name == batch]


def _left(state: State, group: str) -> list[Bundle]:
    supply = state.supplies.get(group)
    return supply.bundles or [] if supply is not None else []


def _complete(state: State, batch: OpenBatch) -> bool:
    return len(batch.claimed) == batch.groups and not any(_left(state, group) for group in batch.claimed)


def _waits_for_burst(state: State, batch: OpenBatch) -> bool:
    """Without streaming: whether a group that the rest of the burst needs isn't ready yet."""
    if state.streaming or batch.claimed:
        return False
    taken = {group for other in state.batches for group in other.claimed}
    ready = sum(
        supply.ready and supply.bundles is not None and group not in taken for group, supply in state.supplies.items()
    )
    return ready < batch.left * batch.groups


def _window(state: State, batch: OpenBatch) -> list[str]:
    """Groups that the next micro-step may draw from, in the order in which it prefers them."""
    held = [group for group in batch.claimed if _left(state, group)]
    taken = {group for other in state.batches for group in other.claimed}
    ready = sorted(
        (supply.version, *order_of(group))
        for group, supply in state.supplies.items()
        if supply.ready and supply.bundles is not None and group not in taken
    )
    places = min(state.reorder - len(held), batch.groups - len(batch.claimed))
    return held + [group for _, _, group in ready[: max(0, places)]]


def _keeps_back(state: State, batch: OpenBatch, chosen: list[Bundle], window: list[str]) -> bool:
    full = sum(bundle.tokens for bundle in chosen) >= GOOD_FILL * state.capacity
    new = sum(group not in batch.claimed for group in window)
    grows = len(window) < state.reorder and len(batch.claimed) + new < batch.groups
    return not full and grows and bool(batch.unclaimed)


def _claim(group: str, batch: OpenBatch) -> Decision:
    return Decision(kind="group.claimed", entity=group, data=e.GroupClaimed(batch=batch.name))


def _enqueue(batch: OpenBatch, chosen: list[Bundle]) -> Decision:
    name = micro_step_id(batch.name, batch.enqueued)
    data = e.MicroStepEnqueued(
        batch=batch.name,
        index=batch.enqueued,
        blob=micro_step_blob(name),
        tokens=sum(bundle.tokens for bundle in chosen),
        rows=[row for bundle in chosen for row in bundle.rows],
    )
    return Decision(kind="micro-step.enqueued", entity=name, data=data)


def _close(batch: OpenBatch) -> Decision:
    data = e.BatchStreamClosed(micro_steps=batch.enqueued, groups=list(batch.claimed))
    return Decision(kind="batch.stream-closed", entity=batch.name, data=data)


def _take(state: State, micro_step: str, data: e.MicroStepEnqueued) -> None:
    """An enqueued micro-step: its bundles leave their groups, and it waits for a cell."""
    packed = {row.execution for row in data.rows}
    for group in sorted({group_of(execution) for execution in packed}):
        supply = state.supplies.get(group)
        if supply is not None and supply.bundles is not None:
            supply.bundles = [bundle for bundle in supply.bundles if bundle.execution not in packed]
        _drop_packed(state, group)
    for batch in _named(state, data.batch):
        batch.enqueued = data.index + 1
        batch.unclaimed.append(micro_step)
    state.packed_tokens += data.tokens
    state.packed_room += max(state.capacity, data.tokens)


def _keep(state: State, batch: str, group: str) -> None:
    """What the batch takes, before its first row leaves."""
    supply = state.supplies.get(group)
    for taken in state.taken:
        if taken.batch == batch and supply is not None:
            taken.groups[group] = copy(supply)


def _undo(state: State, version: int) -> None:
    """Batches that began with this version or a later one count no more, unless it is what was made last."""
    if version >= state.stepped:
        return
    state.stepped = version
    for taken in [each for each in state.taken if each.version >= version]:
        state.supplies.update(taken.groups)
        state.batches = [batch for batch in state.batches if batch.name != taken.batch]
        state.taken.remove(taken)


def _drop_packed(state: State, group: str) -> None:
    """Forgets a claimed group that has no row left; the batch remembers that it was claimed."""
    if not _left(state, group):
        state.supplies.pop(group, None)
