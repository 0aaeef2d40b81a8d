"""Cells that train one batch together: whoever joins or dies, the update is the one that the core alone would make.

The cells of a test are trainers with real Megatron cells in one process, each with a torch thread of its own and a
prefix group over real sockets; a lock keeps them apart inside Megatron, whose stand-ins for CUDA are the process's.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from replay.checker import check
from schemas import events as e
from schemas.config import Trainer as TrainerConfig
from schemas.micro_steps import MicroStep
from services.mesh.clock import SystemClock
from services.mesh.memory_broker import MemoryBroker
from services.mesh.memory_bus import MemoryBus
from services.mesh.service import Context
from services.mesh.weights.transport import WeightAddress, open_transport
from services.trainer.cell import Cell
from services.trainer.objective import ObjectiveStats, ObjectiveTerms
from services.trainer.prefix_group import PrefixGroup
from services.trainer.service import CellTrainer
from tests.trainer.stage import RUN, Stage

LOOSE = ObjectiveTerms(groups=2, executions=4, clip_low=0.0, clip_high=1e9)
"""No execution is masked after the first update, which moves this toy policy far."""
EXACT = 1e-5
MEGATRON = threading.RLock()


class Killed(Exception):
    """The process ends here."""


class Faults:
    """Ends a cell at the nth call of a method; holds the core's micro-steps while `gate` is closed, a satellite's while
    `slow` is."""

    def __init__(self) -> None:
        self.gate, self.slow = threading.Event(), threading.Event()
        self.gate.set()
        self.slow.set()
        self.at: tuple[str, str, int] | None = None
        self.calls: Counter[tuple[str, str]] = Counter()
        self.fired = False

        self.gone: str | None = None
        """This cell isn't started again once it was killed."""
        self.stepping = threading.Event()
        """The core has the sum of all gradients and makes its step, when `may_step` is set."""
        self.may_step = threading.Event()
        self.may_step.set()

    def called(self, cell: str, method: str) -> None:
        self.calls[cell, method] += 1
        if self.at == (cell, method, self.calls[cell, method]):
            self.fired = True
            raise Killed(f"{cell} in {method}")


class SharedCell(Cell):
    """A cell beside others in this process, whose gradients are seen and which can be killed."""

    name: str
    faults: Faults
    seen: list[torch.Tensor]

    def micro_step(self, micro_step: MicroStep, *, entropy: bool = False) -> ObjectiveStats:
        (self.faults.gate if self.name == "cell-0" else self.faults.slow).wait()
        with MEGATRON:
            stats = super().micro_step(micro_step, entropy=entropy)
        self.faults.called(self.name, "micro_step")
        return stats

    def step(self) -> Any:
        self.faults.stepping.set()
        self.faults.may_step.wait()
        gradient = torch.cat(self.gradients())
        with MEGATRON:
            result = super().step()
        self.faults.called(self.name, "step")
        self.seen.append(gradient)
        return result

    def acquire(self) -> None:
        with MEGATRON:
            super().acquire()

    def release(self) -> None:
        with MEGATRON:
            super().release()


class NamedGroup(PrefixGroup):
    """A cell's end of the group, which says whose it is."""

    def __init__(self, name: str, *, host: bool) -> None:
        super().__init__(host=host)
        self.name = name


class Cells:
    """Trainers by cell, started again as often as they are killed."""

    def __init__(self, stage: Stage, faults: Faults, make: Callable[[str], Cell]) -> None:
        self.stage, self.faults, self.make = stage, faults, make
        self.trainers: dict[str, CellTrainer] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def build(self, context: Context) -> Cell:
        with MEGATRON:
            return self.make(context.cell)

    async def start_again(self, cell: str) -> None:
        """Killed from outside, wherever it is, and started."""
        self.tasks[cell].cancel()
        await asyncio.gather(self.tasks[cell], return_exceptions=True)
        self.tasks[cell] = asyncio.create_task(self.live(cell))

    async def live(self, cell: str) -> None:
        while True:
            context = self.stage.context(cell)
            trainer = self.trainers[cell] = CellTrainer(
                context, build=self.build, open_group=lambda host: NamedGroup(cell, host=host)
            )
            try:
                await trainer.run()
            except Killed:
                if self.faults.gone == cell:
                    break
            finally:
                await trainer.close()
                await context.health.stop()

    @contextlib.asynccontextmanager
    async def living(self, *cells: str) -> AsyncIterator[None]:
        self.tasks = {cell: asyncio.create_task(self.live(cell)) for cell in cells}
        try:
            yield
        finally:
            self.faults.gate.set()
            self.faults.slow.set()
            self.faults.may_step.set()
            for task in self.tasks.values():
                task.cancel()
            ended = await asyncio.gather(*self.tasks.values(), return_exceptions=True)
            assert all(end is None or isinstance(end, asyncio.CancelledError) for end in ended), ended


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    bus = MemoryBus(MemoryBroker(SystemClock()), RUN, name="test")
    await bus.open_run()

    def build(context: Context) -> Cell:
        raise AssertionError("cells build themselves")

    yield Stage(bus, tmp_path, build, trainable=3, lost_s=0.5)
    await bus.close()


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    faults = Faults()
    for method in ("meet", "reduce", "broadcast"):
        original = getattr(PrefixGroup, method)

        def call(group: NamedGroup, *args: Any, original: Any, method: str) -> Any:
            faults.called(group.name, method)
            return original(group, *args)

        monkeypatch.setattr(
            PrefixGroup,
            method,
            lambda group, *args, original=original, method=method: call(group, *args, original=original, method=method),
        )
    return faults


