"""Which engine serves an execution: the start rule, the next attempt of a lost one, and where routes move when a cell leaves."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from schemas import events as e
from schemas import ids
from schemas.envelope import Decision
from schemas.flags import REASONS
from schemas.units import check
from services.scheduler.core import equations as eq
from services.scheduler.core import measurements
from services.scheduler.core.reasons import told
from services.scheduler.core.state import Cell, State, cell_count, least_loaded, served_capacity

Decisions = Iterator[Decision]


def evacuate(state: State) -> Decisions:
    for name in sorted(state.index.emptying, key=lambda name: (ids.in_pool(name), ids.cell_index(name))):
        if state.cells[name].holds:
            yield from move_routes(state, name)


def place_again(state: State) -> Decisions:
    """The next attempt of an execution whose attempt was lost takes its slot; no counter moves. One that has its slot
    on a cell which serves nobody is moved first (11). After the last burst too: the last measurement waits for its slots."""
    if state.paused:
        return
    for name in sorted(state.index.lost):
        execution = state.executions[name]
        cell = state.cells[execution.cell]
        if cell.place != "serving" or cell.absent:
            continue
        yield Decision(
            kind="execution.placed",
            entity=name,
            data=e.ExecutionPlaced(
                cell=execution.cell,
                epoch=cell.epoch,
                attempt=execution.attempt + 1,
                reason=[check("its slot is held", cell.load, "<=", cell.capacity)],
            ),
        )


def place(state: State) -> Decisions:
    """The start rule, on the least loaded engine whose policy version is current. After the last burst nothing more."""
    while state.line_from < len(state.line) and state.index.free and not state.paused and state.burst is not None:
        C_R, held_out = served_capacity(state), measurements.slots(state)
        if eq.startable(d=state.d, p=state.p, f=state.f, a=state.a, C_R=C_R, e=held_out) == 0:
            return
        engine = least_loaded(state)
        if engine is None:
            return
        load, name = engine
        yield Decision(
            kind="execution.placed",
            entity=state.line[state.line_from],
            data=e.ExecutionPlaced(
                cell=name,
                epoch=state.cells[name].epoch,
                attempt=0,
                reason=[
                    check("capacity (1)", state.p - state.f + state.a + held_out, "<", C_R),
                    check("engine has room", load, "<", state.cells[name].capacity),
                ],
            ),
        )


def move_routes(state: State, source: str) -> Decisions:
    """Destinations: the separate pool, then cells in reverse index order, so that whoever is expected to serve longest
    takes what it has room for. In the pool the engine with the fewest executions, then the lowest index.

    After equation (2) there is room for all of them; where a cell is withdrawn, the rest waits for room.
    """
    pool = [(cell.load, cell.index, name) for name, cell in _pool(state) if cell.load < cell.capacity]
    heapq.heapify(pool)
    index = cell_count(state) - 1
    reason = _taken_away(state.cells[source]) if REASONS in state.flags else ""
    for execution in sorted(state.cells[source].holds):
        if pool:
            load, place, target = pool[0]
            if load + 1 < state.cells[target].capacity:
                heapq.heapreplace(pool, (load + 1, place, target))
            else:
                heapq.heappop(pool)
        else:
            while index >= 0 and not _has_room(state, ids.cell_id(index)):
                index -= 1
            if index < 0:
                return
            target = ids.cell_id(index)
        cell = state.cells[target]
        yield Decision(
            kind="route.moved",
            entity=execution,
            data=e.RouteMoved(
                source=source,
                target=target,
                epoch=cell.epoch,
                kv="recomputed",
                reason=reason,
                checks=told(state, check("target has room", cell.load, "<", cell.capacity)),
            ),
        )


def _taken_away(cell: Cell) -> e.RouteReason:
    """What takes a cell away from its executions."""
    if cell.place == "leaving":
        return "transition"
    return "lost" if cell.lost == "rollout" else "withdrawn"


def _pool(state: State) -> list[tuple[str, Cell]]:
    """Engines of the pool that may take executions."""
    names = [ids.pool_id(index) for index in range(state.rules.cells.pool)]
    return [(name, state.cells[name]) for name in names if name in state.cells and not state.cells[name].absent]


def _has_room(state: State, name: str) -> bool:
    cell = state.cells.get(name)
    return cell is not None and cell.place == "serving" and not cell.absent and cell.load < cell.capacity
