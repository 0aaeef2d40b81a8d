"""The trainer's process on the in-memory bus, with a real cell: claims, one update a batch, durable before published."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from replay.checker import check
from schemas import events as e
from schemas.envelope import Event
from schemas.errors import TrainerError
from schemas.micro_steps import MicroStep
from schemas.units import Reward
from services.mesh.clock import SystemClock
from services.mesh.memory_broker import MemoryBroker
from services.mesh.memory_bus import MemoryBus
from services.mesh.service import Context
from services.mesh.weights.transport import WeightAddress, open_transport
from services.trainer.batch_view import BatchView
from services.trainer.cell import Cell, StepResult
from tests.facts import stepped
from tests.trainer.stage import RUN, Stage, running


@pytest.fixture
async def stage(tmp_path: Path, make_cell: Callable[..., Cell]) -> AsyncIterator[Stage]:
    bus = MemoryBus(MemoryBroker(SystemClock()), RUN, name="test")
    await bus.open_run()
    yield Stage(bus, tmp_path, lambda context: make_cell())
    await bus.close()


async def test_a_burst_is_trained_saved_and_exposed(stage: Stage, micro_steps: Callable[..., list[MicroStep]]) -> None:
    async with running(stage):
        await stage.enter_training()
        reward = Reward(execution="e-000000.00", attempt=0, outcome="valid", reward=0.5, advantage=0.0)
        await stage.say("trajectories", "group.ready", "g-000000", e.GroupReady(rewards=[reward], mean=0.5, std=0.0))
        for index in (1, 2):
            batch = f"b-{index:06d}"
            await stage.open_batch(index, version=index - 1, final=index == 2)
            if index == 1:
                await stage.say("packer", "group.claimed", "g-000000", e.GroupClaimed(batch=batch))
            for each in micro_steps(batch, 3):
                await stage.enqueue(each)
            await stage.close(batch, 3)
            stepped = (await stage.seen("batch.stepped", version=index)).data
            assert (stepped.micro_steps, stepped.step) == (3, index)
            assert stepped.reward == (0.5 if index == 1 else 0.0)
            # The first update moves this toy policy so far that the second batch is masked as a whole.
            assert (stepped.grad_norm > 0) == (index == 1) == (stepped.masked < stepped.executions)
        exposed = await stage.seen("weights.exposed")
        assert exposed.data.version == 2
        with open_transport("shared-memory") as transport:
            pulled = np.zeros(exposed.data.bytes // 4, np.float32)
            transport.pull(WeightAddress(**exposed.data.address), pulled)
        assert np.abs(pulled).sum() > 0
    events = await stage.log()
    order = [event.kind for event in events]
    assert order.index("checkpoint.saved") < order.index("batch.stepped") < order.index("weights.exposed")
    assert order.count("weights.exposed") == 1
    assert order.count("micro-step.claimed") == order.count("micro-step.done") == 6


async def test_a_claim_that_somebody_else_won_is_not_trained(
    stage: Stage, micro_steps: Callable[..., list[MicroStep]]
) -> None:
    await stage.open_batch(1, version=0, final=False)
    first, second = micro_steps("b-000001", 2)
    await stage.enqueue(first)
    for phase in ("decided", "completed"):
        trains = e.CellRoleTransition(phase=phase, source="rollout", target="train", epoch=1)  # type: ignore[arg-type]
        await stage.say("scheduler", "cell.role-transition", "cell-1", trains)
    taken = e.MicroStepClaimed(batch="b-000001", cell="cell-1", epoch=1)
    await stage.say("trainer", "micro-step.claimed", first.micro_step, taken)
    async with running(stage):
        await stage.enter_training()
        await stage.enqueue(second)
        done = await stage.seen("micro-step.done")
        assert done.entity == second.micro_step
    assert [event.entity for event in await stage.log() if event.kind == "micro-step.done"] == [second.micro_step]


async def test_what_a_dead_process_of_the_cell_claims_late_is_given_back_and_trained(
    stage: Stage, micro_steps: Callable[..., list[MicroStep]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its claim was on the way when it ended, and is stored just before the one of the process that took its place."""
    (step,) = micro_steps("b-000001", 1)
    late = [e.MicroStepClaimed(batch="b-000001", cell="cell-0", epoch=1, process=1)]
    say = Context.say

    async def overtaken(context: Context, kind: str, *args: Any, **more: Any) -> int:
        if kind == "micro-step.claimed" and late:
            await stage.say("trainer", kind, step.micro_step, late.pop())
        return await say(context, kind, *args, **more)

    monkeypatch.setattr(Context, "say", overtaken)
    async with running(stage):
        await stage.enter_training()
        await stage.open_batch(1, version=0, final=False)
        await stage.enqueue(step)
        await stage.seen("micro-step.done")
        await stage.close("b-000001", 1)
        assert (await stage.seen("batch.stepped")).data.micro_steps == 1
    of_it = [event.kind for event in await stage.log() if event.entity == step.micro_step]
    assert of_it == [f"micro-step.{verb}" for verb in ("enqueued", "claimed", "released", "claimed", "done")]


