"""Who trains when, as values behind one small interface; `scheduler.strategy` names one.

| strategy | joins training | after the burst |
| --- | --- | --- |
| elastic | the next cell of the prefix, once (2) and the supply check allow it | satellites return, the core stays by (3) |
| colocate | all cells together, once what is outstanding fits without them | all return together |
| async | the first `cells.trainable` cells, at once; they never serve | nobody returns |

What they have in common is in `rules`: cells that train are a prefix, batches, publication, dispatch, staleness. phi, mu,
streaming, the size of cells and the separate pool are configuration and no strategy's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from schemas.ids import cell_id
from schemas.units import Check, check
from services.scheduler.core import equations as eq
from services.scheduler.core import measurements
from services.scheduler.core.reasons import told
from services.scheduler.core.state import (
    State,
    cell_count,
    groups_of_burst,
    next_to_train,
    prefix_to_train,
    served_capacity,
    supply_check,
    training,
)


class Strategy(msgspec.Struct, frozen=True, kw_only=True):
    name: Literal["elastic", "colocate", "async"]
    together: bool
    """Whether the cells that `joining` names leave at once and come back at once; else one after the other."""
    supplied: bool
    """Whether the supply check must have held for tau before anybody joins."""
    split: bool
    """Whether the cells that may train serve nobody, from the start."""
    joining: Callable[[State], list[str]]
    """Cells that would join training next, lowest index first; empty when there is none."""
    gate: Callable[[State, list[str]], list[Check]]
    """What must hold before they do, but for the supply's duration; in the order in which it is told."""
    staying: Callable[[State], tuple[list[str], list[Check]]]
    """Training cells that go on when the burst ends, and why."""


def strategy_of(state: State) -> Strategy:
    return STRATEGIES[state.rules.scheduler.strategy]


def _one(state: State) -> list[str]:
    name = next_to_train(state)
    return [] if name is None else [name]


def _leaves_room(state: State, names: list[str]) -> list[Check]:
    """Equation (2) for all of them, with what a measurement needs, and the outcomes that the last engine waits for.

    (2) counts executions. Where no engine would remain, every group must have its outcome: one that is discarded may
    have to be replaced inside the burst, and then nobody could run it."""
    w, C_R = eq.waterlevel(d=state.d, f=state.f), served_capacity(state)
    leaving = len(names) * state.rules.cells.capacity
    checks = [eq.waterlevel_allows(w=w, C_R=C_R, C_e=leaving)]
    held_out = measurements.leaves_room(state, leaving)
    if held_out is not None:
        checks.append(held_out)
    if state.index.able + state.index.able_pool <= len(names):
        checks.append(check("groups without outcome", state.index.undecided, "==", 0))
    return checks


def _supplied_gate(state: State, names: list[str]) -> list[Check]:
    """What elastic and colocate have in common."""
    level, *rest = _leaves_room(state, names)
    checks = [level, supply_check(state), *rest]
    whole = whole_burst(state)
    return checks if whole is None else [*checks, whole]


def whole_burst(state: State) -> Check | None:
    """Without streaming: all groups of the burst are ready, or in its batches. None with streaming."""
    s, burst = state.rules.scheduler, state.burst
    if s.streaming or burst is None:
        return None
    return eq.whole_burst(ready=groups_of_burst(state), steps=burst.steps - burst.done, B=s.B)


def _fixed_split(state: State, names: list[str]) -> list[Check]:
    most = state.rules.cells.trainers(state.added)
    return [check("fixed split", state.cells[name].index, "<", most) for name in names]


def _retention(state: State) -> tuple[list[str], list[Check]]:
    """Equation (3) and the supply check keep the core."""
    s, cells = state.rules.scheduler, state.rules.cells
    w = eq.waterlevel(d=state.d, f=state.f) + state.owed * s.group_size
    absent = [state.cells[name] for name in state.index.withdrawn | state.index.troubled]
    C_s = cells.C_s - sum(cell.capacity for cell in absent if cell.pool)
    K = cell_count(state) - sum(not cell.pool for cell in absent)
    reason = [
        supply_check(state),
        eq.core_retention(w=w, mu=s.mu, N=s.group_size, B=s.B, C_s=C_s, K=K, C_e=cells.capacity),
    ]
    return [cell_id(0)] if all(each.holds for each in reason) else [], reason


def _nobody(state: State) -> tuple[list[str], list[Check]]:
    return [], [check("cells that stay (colocate)", 0, "==", 0)]


def _everybody(state: State) -> tuple[list[str], list[Check]]:
    """But for a satellite that an operator withdrew and those above it: what trains is a prefix."""
    names = training(state)
    withdrawn = [state.cells[name].index for name in names if state.cells[name].withdrawn]
    staying = [name for name in names if state.cells[name].index < min(withdrawn, default=len(names))]
    most = state.rules.cells.trainers(state.added)
    reason = [check("fixed split", len(staying), "<=", most)]
    if withdrawn:
        reason += told(state, check("none of them withdrawn", len(withdrawn), "==", 0))
    return staying, reason


STRATEGIES = {
    each.name: each
    for each in (
        Strategy(
            name="elastic",
            together=False,
            supplied=True,
            split=False,
            joining=_one,
            gate=_supplied_gate,
            staying=_retention,
        ),
        Strategy(
            name="colocate",
            together=True,
            supplied=True,
            split=False,
            joining=prefix_to_train,
            gate=_supplied_gate,
            staying=_nobody,
        ),
        Strategy(
            name="async",
            together=False,
            supplied=False,
            split=True,
            joining=_one,
            gate=_fixed_split,
            staying=_everybody,
        ),
    )
}
