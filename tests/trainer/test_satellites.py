"""Cells that train one batch together: whoever joins or dies, the update is the one that the core alone would make."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from replay.checker import check
from schemas import events as e
from tests.trainer.shared_cells import Alone, Cells, Faults, same_as_alone
from tests.trainer.stage import Stage

MakeAlone = Callable[..., Alone]


@pytest.mark.parametrize("joins_at", range(4))
async def test_a_satellite_may_join_at_any_micro_step(
    stage: Stage, cells: Cells, faults: Faults, micro_steps: Any, alone: MakeAlone, joins_at: int
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
    stage: Stage, cells: Cells, faults: Faults, micro_steps: Any, alone: MakeAlone
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


async def test_the_gradient_of_a_micro_step_whose_done_is_refused_is_never_added_up(
    stage: Stage, cells: Cells, faults: Faults, micro_steps: Any, alone: MakeAlone
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
    stage: Stage, cells: Cells, faults: Faults, micro_steps: Any, alone: MakeAlone, again: str
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
