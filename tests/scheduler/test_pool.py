"""The separate rollout pool: C_s in the equations, routes that go there first, engines that never change their role."""

from __future__ import annotations

from typing import Any

import pytest

from schemas import events as e
from schemas.errors import ConfigError
from schemas.ids import in_pool
from services.scheduler.core.state import served_capacity
from tests.scheduler.watch import Watch
from tests.scheduler.world import World, small_config


def world_of(**overrides: Any) -> World:
    values: dict[str, Any] = {"cells__pool": 2, "cells__pool_capacity": 5, "cells__trainable": 3} | overrides
    world = World(small_config(**values), seed=5)
    Watch(world)
    return world


def test_the_pool_serves_and_never_changes_its_role() -> None:
    world = world_of()
    world.run()
    assert not any(in_pool(d.entity) for d in world.decisions if d.kind == "cell.role-transition")
    placed = {d.data.cell for d in world.decisions if d.kind == "execution.placed"}
    assert {"pool-0", "pool-1"} <= placed


def test_capacity_counts_the_pool() -> None:
    """(1) C_R = C_s + (K - k) C_e = 10 + 3 * 8 before anybody trains."""
    world = world_of()
    world.start()
    while any(kind == "cell.joined" for _, kind, _, _ in world.pending):
        index = next(i for i, each in enumerate(world.pending) if each[1] == "cell.joined")
        world.say(*world.pending.pop(index))
    assert served_capacity(world.state) == 10 + 3 * 8


def test_one_cell_beside_a_pool_is_a_coarse_row() -> None:
    """(2) w <= C_R - C_e = C_s: the one cell leaves once what is outstanding fits the pool, which serves meanwhile."""
    world = world_of(cells__count=1, cells__trainable=1, cells__capacity=24, scheduler__phi=1.0)
    world.run()
    left = [
        d.data.reason[0]
        for d in world.decisions
        if d.kind == "cell.role-transition" and d.data.phase == "decided" and d.data.target == "train"
    ]
    assert left and all(each.right == 10 for each in left)
    kept = [d.data.reason[-1] for d in world.decisions if d.kind == "burst.ended"]
    assert {(each.rule, each.right) for each in kept} == {("core retention (3)", 10)}


@pytest.mark.parametrize("seed", range(3))
def test_executions_move_to_the_pool_first_then_to_the_highest_cell(seed: int) -> None:
    world = World(
        small_config(
            cells__pool=2,
            cells__pool_capacity=2,
            cells__count=4,
            cells__trainable=4,
            cells__capacity=20,
            scheduler__phi=2.0,
        ),
        seed=seed,
    )
    decider, moved = world.driver.decider, []
    evolve = decider.evolve

    def watched(state: Any, event: Any) -> None:
        if event.kind == "route.moved":
            free = {n: c for n, c in state.cells.items() if c.place == "serving" and c.load < c.capacity}
            pool = [name for name in free if in_pool(name)]
            moved.append(event.data.target)
            assert moved[-1] in (pool or [max(free, key=lambda name: free[name].index)])
        evolve(state, event)

    decider.evolve = watched
    world.start()
    while world.step():
        for timer, (purpose, _) in decider.timers(world.state).items():
            world.say("scheduler", "timer.fired", timer, e.TimerFired(purpose=purpose))
    assert moved


def test_lost_executions_do_not_hold_up_the_last_measurement() -> None:
    """All engines are full of executions that are lost after the last burst: they go on, end, and leave their slots."""
    world = world_of(
        steps=1,
        cells__count=1,
        cells__trainable=1,
        cells__pool=1,
        cells__pool_capacity=4,
        scheduler__strategy="async",
        scheduler__mu=1,
        scheduler__phi=2.0,
        eval__path="held-out",
        eval__every=1,
        eval__executions=2,
    )
    world.start()
    while world.step():
        if world.state.burst is None and world.state.measurement is not None:
            break
    assert world.state.measurement is not None
    running = [(name, each) for name, each in world.state.executions.items() if each.status in ("placed", "running")]
    for name, each in running:
        attempt = each.attempt
        world.pending = [each for each in world.pending if each[2] != name]
        decided = world.say("harness", "execution.lost", name, e.ExecutionLost(attempt=attempt, reason="test"))
        world.attempts[name] = attempt + 1
        assert ("execution.placed", name) in {(d.kind, d.entity) for d in decided}
    while world.step():
        pass
    assert world.finished


def test_a_withdrawn_pool_engine_empties() -> None:
    world = world_of()
    world.start()
    while world.state.cells.get("pool-0") is None or not world.state.cells["pool-0"].load:
        world.step()
    world.say("operator", "cell.withdrawn", "pool-0", e.CellWithdrawn(by="test"))
    while world.state.cells["pool-0"].load and world.step():
        pass
    assert world.state.cells["pool-0"].load == 0


def test_async_may_train_with_all_cells_beside_a_pool() -> None:
    with pytest.raises(ConfigError, match="nobody would ever serve"):
        small_config(cells__trainable=3, scheduler__strategy="async")
    small_config(cells__trainable=3, cells__pool=1, scheduler__strategy="async")
