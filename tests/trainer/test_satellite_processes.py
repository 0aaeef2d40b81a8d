"""Two trainer processes on a real server, killed as a machine would kill them, end where one cell alone would end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schemas import events as e
from schemas.config import Trainer as TrainerConfig
from schemas.config_file import from_tree
from schemas.errors import TrainerError
from schemas.micro_steps import MicroStep
from services.mesh.nats_bus import connect
from services.mesh.server import NatsServer
from services.mesh.service import Context
from services.mesh.weights.transport import WeightAddress, open_transport
from services.trainer.cell import Cell
from services.trainer.objective import ObjectiveTerms
from tests.trainer.stage import Stage

WORKER = Path(__file__).with_name("trainer_worker.py")
LOOSE = {"clip_low": 0.0, "clip_high": 1e9}
CELLS = ["cell-0", "cell-1"]

Start = Callable[[str], Any]


@pytest.fixture
def run(tmp_path: Path) -> str:
    """One of the test's own: all tests share the server, and no run may read another's log."""
    return f"r-{tmp_path.name[-24:].replace('_', '-')}"


@pytest.fixture
async def stage(
    nats_server: NatsServer,
    run: str,
    tmp_path: Path,
    policy: Path,
    settings: TrainerConfig,
    request: pytest.FixtureRequest,
) -> AsyncIterator[Stage]:
    """Its parameter is `trainer.lost_s`."""

    def build(context: Context) -> Cell:
        raise AssertionError("processes build their own")

    async with await connect(nats_server.url, run, name="test") as bus:
        await bus.open_run()
        tree = {
            "name": "t",
            "harness": {"command": ["true"]},
            "steps": 2,
            "cells": {"trainable": 2},
            "scheduler": {"N": 4, "B": 2, "mu": 2, "phi": 0.0},
            "rollout": {"transport": "shared-memory"},
            "policy": {"path": str(policy)},
            "trainer": {
                "lr": settings.lr,
                "weight_decay": settings.weight_decay,
                "grad_clip": settings.grad_clip,
                "lost_s": getattr(request, "param", 60.0),
                **LOOSE,
            },
        }
        stage = Stage(bus, tmp_path, build, run=run)
        stage.started = e.RunStarted(seed=0, config=from_tree(tree, where="test"), tasks=[], code="test")
        await stage.say("operator", "run.started", run, stage.started)
        (tmp_path / "secret").write_bytes(b"s")
        yield stage


@pytest.fixture
async def start(nats_server: NatsServer, run: str, tmp_path: Path) -> AsyncIterator[Start]:
    """Starts a cell's trainer; what still runs is killed at the end, and its log shown where the test failed."""
    started: list[tuple[asyncio.subprocess.Process, Path]] = []

    async def start(cell: str) -> asyncio.subprocess.Process:
        log = tmp_path / f"{cell}.{len(started)}.log"
        command = [sys.executable, str(WORKER), nats_server.url, run, str(tmp_path), cell]
        with log.open("wb") as file:
            process = await asyncio.create_subprocess_exec(*command, stdout=file, stderr=file)
        started.append((process, log))
        return process

    yield start
    for process, log in started:
        if process.returncode is None:
            process.kill()
            await process.wait()
        sys.stdout.write(f"--- {log.name}\n{log.read_text()}\n")


@contextlib.contextmanager
def frozen(process: asyncio.subprocess.Process) -> Any:
    """The process does nothing meanwhile."""
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


async def killed(process: asyncio.subprocess.Process) -> None:
    process.kill()
    assert await process.wait() == -signal.SIGKILL


