"""What each kind of event changes in the scheduler's state: the only code that does.

The run and its timers here; cells, executions and batches in a module each. Repetitions and late facts change nothing; a kind
that concerns nobody here is passed over.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from schemas import events as e
from schemas.envelope import Event
from services.scheduler.core import batch_changes, cell_changes, execution_changes, measurements
from services.scheduler.core.batch_changes import reset_supply
from services.scheduler.core.state import State, supplied


def concerns(event: Event) -> bool:
    """Whether the event can change anything."""
    return event.kind in _CHANGES


def evolve(state: State, event: Event) -> None:
    """Apply one event. Kinds that concern nobody here, repetitions and late facts change nothing."""
    change = _CHANGES.get(event.kind)
    if change is None or isinstance(event.data, msgspec.Raw):
        return
    change(state, event)
    if (state.supply_timer or state.supply_held) and not supplied(state):
        reset_supply(state)


def _run_started(state: State, event: Event) -> None:
    data: e.RunStarted = event.data
    state.run = event.entity
    state.config, state.seed, state.tasks = data.config, data.seed, list(data.tasks)
    state.held_out = list(data.held_out)
    state.flags = set(data.flags)


def _run_finished(state: State, event: Event) -> None:
    state.finished = True
    reset_supply(state)


def _run_paused(state: State, event: Event) -> None:
    state.paused = True


def _run_resumed(state: State, event: Event) -> None:
    state.paused = False


def _timer_set(state: State, event: Event) -> None:
    data: e.TimerSet = event.data
    state.timers += 1
    state.supply_timer, state.supply_due_us = event.entity, data.due_us


def _timer_fired(state: State, event: Event) -> None:
    if event.entity == state.supply_timer:
        state.supply_timer, state.supply_held = "", True


_CHANGES: dict[str, Callable[[State, Event], None]] = {
    "run.started": _run_started,
    "run.finished": _run_finished,
    "run.paused": _run_paused,
    "run.resumed": _run_resumed,
    "execution.settled": measurements.settled,
    "measurement.opened": measurements.opened,
    "measurement.closed": measurements.closed,
    "timer.set": _timer_set,
    "timer.fired": _timer_fired,
    **cell_changes.CHANGES,
    **execution_changes.CHANGES,
    **batch_changes.CHANGES,
}
