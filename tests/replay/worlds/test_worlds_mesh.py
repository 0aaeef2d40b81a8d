"""All services of a run on scripted worlds, in one process on an ordinary event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from replay.checker import check
from replay.replayer import Replayer, load_deciders
from replay.worlds.training import wrong_steps
from schemas.envelope import Event
from tests.replay.worlds.plain import Mesh

PACE = 2e-5


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.reset_defaults()


def prove(mesh: Mesh, log: list[Event]) -> None:
    """What must hold of any run that finished."""
    assert any(event.kind == "run.finished" for event in log)
    # Scripted agents fail by themselves, which counts as an error of a harness.
    assert [each for each in check(log).violations if each.invariant != "harness_errors"] == []
    replayed = Replayer(deciders=load_deciders()).replay(log)
    assert replayed.first is None, str(replayed.first)
    assert mesh.world.violations == []
    assert wrong_steps(log, mesh.world.steps) == []
    applied = [event.seq for event, _ in mesh.rows.applied]
    assert applied == sorted(set(applied))


@pytest.mark.parametrize("seed", [1, 2])
async def test_a_run_trains_to_its_end(seed: int, tmp_path: Path) -> None:
    mesh = Mesh(seed, pace=PACE, folder=tmp_path)
    log = await mesh.run()
    prove(mesh, log)
    assert mesh.errors == []
    steps = [event for event in log if event.kind == "batch.stepped"]
    assert len(steps) == mesh.started.config.steps == len(mesh.world.steps)
    assert {each.outcome for each in mesh.world.asked} >= {"answered"}


async def test_services_and_worlds_may_fail(tmp_path: Path) -> None:
    mesh = Mesh(5, pace=PACE, folder=tmp_path)
    await mesh.begin()
    await mesh.until("execution.started", 3)
    mesh.world.next_tests += ["hang", "garbage", "crash"]
    mesh.world.next_requests += ["twice", "leave"]
    mesh.world.next_ends.append("late")
    mesh.kill("harness")
    await mesh.until("execution.started", 8)
    mesh.kill("proxy")
    mesh.world.engines["cell-1"].die(9)
    await mesh.until("execution.settled", 12)
    for engine in list(mesh.world.engines.values()):
        engine.slow(5.0, 0.05)
        engine.abort_some(2)
    await mesh.until("batch.opened")
    mesh.kill("trainer-cell-0")
    mesh.kill("trajectories")
    await mesh.until("batch.stepped")
    for instance in ("evaluator", "packer", "scheduler", "rollout-cell-2"):
        mesh.kill(instance)
    await mesh.until("run.finished")
    prove(mesh, await mesh.end())
    assert [error for error in mesh.errors if "the engine ended with code 9" not in error] == []


async def test_a_world_that_is_left_alone_has_nothing_open(tmp_path: Path) -> None:
    mesh = Mesh(7, pace=PACE, folder=tmp_path)
    await mesh.run()
    await asyncio.sleep(0)
    assert mesh.world.machine.groups == {}
    assert mesh.world.engines == {}
    assert mesh.world.exposures == {}
    assert mesh.world.stores == {}
