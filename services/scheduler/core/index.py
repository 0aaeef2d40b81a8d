"""What the rules ask about all cells, executions and groups, kept up to date by every change instead of looked up.

`change` is the only way in which a cell becomes another; `take` and `leave` the only ones in which an execution gets and
gives up its slot. So an event costs the same with ten cells as with ten thousand.

Invariants: everything here follows from the rest of the state; where something is ordered, ties are broken by index.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from services.scheduler.core.state import Cell, State

_SLACK = 64
_POOL_FIRST = 1 << 40


class Index(msgspec.Struct, kw_only=True):
    able: int = 0
    """Cells that may take executions; without the pool's engines."""
    able_pool: int = 0
    C_s: int = 0
    """What the pool's engines that may take executions serve."""
    prefix: int = 0
    """Cells that train: those with the lowest indices."""
    leaving: int = 0
    returned: set[str] = set()
    """Cells whose way back is over and to be completed."""
    moving: set[str] = set()
    out: set[str] = set()
    troubled: set[str] = set()
    """Cells that lost a process."""
    withdrawn: set[str] = set()
    emptying: set[str] = set()
    """Cells with the rollout role that are to serve nobody, whatever they still have."""
    versions: dict[str, int] = {}
    """Policy version, as a text, to how many engines serve it."""
    newest: int = 0
    """Newest version that any engine holds."""
    free: list[tuple[int, int, str]] = []
    """Heap of (load, order, name) of engines with room and a current version. Its top is true, what is below may be past."""
    ready: int = 0
    """Groups ready and unclaimed."""
    undecided: int = 0
    """Groups that may still be discarded."""
    lost: set[str] = set()
    """Executions whose attempt is lost and that were not placed again."""


def change(state: State, name: str, **values: Any) -> None:
    """The cell's fields become these."""
    cell = state.cells[name]
    _count(state.index, name, cell, -1)
    for field, value in values.items():
        setattr(cell, field, value)
    _count(state.index, name, cell, 1)
    state.index.newest = max(state.index.newest, cell.version)
    _offer(state, name, cell)
    settle(state)


def add(state: State, name: str, cell: Cell) -> None:
    state.cells[name] = cell
    _count(state.index, name, cell, 1)


def take(state: State, name: str, execution: str) -> None:
    """The execution has a slot on the cell."""
    cell = state.cells[name]
    cell.holds.add(execution)
    _offer(state, name, cell)
    settle(state)


def leave(state: State, name: str, execution: str) -> None:
    cell = state.cells[name]
    cell.holds.discard(execution)
    _offer(state, name, cell)
    settle(state)


def settle(state: State) -> None:
    """The top of the heap is true again."""
    free, cells, published = state.index.free, state.cells, state.published
    while free:
        load, _, name = free[0]
        cell = cells[name]
        if len(cell.holds) == load and load < cell.capacity and cell.version >= published and _serves(cell):
            break
        heappop(free)
    if len(free) > 4 * len(cells) + _SLACK:
        free[:] = [(cell.load, _order(cell), name) for name, cell in cells.items() if _fits(cell, published)]
        heapify(free)


def _count(index: Index, name: str, cell: Cell, by: int) -> None:
    keep = set.add if by > 0 else set.discard
    if cell.place == "serving":
        if not cell.absent:
            if cell.pool:
                index.able_pool += by
                index.C_s += by * cell.capacity
            else:
                index.able += by
            version = str(cell.version)
            count = index.versions.get(version, 0) + by
            if count:
                index.versions[version] = count
            else:
                del index.versions[version]
        elif not cell.reserved:
            keep(index.emptying, name)
    elif cell.place == "training":
        index.prefix += by
    elif cell.place == "out":
        keep(index.out, name)
    else:
        keep(index.moving, name)
        index.leaving += by * (cell.place == "leaving")
        if cell.arrived and cell.place == "returning":
            keep(index.returned, name)
    if cell.lost:
        keep(index.troubled, name)
    if cell.withdrawn:
        keep(index.withdrawn, name)


def _serves(cell: Cell) -> bool:
    return cell.place == "serving" and not cell.absent


def _fits(cell: Cell, published: int) -> bool:
    return cell.load < cell.capacity and cell.version >= published and _serves(cell)


def _offer(state: State, name: str, cell: Cell) -> None:
    if _fits(cell, state.published):
        heappush(state.index.free, (cell.load, _order(cell), name))


def _order(cell: Cell) -> int:
    return cell.index - _POOL_FIRST if cell.pool else cell.index