async def test_a_step_that_a_dead_core_told_before_the_next_one_joined_ends_that_one(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the starting policy in hand then, and starts again from the step."""
    told = stepped(1)
    say = Context.say

    async def overtaken(context: Context, kind: str, *args: Any, **more: Any) -> int:
        if kind == "service.joined":
            await stage.say("trainer", "batch.stepped", "b-000001", told)
        return await say(context, kind, *args, **more)

    monkeypatch.setattr(Context, "say", overtaken)
    await stage.open_batch(1, version=0, final=True)
    async with running(stage) as core:
        with pytest.raises(TrainerError, match="version 1 was made meanwhile"):
            await core


@pytest.mark.parametrize("trained", [2, 3], ids=["in mid-batch", "before the update"])
async def test_a_cell_that_starts_again_gives_back_what_it_had_and_ends_with_the_same_weights(
    stage: Stage, micro_steps: Callable[..., list[MicroStep]], trained: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(cell: Cell) -> StepResult:
        raise TrainerError("the process ends here")

    steps = micro_steps("b-000001", 3)
    with monkeypatch.context() as patch:
        patch.setattr(Cell, "step", end)
        async with running(stage) as first:
            await stage.enter_training()
            await stage.open_batch(1, version=0, final=True)
            for each in steps[:trained]:
                await stage.enqueue(each)
            await stage.seen("micro-step.done", trained)
            if trained == len(steps):
                await stage.close("b-000001", 3)
                with pytest.raises(TrainerError, match="ends here"):
                    await first
    async with running(stage):
        await stage.seen("micro-step.released", trained)
        if trained < len(steps):
            await stage.enqueue(steps[2])
            await stage.close("b-000001", 3)
        broken = (await stage.seen("batch.stepped")).data
    whole = stage.build(stage.context())
    whole.begin_batch()
    for each in steps:
        whole.micro_step(each)
    result = whole.step()
    assert broken.loss == pytest.approx(result.loss, rel=1e-6)
    assert broken.grad_norm == pytest.approx(result.grad_norm, rel=1e-6)
    assert broken.micro_steps == 3


async def test_the_published_version_can_be_pulled_from_a_core_that_started_again(
    stage: Stage, micro_steps: Callable[..., list[MicroStep]]
) -> None:
    """Version 1 is published, version 3 is in the core when it ends: the next process exposes 1 from its checkpoint."""

    async def train(index: int, *, final: bool) -> None:
        batch = f"b-{index:06d}"
        await stage.open_batch(index, version=index - 1, final=final)
        await stage.enqueue(micro_steps(batch, 1)[0])
        await stage.close(batch, 1)
        await stage.seen("batch.stepped", version=index)

    def pulled(exposed: e.WeightsExposed) -> np.ndarray:
        with open_transport("shared-memory") as transport:
            weights = np.zeros(exposed.bytes // 4, np.float32)
            transport.pull(WeightAddress(**exposed.address), weights)
        return weights

    async with running(stage):
        await stage.enter_training()
        await train(1, final=True)
        published = pulled((await stage.seen("weights.exposed", version=1)).data)
        await train(2, final=False)
        await train(3, final=False)
    kept = {path.name for path in (stage.tmp / "checkpoints").iterdir()}
    assert kept == {"v000001", "v000002", "v000003"}, "two are kept, and the published one"
    async with running(stage):
        again = (await stage.seen("weights.exposed", 2, version=1)).data
        assert again.purpose == "publish"
        assert np.array_equal(pulled(again), published)
        await train(4, final=True)
        assert (await stage.seen("weights.exposed", version=4)).data.purpose == "publish"
    assert [event.data.version for event in await stage.log() if event.kind == "weights.exposed"] == [1, 1, 4]


async def test_a_cell_that_starts_after_the_run_joins_and_builds_nothing(stage: Stage) -> None:
    def build(context: object) -> None:
        raise AssertionError("there is nothing to train")

    stage.build = build  # type: ignore[assignment]
    await stage.say("scheduler", "run.finished", RUN, e.RunFinished(steps=2, reason="steps_done"))
    async with running(stage) as task:
        await stage.seen("service.joined")
        assert not task.done()


def damage(folder: Path) -> None:
    path = folder / "rank-00000.pt"
    path.write_bytes(path.read_bytes()[:-1] + b"?")


@pytest.mark.parametrize("damaged", [{}, {3: shutil.rmtree}, {3: damage, 2: shutil.rmtree}], ids=["none", "3", "3, 2"])
async def test_a_core_goes_on_from_the_newest_version_that_is_whole(
    stage: Stage, micro_steps: Callable[..., list[MicroStep]], damaged: dict[int, Callable[[Path], None]]
) -> None:
    """Version 1 is published, 3 is stepped and another batch is open when the core ends."""
    opened = 0

    async def train(version: int, *, final: bool = False) -> None:
        nonlocal opened
        opened += 1
        await stage.open_batch(opened, version=version - 1, final=final)
        # What is trained depends on the step, so that the same step trains the same.
        made = msgspec.structs.replace(micro_steps("b-000001", version)[-1], batch=f"b-{opened:06d}")
        await stage.enqueue(msgspec.structs.replace(made, micro_step=f"m-{opened:06d}.000"))
        await stage.close(f"b-{opened:06d}", 1)
        await stage.seen("batch.stepped", entity=f"b-{opened:06d}")

    async with running(stage):
        await stage.enter_training()
        await train(1, final=True)
        await stage.seen("weights.exposed")
        await train(2)
        await train(3)
        opened += 1
        await stage.open_batch(opened, version=3, final=True)
        await stage.enqueue(micro_steps(f"b-{opened:06d}", 1)[0])
        await stage.seen("micro-step.done", 4)
    for version, harm in damaged.items():
        harm(stage.tmp / "checkpoints" / f"v{version:06d}")
    whole = 3 - len(damaged)
    async with running(stage):
        restored = await stage.seen("checkpoint.restored")
        step = await stage.seen("batch.stepped", version=whole)
        assert (restored.data.version, restored.data.log_sequence) == (whole, step.seq)
        if damaged:
            for version in range(whole + 1, 4):
                await train(version)
            await train(4, final=True)
        else:
            await stage.seen("micro-step.released")
            await stage.close(f"b-{opened:06d}", 1)
        await stage.seen("weights.exposed", version=4)
    log = await stage.log()
    released = [event for event in log if event.kind == "micro-step.released"]
    assert len(released) == (0 if damaged else 1), "what belongs to an undone batch is nobody's"
    norms = [(event.data.version, event.data.grad_norm) for event in log if event.kind == "batch.stepped"]
    for version, norm in norms[3:-1]:
        assert norm == pytest.approx(dict(norms[:3])[version], rel=1e-6), "the same step again"
    assert [version for version, _ in norms] == [1, 2, 3, *range(whole + 1, 5)]
    assert check(log, only=["durable_before_published"]).ok


async def test_a_run_whose_published_version_is_damaged_cannot_go_on(
    stage: Stage, micro_steps: Callable[..., list[MicroStep]]
) -> None:
    async with running(stage):
        await stage.enter_training()
        await stage.open_batch(1, version=0, final=True)
        await stage.enqueue(micro_steps("b-000001", 1)[0])
        await stage.close("b-000001", 1)
        await stage.seen("weights.exposed")
    damage(stage.tmp / "checkpoints" / "v000001")
    async with running(stage) as task:
        with pytest.raises(TrainerError, match=r"version 1: rank-00000.pt is not what was saved") as raised:
            await task
    assert "--new" in raised.value.remedy


async def test_what_follows_from_a_fact_may_arrive_before_its_acknowledgement(
    stage: Stage, micro_steps: Callable[..., list[MicroStep]], monkeypatch: pytest.MonkeyPatch
) -> None:
    say, opened = Context.say, asyncio.Event()

    async def late(context: Context, kind: str, *args: Any, **options: Any) -> int:
        seq = await say(context, kind, *args, **options)
        if kind == "batch.stepped" and not opened.is_set():
            await stage.open_batch(2, version=1, final=True)
            # Long enough for the log's reader: the acknowledgement comes when LOG holds the next batch.
            await asyncio.wait_for(opened.wait(), 10)
        return seq

    monkeypatch.setattr(Context, "say", late)
    folded = BatchView.fold

    def fold(view: BatchView, event: Event) -> None:
        folded(view, event)
        if event.kind == "batch.opened" and event.entity == "b-000002":
            opened.set()

    monkeypatch.setattr(BatchView, "fold", fold)
    async with running(stage):
        await stage.enter_training()
        await stage.open_batch(1, version=0, final=False)
        for index, batch in enumerate(("b-000001", "b-000002"), start=1):
            for each in micro_steps(batch, 1):
                await stage.enqueue(each)
            await stage.close(batch, 1)
            assert (await stage.seen("batch.stepped", version=index)).data.micro_steps == 1
