"""Who changes its role, and when: into training as (2) and the supply check allow it, back after the burst, out after a loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from schemas import events as e
from schemas import ids
from schemas.envelope import Decision
from schemas.flags import HELD
from schemas.units import CellRole, Check, check
from services.scheduler.core import equations as eq
from services.scheduler.core.placement import move_routes
from services.scheduler.core.reasons import told
from services.scheduler.core.state import (
    Cell,
    State,
    cell_count,
    moving,
    served_capacity,
    supplied,
    supply_check,
    training,
)
from services.scheduler.core.strategies import strategy_of

Decisions = Iterator[Decision]


def put_out(state: State) -> Decisions:
    """Nobody waits for a cell that is gone: its transition fails, and the prefix shrinks to below it. Those above it
    leave too, the highest first; what all of them trained of the open batch is trained again by those who stay."""
    troubled = [state.cells[name] for name in state.index.troubled]
    lost = [
        cell.index
        for cell in troubled
        if cell.place == "leaving" or (cell.place == "training" and cell.lost == "trainer")
    ]
    for name, cell in reversed(moving(state)):
        if cell.lost or (lost and cell.place == "leaving" and cell.index > min(lost)):
            yield _failed(name, cell, lost=min([*lost, cell.index]))
    if lost:
        for name in reversed(training(state)[min(lost) :]):
            yield _failed(name, state.cells[name], lost=min(lost))


def complete_transition(state: State) -> Decisions:
    """Into training in the order of their indices, so that whoever trains is a prefix also where several are on the way."""
    for name in sorted(state.index.returned, key=ids.cell_index):
        back = state.cells[name]
        yield _transition(name, back, "completed", to="rollout", reason=told(state, _arrived(back)))
    while state.index.leaving:
        name = ids.cell_id(state.index.prefix)
        cell = state.cells.get(name)
        if cell is None or cell.place != "leaving" or not cell.arrived:
            return
        following = check("next of the prefix", cell.index, "==", state.index.prefix)
        yield _transition(name, cell, "completed", to="train", reason=told(state, following, _arrived(cell)))


def _arrived(cell: Cell) -> Check:
    """What was said of another epoch changed nothing."""
    return check("epoch of its arrival", cell.epoch, "==", cell.epoch)


def send_back(state: State) -> Decisions:
    """The cells of a burst that ended return one at a time, or together; the core last, so that the others stay a
    prefix. So does one that was put out, once its process is there."""
    together = strategy_of(state).together
    if state.index.leaving or (state.index.moving and not together):
        return
    while state.recall and together:
        name = state.recall[-1]
        yield _transition(name, state.cells[name], "decided", to="rollout", reason=state.recall_reason)
    if state.index.moving:
        return
    if state.recall:
        name = state.recall[-1]
        yield _transition(name, state.cells[name], "decided", to="rollout", reason=state.recall_reason)
        return
    out = [name for name in state.index.out if not state.cells[name].lost]
    if out:
        name = max(out, key=ids.cell_index)
        reason = [check("above the prefix", state.cells[name].index, ">=", state.index.prefix)]
        yield _transition(name, state.cells[name], "decided", to="rollout", reason=reason)


def join_training(state: State, now_us: int) -> Decisions:
    """The strategy says who is next and what must hold; where the supply counts, it has held for tau. One cell at a time
    joins, or all that the strategy names. What keeps it back is said whenever it is something else than before."""
    burst, strategy = state.burst, strategy_of(state)
    if state.paused or state.index.moving or state.recall or burst is None or burst.done == burst.steps:
        return
    names = strategy.joining(state)
    if not names:
        return
    supply = supply_check(state)
    if strategy.supplied and supply.holds and not state.supply_held and not state.supply_timer:
        yield Decision(
            kind="timer.set",
            entity=ids.timer_id("supply", state.timers + 1),
            data=e.TimerSet(
                purpose="supply",
                due_us=now_us + round(state.rules.scheduler.tau_s * 1e6),
                reason=told(state, supply),
            ),
        )
    reason = strategy.gate(state, names)
    if strategy.supplied and supply.holds and not state.supply_held:
        tau_s = state.rules.scheduler.tau_s
        since_us = state.supply_due_us - round(tau_s * 1e6)
        lasting = eq.supplied_for(since_us=since_us, now_us=now_us, tau_s=tau_s)
        # Whatever the clock says, it lasted when its timer has fired.
        reason.insert(2, msgspec.structs.replace(lasting, holds=False))
    failing = next((each.rule for each in reason if not each.holds), None)
    if failing is not None:
        if HELD in state.flags and (names[0], failing) != state.held:
            yield Decision(kind="cell.held", entity=names[0], data=e.CellHeld(reason=reason))
        return
    for name in names:
        yield _transition(name, state.cells[name], "decided", to="train", reason=reason)
    for name in names:
        yield from move_routes(state, name)


def still_held(state: State) -> bool:
    """Whether the next cell is held back by what was said before, so that nothing new can be decided about it."""
    name, rule = state.held
    if not name or name != ids.cell_id(state.index.prefix):
        return False
    supplied_now = supplied(state)
    if supplied_now and not state.supply_held and not state.supply_timer:
        return False
    if rule == eq.WATERLEVEL:
        able = cell_count(state) - state.index.prefix
        everybody = state.index.able == able and strategy_of(state).together
        leaving = state.rules.cells.trainers(state.added) - state.index.prefix if everybody else 1
        return state.d - state.f > served_capacity(state) - leaving * state.rules.cells.capacity
    return False


def _transition(
    name: str, cell: Cell, phase: Literal["decided", "completed"], *, to: CellRole, reason: list[Check]
) -> Decision:
    return Decision(
        kind="cell.role-transition",
        entity=name,
        data=e.CellRoleTransition(
            phase=phase,
            source="rollout" if to == "train" else "train",
            target=to,
            epoch=cell.epoch + 1 if phase == "decided" else cell.epoch,
            reason=reason,
        ),
    )


def _failed(name: str, cell: Cell, *, lost: int) -> Decision:
    source: CellRole = "rollout" if cell.place == "leaving" else "train"
    return Decision(
        kind="cell.role-transition",
        entity=name,
        data=e.CellRoleTransition(
            phase="failed",
            source=source,
            target="train" if source == "rollout" else "rollout",
            epoch=cell.epoch,
            reason=[check("at or above the lost cell", cell.index, ">=", lost)],
        ),
    )