@pytest.mark.timeout(180)
async def test_a_satellite_and_then_the_core_are_killed(
    stage: Stage, start: Start, micro_steps: Any, make_cell: Callable[..., Cell]
) -> None:
    batches: list[list[MicroStep]] = [micro_steps(f"b-{index:06d}", 4) for index in (1, 2)]
    core, satellite = await start("cell-0"), await start("cell-1")
    for cell in CELLS:
        await stage.enter_training(cell)

    await stage.open_batch(1, version=0, final=False)
    with frozen(core):
        for each in batches[0]:
            await stage.enqueue(each)
        await stage.seen("micro-step.done", 2, cell="cell-1")
        await killed(satellite)
    satellite = await start("cell-1")
    await stage.close("b-000001", 4, CELLS)
    await stage.seen("batch.stepped", version=1)
    # The exposure follows the broadcast: a satellite frozen in between would miss both once the core is killed.
    await stage.seen("weights.exposed", purpose="join", version=1)

    await stage.open_batch(2, version=1, final=True)
    with frozen(satellite):
        for each in batches[1][:2]:
            await stage.enqueue(each)
        await stage.seen("micro-step.done", 2, batch="b-000002", cell="cell-0")
        await killed(core)
    for each in batches[1][2:]:
        await stage.enqueue(each)
    await stage.seen("micro-step.done", batch="b-000002", cell="cell-1")
    core = await start("cell-0")
    await stage.close("b-000002", 4, CELLS)
    last = (await stage.seen("batch.stepped", version=2)).data
    exposed = (await stage.seen("weights.exposed", purpose="publish")).data
    with open_transport("shared-memory") as transport:
        weights = np.zeros(exposed.bytes // 4, np.float32)
        transport.pull(WeightAddress(**exposed.address), weights)
    for cell in reversed(CELLS):
        decided = e.CellRoleTransition(phase="decided", source="train", target="rollout", epoch=2)
        await stage.say("scheduler", "cell.role-transition", cell, decided)
        await stage.seen("cell.role-transition", entity=cell, phase="released", target="rollout")
    for process in (core, satellite):
        process.terminate()
        assert await process.wait() == 0

    alone = make_cell(terms=ObjectiveTerms(groups=2, executions=4, **LOOSE))
    for batch in batches:
        alone.begin_batch()
        for each in batch:
            alone.micro_step(each)
        result = alone.step()
    assert last.grad_norm == pytest.approx(result.grad_norm, rel=1e-5)
    assert last.loss == pytest.approx(result.loss, rel=1e-5)
    expected = alone.flat_weights()
    assert np.linalg.norm(weights - expected) / np.linalg.norm(expected) < 1e-5
    released = [event.entity for event in await stage.log() if event.kind == "micro-step.released"]
    assert {name[:8] for name in released} == {"m-000001", "m-000002"}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("stage", [2.0], indirect=True)
async def test_a_satellite_that_stands_still_is_left_behind_and_ends_when_it_goes_on(
    stage: Stage, start: Start, micro_steps: Any, make_cell: Callable[..., Cell]
) -> None:
    batch = micro_steps("b-000001", 4)
    core, satellite = await start("cell-0"), await start("cell-1")
    for cell in CELLS:
        await stage.enter_training(cell)
    await stage.open_batch(1, version=0, final=True)
    with frozen(core):
        for each in batch:
            await stage.enqueue(each)
        await stage.seen("micro-step.done", 2, cell="cell-1")
        satellite.send_signal(signal.SIGSTOP)
    lost = (await stage.seen("cell.lost")).data
    assert lost.service == "trainer"
    await stage.put_out("cell-1")
    closed = e.BatchStreamClosed(micro_steps=4, groups=["g-000000"])
    await stage.say("packer", "batch.stream-closed", "b-000001", closed)
    await stage.all_done_by("cell-0", 4)
    await stage.say("scheduler", "batch.join-closed", "b-000001", e.BatchJoinClosed(members=["cell-0"], epochs=[1]))
    stepped = (await stage.seen("batch.stepped", version=1)).data
    satellite.send_signal(signal.SIGCONT)
    assert await satellite.wait() == TrainerError.exit_code
    # Its next process joins anew: sent back first, as the scheduler would.
    satellite = await start("cell-1")
    await stage.seen("service.joined", 2, entity="trainer-cell-1")
    decided = e.CellRoleTransition(phase="decided", source="train", target="rollout", epoch=2)
    await stage.say("scheduler", "cell.role-transition", "cell-1", decided)
    await stage.seen("cell.role-transition", entity="cell-1", phase="released", epoch=2)
    for process in (core, satellite):
        process.terminate()
        assert await process.wait() == 0
    alone = make_cell(terms=ObjectiveTerms(groups=2, executions=4, **LOOSE))
    alone.begin_batch()
    for each in batch:
        alone.micro_step(each)
    result = alone.step()
    assert stepped.grad_norm == pytest.approx(result.grad_norm, rel=1e-5)
    assert stepped.loss == pytest.approx(result.loss, rel=1e-5)
