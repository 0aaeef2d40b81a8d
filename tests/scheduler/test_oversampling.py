"""More than N executions a group: what is dispatched counts, and what is cancelled gives its place up at once."""

from __future__ import annotations

from typing import Any

import pytest

from schemas import events as e
from schemas.envelope import Decision
from schemas.units import check
from services.scheduler.core.state import State
from tests.scheduler.watch import Watch
from tests.scheduler.world import World, small_config


def world_of(**overrides: Any) -> World:
    world = World(small_config(scheduler__oversample=2, **overrides), seed=1)
    Watch(world)
    return world


def of_status(state: State, status: str) -> str:
    return next(name for name in sorted(state.executions) if state.executions[name].status == status)


def cancel(world: World, execution: str) -> list[Decision]:
    data = e.ExecutionCancelled(reason="surplus", checks=[check("valid executions N", 4, ">=", 4)])
    return world.say("trajectories", "execution.cancelled", execution, data)


def test_every_group_is_dispatched_with_its_surplus_and_all_of_it_counts() -> None:
    world = world_of()
    world.start()
    s = world.config.scheduler
    groups = [d for d in world.decisions if d.kind == "group.dispatched"]
    assert {len(d.data.executions) for d in groups} == {s.N + 2} == {s.group_size}
    assert world.state.d == len(groups) * 6 == round((s.phi + s.mu) * s.B) * 6


@pytest.mark.parametrize("status", ["queued", "placed", "running"])
def test_a_cancelled_execution_counts_in_f_at_once_and_leaves_its_slot_to_the_next(status: str) -> None:
    world = world_of()
    world.start()
    while not any(each.status == status for each in world.state.executions.values()) or not world.state.queue:
        world.step()
    name = of_status(world.state, status)
    before = world.state.executions[name]
    cell, d, p, f, a = before.cell, *(getattr(world.state, each) for each in "dpfa")
    follows = cancel(world, name)
    state = world.state
    placed = [each for each in follows if each.kind == "execution.placed"]
    assert (state.d, state.f) == (d, f + 1)
    assert state.p == p + (status != "running"), "what never started advances p and f together"
    assert state.a == a - (status == "placed") + len(placed)
    assert name not in state.queue and all(name not in each.holds for each in state.cells.values())
    assert [each.data.cell for each in placed] == ([cell] if cell else [])
    # Whatever its harness still says, it says of nobody.
    for kind, data in (
        ("execution.started", e.ExecutionStarted(attempt=0)),
        ("execution.lost", e.ExecutionLost(attempt=0, reason="test")),
        (
            "execution.finished",
            e.ExecutionFinished(
                attempt=0, reason="completed", exit_code=0, seconds=1.0, workspace="w", workspace_digest="d"
            ),
        ),
    ):
        assert world.say("harness", kind, name, data) == []
        assert (state.p, state.f) == (p + (status != "running"), f + 1)
    assert cancel(world, name) == [] and state.f == f + 1


def test_a_cancelled_execution_that_had_ended_changes_nothing() -> None:
    world = world_of()
    world.start()
    while not any(event.kind == "execution.finished" for event in world.log):
        world.step()
    name = next(event.entity for event in world.log if event.kind == "execution.finished")
    f = world.state.f
    assert cancel(world, name) == [] and world.state.f == f


def test_core_retention_counts_what_the_next_burst_dispatches() -> None:
    """Equation (3) with N + oversample: 2 x 2 groups of 6."""
    world = World(small_config(cells__capacity=200, scheduler__phi=2.0, scheduler__oversample=2), seed=3)
    seen: list[tuple[float, int]] = []
    say = world.say

    def listen(*said: Any) -> list[Decision]:
        w = world.state.d - world.state.f
        decisions = say(*said)
        seen.extend((d.data.reason[-1].left, w) for d in decisions if d.kind == "burst.ended")
        return decisions

    world.say = listen  # type: ignore[method-assign]
    world.run()
    assert seen and all(left == w + 2 * 2 * 6 for left, w in seen)


def test_surplus_ends_sooner_than_it_would_by_itself() -> None:
    world = world_of(cells__capacity=40)
    world.run()
    assert world.finished
    cancelled = [event.entity for event in world.log if event.kind == "execution.cancelled"]
    assert len(cancelled) > 20
    consumed = sum(d.kind == "group.consumed" for d in world.decisions)
    assert consumed == world.config.steps * world.config.scheduler.B
