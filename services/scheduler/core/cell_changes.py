"""What events change in cells: who is there, in which role, at which version, and what an operator wants of them."""

from __future__ import annotations

from collections.abc import Callable

from schemas import events as e
from schemas.envelope import Event
from schemas.ids import in_pool
from services.scheduler.core.batch_changes import reset_supply, take_back
from services.scheduler.core.index import add, change
from services.scheduler.core.state import Cell, State
from services.scheduler.core.strategies import STRATEGIES


def cell_withdrawn(state: State, event: Event) -> None:
    cell = state.cells.get(event.entity)
    # Without the core nothing is trained: it cannot be left out.
    if cell is not None and (cell.pool or cell.index > 0):
        change(state, event.entity, withdrawn=True)


def cell_reinstated(state: State, event: Event) -> None:
    if event.entity in state.cells:
        change(state, event.entity, withdrawn=False)


def cell_added(state: State, event: Event) -> None:
    state.added += 1


def service_joined(state: State, event: Event) -> None:
    if event.owner not in ("rollout", "trainer"):
        return
    state.processes[event.entity] = event.seq
    name = event.entity.removeprefix(f"{event.owner}-")
    cell = state.cells.get(name)
    # A rollout process serves once its engine has joined.
    if cell is not None and event.owner == cell.lost == "trainer":
        change(state, name, lost="")


def cell_lost(state: State, event: Event) -> None:
    data: e.CellLost = event.data
    cell = state.cells.get(event.entity)
    if cell is None or data.process != state.processes.get(f"{data.service}-{event.entity}"):
        return
    # The batch waits for its core, whatever happens.
    if data.service == "rollout" or cell.index > 0:
        change(state, event.entity, lost=data.service)


def cell_joined(state: State, event: Event) -> None:
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


def role_transition(state: State, event: Event) -> None:
    data: e.CellRoleTransition = event.data
    cell = state.cells.get(event.entity)
    if cell is None:
        return
    name = event.entity
    if data.phase == "decided":
        place = "leaving" if data.target == "train" else "returning"
        change(state, name, place=place, epoch=data.epoch, arrived=False)
        take_back(state.batch, name)
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
        take_back(state.batch, name)
    else:
        return
    reset_supply(state)


def _not_recalled(state: State, name: str) -> None:
    if state.recall and state.recall[-1] == name:
        state.recall.pop()
    elif name in state.recall:
        state.recall.remove(name)


def cell_held(state: State, event: Event) -> None:
    data: e.CellHeld = event.data
    state.held = (event.entity, next(each.rule for each in data.reason if not each.holds))


def weights_published(state: State, event: Event) -> None:
    data: e.WeightsPublished = event.data
    cell = state.cells.get(event.entity)
    if cell is not None and cell.version < data.version:
        change(state, event.entity, version=data.version)


CHANGES: dict[str, Callable[[State, Event], None]] = {
    "cell.withdrawn": cell_withdrawn,
    "cell.reinstated": cell_reinstated,
    "service.joined": service_joined,
    "cell.added": cell_added,
    "cell.lost": cell_lost,
    "cell.joined": cell_joined,
    "cell.role-transition": role_transition,
    "cell.held": cell_held,
    "weights.published": weights_published,
}
