"""What always holds of the scheduler's state, looked at after every event while a scripted world runs."""

from __future__ import annotations

from collections import Counter

from replay.invariants import Evidence, Violation
from replay.invariants.folding import apply
from replay.invariants.reasons import Reasons
from replay.invariants.scene import Scene
from schemas.envelope import Event
from services.scheduler.core import measurements
from services.scheduler.core.state import State, least_loaded, ordered
from tests.scheduler.world import World


def check_index(state: State) -> None:
    """What is kept about all cells, executions and groups is what one finds by looking."""
    index, cells = state.index, state.cells
    able = {name: cell for name, cell in cells.items() if cell.place == "serving" and not cell.absent}
    assert index.able == sum(not cell.pool for cell in able.values())
    assert (index.able_pool, index.C_s) == (
        sum(cell.pool for cell in able.values()),
        sum(cell.capacity for cell in able.values() if cell.pool),
    )
    assert index.versions == Counter(str(cell.version) for cell in able.values())
    assert index.prefix == sum(cell.place == "training" for cell in cells.values())
    assert index.moving == {name for name, cell in cells.items() if cell.place in ("leaving", "returning")}
    assert index.leaving == sum(cell.place == "leaving" for cell in cells.values())
    assert index.returned == {name for name, cell in cells.items() if cell.place == "returning" and cell.arrived}
    assert index.out == {name for name, cell in cells.items() if cell.place == "out"}
    assert index.troubled == {name for name, cell in cells.items() if cell.lost}
    assert index.newest == max((cell.version for cell in cells.values()), default=0)
    free = [
        (cell.load, not cell.pool, cell.index, name)
        for name, cell in able.items()
        if cell.load < cell.capacity and cell.version >= state.published
    ]
    assert least_loaded(state) == ((min(free)[0], min(free)[3]) if free else None)
    assert index.ready == sum(group.status == "ready" for group in state.groups.values())
    assert index.undecided == sum(group.status == "dispatched" for group in state.groups.values())
    assert index.lost == {name for name, each in state.executions.items() if each.lost}
    assert set(state.queue) == {n for n, each in state.executions.items() if each.status == "queued" and each.group}
    held = [each for name, each in state.executions.items() if each.measurement]
    assert measurements.slots(state) == sum(each.status in ("placed", "running") for each in held)


class Watch:
    """Invariants of the scheduler's state, checked after every change."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.looked = 0
        self.held_out: set[str] = set()
        self.level: dict[str, int] = {}
        self.before = (0, 0, 0, 0)
        """d, p, f and a before the event."""
        self.open: set[str] = set()
        """Executions that were not finished before the event."""
        self.scene, self.wrong = Scene(), list[Violation]()
        self.reasons = Reasons(self.scene, Evidence(), self.wrong)
        self.reasons.begin()
        evolve = world.driver.decider.evolve

        def watched(state: State, event: Event) -> None:
            evolve(state, event)
            self.look(state, event)

        world.driver.decider.evolve = watched

    def look(self, state: State, event: Event) -> None:
        self.reasons.see(event)
        apply(self.scene, event)
        assert not self.wrong, "a decision says why, and it is so"
        assert 0 <= state.f <= state.p <= state.d
        if event.kind == "measurement.opened":
            self.held_out.update(event.data.executions)
        assert not self.held_out.intersection(state.queue)
        assert not any(each.group for name, each in state.executions.items() if name in self.held_out)
        counters = (state.d, state.p, state.f, state.a)
        if event.kind == "execution.cancelled":
            assert event.entity not in state.executions, "nothing is held for it, whatever it was"
            assert state.f - self.before[2] == (event.entity in self.open), "f rises at once"
        self.open = set(state.executions) - self.held_out
        if event.kind == "execution.lost" or (event.kind == "execution.placed" and event.data.attempt > 0):
            assert counters == self.before, "a lost execution keeps its place in the ledger"
        if event.entity in self.held_out or event.kind.startswith("measurement."):
            assert counters == self.before, "held-out executions are in no counter"
        self.before = counters
        assert state.a >= 0
        if state.config is None:
            return
        self.looked += 1
        # It looks at everything: now and then is often enough, over so many runs.
        if self.looked % 11 == 0:
            check_index(state)
        moving = [name for name, cell in ordered(state) if cell.place in ("leaving", "returning")]
        if state.config.scheduler.strategy != "colocate":
            assert len(moving) <= 1, "transitions are serial"
        places = {state.cells[name].place for name in moving}
        assert len(places) <= 1, "nobody leaves while another returns"
        training = [cell.index for _, cell in ordered(state) if cell.place == "training"]
        assert training == list(range(len(training))), "participating cells are a prefix"
        if event.kind == "execution.placed":
            assert not state.paused
            assert not state.cells[event.data.cell].withdrawn
            assert not state.cells[event.data.cell].lost
        if event.kind == "route.moved":
            assert not state.cells[event.data.target].withdrawn
            assert not state.cells[event.data.target].lost
        for name, cell in ordered(state):
            placed = sum(1 for each in state.executions.values() if each.cell == name)
            assert placed == cell.load <= cell.capacity
            if cell.place == "training":
                assert cell.load == 0
        taken = state.p - state.f + state.a + measurements.slots(state)
        assert taken <= state.config.cells.count * state.config.cells.capacity + state.config.cells.C_s
        if state.burst:
            w = state.d - state.f
            if event.kind == "execution.dispatched":
                self.level[state.burst.id] = w
            else:
                assert w <= self.level.get(state.burst.id, w), "w never rises inside a burst"
                self.level[state.burst.id] = w
