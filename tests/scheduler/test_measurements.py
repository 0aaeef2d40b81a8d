"""Held-out measurements: when they are due, where their executions go, what comes of them, what waits for them."""

from __future__ import annotations

from itertools import pairwise

import pytest

from schemas import events as e
from schemas.envelope import Decision
from services.scheduler.core import measurements
from services.scheduler.core.state import ordered
from tests.scheduler.watch import Watch
from tests.scheduler.world import RUN, World, small_config


def measuring(*, seed: int = 0, every: int = 4, executions: int = 4, lose: float = 0.0, **overrides: object) -> World:
    config = small_config(eval__path="held-out", eval__every=every, eval__executions=executions, **overrides)
    world = World(config, seed=seed, lose=lose)
    Watch(world)
    return world


def of(world: World, kind: str) -> list[Decision]:
    return [each for each in world.decisions if each.kind == kind]


def advance(world: World, kind: str) -> None:
    """Until a decision of the kind was taken."""
    while not of(world, kind):
        assert world.step()


def test_versions_are_measured_at_the_start_every_so_many_steps_and_at_the_end() -> None:
    world = measuring(every=4, steps=14, cells__capacity=40)
    world.run()
    opened = of(world, "measurement.opened")
    versions = [each.data.version for each in opened]
    assert (versions[0], versions[-1]) == (0, 14)
    assert all(later - earlier >= 4 for earlier, later in pairwise(versions[:-1]))
    closed = of(world, "measurement.closed")
    assert [(each.entity, each.data.version) for each in closed] == [
        (each.entity, each.data.version) for each in opened
    ]
    assert [each.data.steps for each in closed] == [b - a for a, b in zip([0, *versions], versions, strict=False)]
    assert world.decisions[-1].kind == "run.finished"
    assert opened[1].data.executions == [f"e-h{versions[1]:06d}.{member:02d}" for member in range(4)]


def test_every_measurement_has_the_same_tasks_repeated_where_there_are_fewer() -> None:
    world = measuring(executions=5)
    world.run()
    tasks: dict[str, list[str]] = {}
    for each in of(world, "execution.dispatched"):
        if each.data.measurement:
            assert each.data.group == "" and each.data.task_digest.startswith("h")
            tasks.setdefault(each.data.measurement, []).append(each.data.task)
    [first, *others] = tasks.values()
    assert others and all(each == first for each in others)
    assert first[3:] == first[:2] and set(first) == {"held-0", "held-1", "held-2"}


def test_held_out_executions_are_placed_first_and_share_the_room() -> None:
    world = measuring(executions=6, cells__capacity=8)
    world.start()
    while not of(world, "execution.placed"):
        assert world.step()
    placed = [each.entity for each in of(world, "execution.placed")]
    assert placed[:6] == [f"e-h000000.{member:02d}" for member in range(6)]
    assert world.state.p - world.state.f + world.state.a == len(placed) - 6
    assert measurements.slots(world.state) == 6


def test_a_result_averages_what_is_not_excluded() -> None:
    world = measuring(executions=4)
    world.start()
    advance(world, "execution.placed")
    world.pending = [each for each in world.pending if each[1] == "cell.joined"]
    outcomes = [("valid", 1.0), ("valid", 0.5), ("placeholder", 0.0), ("excluded", 0.0)]
    for member, (outcome, reward) in enumerate(outcomes):
        name = f"e-h000000.{member:02d}"
        finished = e.ExecutionFinished(
            attempt=0, reason="completed", exit_code=0, seconds=1.0, workspace="w", workspace_digest="d"
        )
        while world.state.executions[name].status == "queued":
            assert world.step()
        world.say("harness", "execution.finished", name, finished)
        settled = e.ExecutionSettled(attempt=0, outcome=outcome, reward=reward)  # type: ignore[arg-type]
        said = world.say("trajectories", "execution.settled", name, settled)
        assert world.say("trajectories", "execution.settled", name, settled) == [], "said twice"
    [closed] = [each for each in said if each.kind == "measurement.closed"]
    assert (closed.data.valid, closed.data.placeholder, closed.data.excluded) == (2, 1, 1)
    assert closed.data.mean == pytest.approx(0.5)
    assert closed.data.std == pytest.approx((1 / 6) ** 0.5)


def test_no_cell_leaves_for_training_whose_room_a_measurement_needs() -> None:
    """Two cells of eight: while the core trains eight fit, so it waits until w and what is measured are no more."""
    checked = 0
    for seed in range(8):
        world = measuring(seed=seed, every=2, executions=8, cells__count=2, lose=0.1 * (seed % 2))
        world.run()
        for each in of(world, "cell.role-transition"):
            rules = {check.rule: check for check in each.data.reason}
            if each.data.target == "train" and each.data.phase == "decided":
                assert all(check.holds for check in rules.values())
                if "held-out executions fit" in rules:
                    checked += 1
                    assert rules["held-out executions fit"].left > rules["waterlevel (2)"].left
    assert checked


def test_the_last_measurement_ends_the_run_and_nothing_else_is_placed_for_it() -> None:
    world = measuring(every=100, executions=3, cells__trainable=3, cells__capacity=40, scheduler__tau_s=0.1)
    world.start()
    while len(of(world, "measurement.opened")) < 2:
        assert world.step()
    assert world.state.burst is None and not world.state.finished
    began = len(world.decisions)
    world.say("operator", "run.paused", RUN, e.RunPaused(by="test"))
    world.say("operator", "run.resumed", RUN, e.RunResumed(by="test"))
    while world.step():
        pass
    assert world.finished
    after = [each for each in world.decisions[began:] if each.kind == "execution.placed"]
    assert {each.entity[:3] for each in after} <= {"e-h"}
    assert [each.kind for each in world.decisions[-2:]] == ["measurement.closed", "run.finished"]
    assert all(cell.place != "leaving" for _, cell in ordered(world.state))


def test_nothing_is_measured_without_being_asked_for() -> None:
    world = measuring(every=0)
    world.run()
    assert of(world, "measurement.opened") == []
    assert not any(each.data.measurement for each in of(world, "execution.dispatched"))


def test_an_execution_that_ends_after_a_publication_is_late() -> None:
    world = measuring(executions=2, scheduler__phi=0.0)
    world.start()
    advance(world, "execution.placed")
    while any(each.status != "running" for name, each in world.state.executions.items() if name.startswith("e-h")):
        assert world.step()
    held_back = [each for each in world.pending if each[2] == "e-h000000.01"]
    world.pending = [each for each in world.pending if each not in held_back]
    advance(world, "burst.ended")
    assert world.state.measurement.version == 0 and len(of(world, "measurement.opened")) == 1, "one at a time"
    world.pending += held_back
    advance(world, "measurement.closed")
    assert of(world, "measurement.closed")[0].data.late == 1
    while world.step():
        pass
    assert world.finished
    assert [each.data.late for each in of(world, "measurement.closed")][1:].count(0) >= 1
