"""The scheduler's decider: `core.changes` changes its state, `core.rules` decides, `core.equations` holds the paper's inequalities."""

from __future__ import annotations

from collections.abc import Iterator

from schemas.envelope import Decision, Event
from services.scheduler.core import changes, rules
from services.scheduler.core.state import State


class Scheduler:
    """Elastic strategy of the paper. Pure: see `services.mesh.decider.Decider`."""

    name = "scheduler"
    state_type = State

    def initial(self) -> State:
        return State()

    def evolve(self, state: State, event: Event) -> None:
        changes.evolve(state, event)

    def decide(self, state: State, event: Event) -> Iterator[Decision]:
        # Standing rules depend on the state alone.
        if state.config is None or state.finished or not changes.concerns(event):
            return
        if event.kind == "run.started":
            yield from rules.begin(state)
        yield from rules.standing(state, event.time_us)

    def timers(self, state: State) -> dict[str, tuple[str, int]]:
        return {state.supply_timer: ("supply", state.supply_due_us)} if state.supply_timer else {}
