"""What training left in a world is held against its log: steps that added up something else, and foreign weights."""

from __future__ import annotations

import asyncio
from typing import Any

from replay.worlds.training import wrong_steps
from replay.worlds.world import Flat, World
from schemas import events as e
from schemas.envelope import Event
from schemas.units import GapStats, RowRef
from tests.replay.worlds.training_cells import cell_of, micro_step


def said(seq: int, kind: str, entity: str, data: Any) -> Event:
    return Event(
        seq=seq, time_us=seq, kind=kind, entity=entity, owner="", instance="", causation=0, id=str(seq), data=data
    )


def test_steps_that_added_up_something_else_are_found(world: World) -> None:
    cell = cell_of(world)

    async def train(names: list[int]) -> None:
        cell.begin_batch()
        for index in names:
            await cell.micro_step(micro_step(index, 3 + index))
        await cell.step()

    def log() -> list[Event]:
        rows = [RowRef(execution="e-000001.00", draw=0, tokens=9, targets=3)]
        more = [RowRef(execution="e-000001.01", draw=0, tokens=9, targets=4)]
        digest = cell.flat_weights().digest
        zero = GapStats()
        return [
            said(1, "micro-step.enqueued", "m-000001.000", _enqueued(0, rows)),
            said(2, "micro-step.enqueued", "m-000001.001", _enqueued(1, more)),
            said(3, "checkpoint.saved", "v", e.CheckpointSaved(version=1, path="", digest=digest, log_sequence=2)),
            said(4, "batch.stepped", "b-000001", _stepped(zero)),
        ]

    asyncio.run(train([0, 1]))
    assert wrong_steps(log(), world.steps) == []
    for wrong in ([0], [0, 0, 1], [0, 1, 2]):
        world.steps.clear()
        cell.version = 0
        asyncio.run(train(wrong))
        assert len(wrong_steps(log(), world.steps)) == 1
    assert "nobody made the step" in wrong_steps(log(), [])[0]


def test_a_step_on_other_weights_than_were_saved_is_found_and_so_is_their_exposure(world: World) -> None:
    cell = cell_of(world)
    cell.load_flat(Flat("foreign", 0), version=0)
    cell.begin_batch()
    asyncio.run(cell.step())
    digest = cell.flat_weights().digest
    log = [
        said(1, "checkpoint.saved", "v", e.CheckpointSaved(version=1, path="", digest=digest, log_sequence=0)),
        said(2, "batch.stepped", "b-000001", _stepped(GapStats())),
        said(3, "weights.exposed", "cell-0", _exposed(digest)),
        said(4, "weights.exposed", "cell-0", _exposed("other")),
    ]
    assert wrong_steps(log, world.steps) == [
        "b-000001: made on other weights than were saved of version 0",
        "4: exposed weights that were never saved as version 1",
    ]


def _exposed(digest: str) -> e.WeightsExposed:
    return e.WeightsExposed(version=1, purpose="publish", address={"digest": digest}, bytes=64)


def _enqueued(index: int, rows: list[RowRef]) -> e.MicroStepEnqueued:
    return e.MicroStepEnqueued(batch="b-000001", index=index, blob="", tokens=9, rows=rows)


def _stepped(gap: GapStats) -> e.BatchStepped:
    return e.BatchStepped(
        step=1,
        version=1,
        members=["cell-0"],
        loss=0.0,
        grad_norm=1.0,
        lr=1.0,
        micro_steps=2,
        tokens=18,
        targets=7,
        executions=2,
        masked=0,
        reward=0.0,
        gap=gap,
        seconds=1.0,
    )