@pytest.fixture
def cells(world: None, policy: Path, settings: TrainerConfig, stage: Stage, faults: Faults, tmp_path: Path) -> Cells:
    seen: list[torch.Tensor] = []

    def make(name: str) -> Cell:
        cell = SharedCell(policy, settings, LOOSE, scratch=tmp_path / name)
        cell.name, cell.faults, cell.seen = name, faults, seen
        return cell

    cells = Cells(stage, faults, make)
    cells.seen = seen  # type: ignore[attr-defined]
    return cells


class Alone(msgspec.Struct):
    """What the core makes of the batches by itself."""

    gradients: list[Any]
    results: list[Any]
    weights: Any


@pytest.fixture
def alone(make_cell: Callable[..., Cell]) -> Callable[..., Alone]:
    def train(*batches: list[MicroStep]) -> Alone:
        cell = make_cell(terms=LOOSE)
        gradients, results = [], []
        for batch in batches:
            cell.begin_batch()
            for micro_step in batch:
                cell.micro_step(micro_step)
            gradients.append(torch.cat(cell.gradients()))
            results.append(cell.step())
        return Alone(gradients=gradients, results=results, weights=cell.flat_weights())

    return train


async def published(stage: Stage) -> np.ndarray:
    exposed = (await stage.seen("weights.exposed", purpose="publish")).data
    with open_transport("shared-memory") as transport:
        flat = np.zeros(exposed.bytes // 4, np.float32)
        transport.pull(WeightAddress(**exposed.address), flat)
    return flat


async def same_as_alone(stage: Stage, cells: Any, expected: Alone) -> None:
    """Gradients, norms, losses and weights; and LOG counts every micro-step once."""
    for index, (gradient, result) in enumerate(zip(expected.gradients, expected.results, strict=True)):
        stepped = (await stage.seen("batch.stepped", version=index + 1)).data
        assert float((cells.seen[index] - gradient).norm() / gradient.norm()) < EXACT
        assert stepped.grad_norm == pytest.approx(result.grad_norm, rel=EXACT)
        assert stepped.loss == pytest.approx(result.loss, rel=EXACT)
        assert stepped.micro_steps == result.micro_steps
    weights = await published(stage)
    assert np.linalg.norm(weights - expected.weights) / np.linalg.norm(expected.weights) < EXACT
    assert len(cells.seen) == len(expected.gradients)


@pytest.mark.parametrize("joins_at", range(4))
async def test_a_satellite_may_join_at_any_micro_step(
    stage: Stage, cells: Any, faults: Faults, micro_steps: Any, alone: Any, joins_at: int
) -> None:
    steps = micro_steps("b-000001", 3)
    async with cells.living("cell-0", "cell-1"):
        await stage.enter_training("cell-0")
        await stage.open_batch(1, version=0, final=True)
        for each in steps[:joins_at]:
            await stage.enqueue(each)
        if joins_at:
            await stage.seen("micro-step.done", joins_at, cell="cell-0")
        await stage.enter_training("cell-1")
        if len(steps) - joins_at > 1:
            faults.gate.clear()
        for each in steps[joins_at:]:
            await stage.enqueue(each)
        if not faults.gate.is_set():
            await stage.seen("micro-step.done", cell="cell-1")
            faults.gate.set()
        await stage.close("b-000001", 3, ["cell-0", "cell-1"])
        await same_as_alone(stage, cells, alone(steps))


async def test_the_prefix_grows_and_satellites_get_each_new_version(
    stage: Stage, cells: Any, faults: Faults, micro_steps: Any, alone: Any
) -> None:
    batches = [micro_steps(f"b-{index:06d}", 4) for index in (1, 2)]
    async with cells.living("cell-0", "cell-1", "cell-2"):
        await stage.enter_training("cell-0")
        await stage.enter_training("cell-1")
        members = ["cell-0", "cell-1"]
        for index, batch in enumerate(batches, start=1):
            await stage.open_batch(index, version=index - 1, final=index == 2)
            faults.gate.clear()
            for each in batch:
                await stage.enqueue(each)
            await stage.seen("micro-step.done", cell="cell-1", batch=f"b-{index:06d}")
            faults.gate.set()
            await stage.close(f"b-{index:06d}", 4, members)
            await stage.seen("batch.stepped", version=index)
            if index == 1:
                await stage.enter_training("cell-2")
                members.append("cell-2")
        await same_as_alone(stage, cells, alone(*batches))
    arrived = await stage.seen("cell.role-transition", entity="cell-2", phase="acquired")
    assert arrived.data.version == 1
    # The satellite of the first batch got its weights over the group.
    assert faults.calls["cell-0", "broadcast"] == 1


FAULTS = [
    ("cell-1", "micro_step", 1),
    ("cell-1", "micro_step", 2),
    ("cell-1", "meet", 1),
    ("cell-1", "reduce", 1),
    ("cell-1", "broadcast", 1),
    ("cell-0", "micro_step", 1),
    ("cell-0", "meet", 1),
    ("cell-0", "reduce", 1),
    ("cell-0", "step", 1),
    ("cell-0", "broadcast", 1),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: "-".join(map(str, fault)))
async def test_whoever_dies_wherever_nothing_is_lost_or_trained_twice(
    stage: Stage, cells: Any, faults: Faults, micro_steps: Any, alone: Any, fault: tuple[str, str, int]
) -> None:
    batches = [micro_steps(f"b-{index:06d}", 4) for index in (1, 2)]
    faults.at = fault
    async with cells.living("cell-0", "cell-1"):
        for cell in ("cell-0", "cell-1"):
            await stage.enter_training(cell)
        for index, batch in enumerate(batches, start=1):
            await stage.open_batch(index, version=index - 1, final=index == 2)
            faults.gate.clear()
            for each in batch:
                await stage.enqueue(each)
            await stage.seen("micro-step.done", cell="cell-1", batch=f"b-{index:06d}")
            faults.gate.set()
            await stage.close(f"b-{index:06d}", 4, ["cell-0", "cell-1"])
            await stage.seen("batch.stepped", version=index)
        await same_as_alone(stage, cells, alone(*batches))
    assert faults.fired


@pytest.mark.parametrize(
    "fault",
    [("cell-1", "micro_step", 1), ("cell-1", "micro_step", 2), ("cell-1", "meet", 1), ("cell-1", "reduce", 1)],
    ids=lambda fault: "-".join(map(str, fault)),
)
async def test_the_prefix_shrinks_to_below_a_satellite_that_never_comes_back(
    stage: Stage, cells: Any, faults: Faults, micro_steps: Any, alone: Any, fault: tuple[str, str, int]
) -> None:
    """cell-2 above it leaves too: whatever both trained is trained again by the core, and cell-2 is sent back."""
    steps = micro_steps("b-000001", 6)
    faults.at, faults.gone = fault, "cell-1"
    names = ["cell-0", "cell-1", "cell-2"]
    async with cells.living(*names):
        for cell in names:
            await stage.enter_training(cell)
        await stage.open_batch(1, version=0, final=True)
        faults.gate.clear()
        for each in steps:
            await stage.enqueue(each)
        if fault[1] == "micro_step":
            await stage.seen("micro-step.claimed", fault[2], cell="cell-1")
        else:
            await stage.seen("micro-step.done", cell="cell-1")
            faults.gate.set()
            await stage.close("b-000001", 6, names)
        lost = await stage.seen("cell.lost")
        assert (lost.entity, lost.data.service, lost.owner) == ("cell-1", "trainer", "trainer")
        joined = await stage.seen("service.joined", entity="trainer-cell-1")
        assert lost.data.process == joined.seq
        faults.gate.set()
        for cell in ("cell-2", "cell-1"):
            await stage.put_out(cell)
        if fault[1] == "micro_step":
            closed = e.BatchStreamClosed(micro_steps=6, groups=["g-000000"])
            await stage.say("packer", "batch.stream-closed", "b-000001", closed)
        await stage.all_done_by("cell-0", 6)
        await stage.say("scheduler", "batch.join-closed", "b-000001", e.BatchJoinClosed(members=["cell-0"], epochs=[1]))
        await same_as_alone(stage, cells, alone(steps))
        decided = e.CellRoleTransition(phase="decided", source="train", target="rollout", epoch=2)
        await stage.say("scheduler", "cell.role-transition", "cell-2", decided)
        await stage.seen("cell.role-transition", entity="cell-2", phase="released", epoch=2)
    assert check(await stage.log(), only=["targets_once"]).ok


async def test_the_gradient_of_a_micro_step_whose_done_is_refused_is_never_added_up(
    stage: Stage, cells: Any, faults: Faults, micro_steps: Any, alone: Any
) -> None:
    """A satellite is put out in the middle of a micro-step, and the core trains it again before the satellite is through.
    Its answer comes too late for LOG; it joins again, and the next sum has only what it trained since."""
    batches = [micro_steps(f"b-{index:06d}", 3) for index in (1, 2)]
    async with cells.living("cell-0", "cell-1"):
        for cell in ("cell-0", "cell-1"):
            await stage.enter_training(cell)
        await stage.open_batch(1, version=0, final=False)
        faults.gate.clear()
        faults.slow.clear()
        for each in batches[0]:
            await stage.enqueue(each)
        await stage.seen("micro-step.claimed", cell="cell-1")
        await stage.put_out("cell-1")
        faults.gate.set()
        await stage.seen("micro-step.released")
        await stage.all_done_by("cell-0", 3)
        faults.slow.set()
        decided = e.CellRoleTransition(phase="decided", source="train", target="rollout", epoch=2)
        await stage.say("scheduler", "cell.role-transition", "cell-1", decided)
        await stage.seen("cell.role-transition", entity="cell-1", phase="released", epoch=2)
        assert all(each.data.cell == "cell-0" for each in await stage.log() if each.kind == "micro-step.done")
        await stage.close("b-000001", 3, ["cell-0"])
        await stage.seen("batch.stepped", version=1)
        await stage.enter_training("cell-1", epoch=3)
        await stage.open_batch(2, version=1, final=True)
        faults.gate.clear()
        for each in batches[1]:
            await stage.enqueue(each)
        await stage.seen("micro-step.done", cell="cell-1", batch="b-000002")
        faults.gate.set()
        await stage.close("b-000002", 3, ["cell-0", "cell-1"])
        await same_as_alone(stage, cells, alone(*batches))
    assert check(await stage.log(), only=["targets_once"]).ok


@pytest.mark.parametrize("again", ["released", "claimed", "done"])
async def test_a_release_between_the_sum_and_the_step_loses_and_doubles_nothing(
    stage: Stage, cells: Any, faults: Faults, micro_steps: Any, alone: Any, again: str
) -> None:
    """The satellite starts again when its gradient is in the core's sum, and trains what it gave back once more."""
    batches = [micro_steps(f"b-{index:06d}", 4) for index in (1, 2)]
    async with cells.living("cell-0", "cell-1"):
        for cell in ("cell-0", "cell-1"):
            await stage.enter_training(cell)
        await stage.open_batch(1, version=0, final=False)
        faults.gate.clear()
        for each in batches[0]:
            await stage.enqueue(each)
        await stage.seen("micro-step.done", cell="cell-1")
        faults.may_step.clear()
        faults.gate.set()
        await stage.close("b-000001", 4, ["cell-0", "cell-1"])
        await asyncio.to_thread(faults.stepping.wait)
        held = len(
            [each for each in await stage.log() if each.kind == "micro-step.done" and each.data.cell == "cell-1"]
        )
        await cells.start_again("cell-1")
        await stage.seen("micro-step.released", held)
        if again != "released":
            await stage.seen(f"micro-step.{again}", held + 1, cell="cell-1")
        faults.may_step.set()
        stepped = await stage.seen("batch.stepped", version=1)
        released = await stage.seen("micro-step.released")
        assert stepped.data.as_of < released.seq < stepped.seq
        await stage.open_batch(2, version=1, final=True)
        for each in batches[1]:
            await stage.enqueue(each)
        await stage.close("b-000002", 4, ["cell-0", "cell-1"])
        await stage.seen("batch.stepped", version=2)
        await same_as_alone(stage, cells, alone(*batches))
    assert check(await stage.log(), only=["targets_once"]).ok
