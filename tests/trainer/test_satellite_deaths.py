"""Cells that train batches together and die: at any call, whichever it is, back again or never, nothing is lost or doubled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from replay.checker import check
from schemas import events as e
from services.trainer.batch_view import CORE
from tests.trainer.shared_cells import Alone, Cells, Faults, Membership, same_as_alone
from tests.trainer.stage import Stage

MakeAlone = Callable[..., Alone]
NAMES = ["cell-0", "cell-1", "cell-2"]
ANYWHERE = [("micro_step", 1), ("micro_step", 2), ("meet", 1), ("reduce", 1), ("reduced", 1), ("broadcast", 1)]
IN_THE_CORE = [("step", 1), ("save", 1)]
"""What only the core does."""


async def train_two_batches(
    stage: Stage, cells: Cells, faults: Faults, micro_steps: Any, alone: MakeAlone, fault: tuple[str, str, int]
) -> Membership:
    """Three cells, each of which holds a part of each batch, until the fault strikes."""
    batches = [micro_steps(f"b-{index:06d}", 6) for index in (1, 2)]
    faults.at, faults.share = fault, 1
    membership = Membership(stage)
    async with cells.living(*NAMES), membership.kept():
        for cell in NAMES:
            await stage.enter_training(cell)
        for index, batch in enumerate(batches, start=1):
            faults.gate.clear()
            await stage.open_batch(index, version=index - 1, final=index == 2)
            for each in batch:
                await stage.enqueue(each)
            await membership.until(lambda index=index: membership.all_hold_some(f"b-{index:06d}"))
            faults.gate.set()
            closed = e.BatchStreamClosed(micro_steps=6, groups=["g-000000"])
            await stage.say("packer", "batch.stream-closed", f"b-{index:06d}", closed)
            await stage.seen("batch.stepped", version=index)
        await same_as_alone(stage, cells, alone(*batches))
        for cell in sorted(set(NAMES) - membership.view.trains - {faults.gone}):
            await stage.send_back(cell)
    assert faults.fired
    assert check(await stage.log(), only=["targets_once"]).ok
    return membership


@pytest.mark.parametrize("cell", NAMES)
@pytest.mark.parametrize("at", ANYWHERE, ids=lambda at: "-".join(map(str, at)))
async def test_whoever_dies_wherever_nothing_is_lost_or_trained_twice(
    stage: Stage, cells: Cells, faults: Faults, micro_steps: Any, alone: MakeAlone, cell: str, at: tuple[str, int]
) -> None:
    membership = await train_two_batches(stage, cells, faults, micro_steps, alone, (cell, *at))
    assert membership.view.trains == set(NAMES)


@pytest.mark.parametrize("at", IN_THE_CORE, ids=lambda at: "-".join(map(str, at)))
async def test_the_core_dies_with_its_step_and_makes_it_again(
    stage: Stage, cells: Cells, faults: Faults, micro_steps: Any, alone: MakeAlone, at: tuple[str, int]
) -> None:
    await train_two_batches(stage, cells, faults, micro_steps, alone, (CORE, *at))


@pytest.mark.parametrize("cell", NAMES[1:])
@pytest.mark.parametrize("at", ANYWHERE, ids=lambda at: "-".join(map(str, at)))
@pytest.mark.parametrize("stage", [0.5], indirect=True, ids=["lost"])
async def test_the_prefix_shrinks_to_below_a_satellite_that_never_comes_back(
    stage: Stage, cells: Cells, faults: Faults, micro_steps: Any, alone: MakeAlone, cell: str, at: tuple[str, int]
) -> None:
    """Those above it leave too: what they trained is trained again by those below, and they are sent back."""
    faults.gone = cell
    membership = await train_two_batches(stage, cells, faults, micro_steps, alone, (cell, *at))
    assert membership.view.trains == {name for name in NAMES if name < cell}
    lost = await stage.seen("cell.lost")
    assert (lost.entity, lost.data.service, lost.owner) == (cell, "trainer", "trainer")
    joined = await stage.seen("service.joined", entity=f"trainer-{cell}")
    assert lost.data.process == joined.seq
    assert [event.entity for event in await stage.log() if event.kind == "cell.lost"] == [cell]
