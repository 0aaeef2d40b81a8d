"""Cells of a world, the lives that drive them, and their micro-steps and meetings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from replay.virtual.life import Life
from replay.virtual.loop import VirtualLoop
from replay.worlds.training import WorldCell
from replay.worlds.world import CHECKPOINTS, CellScript, World
from schemas.micro_steps import MicroStep
from services.trainer.batch_view import Meeting

SCRIPT = CellScript(micro_step_s=1, step_s=1, memory_s=1, save_s=1, move_s=1)
FOLDER = Path("/run/checkpoints/v000001")
Main = Callable[[Life], Coroutine[Any, Any, None]]


def micro_step(index: int, targets: int) -> MicroStep:
    size = targets + 1
    return MicroStep(
        micro_step=f"m-000001.{index:03d}",
        batch="b-000001",
        cu_seqlens=b"",
        tokens=bytes(4 * size),
        targets=b"\x00" + b"\x01" * targets,
        behaviour_logprob=bytes(4 * size),
        temperature=bytes(4 * size),
        token_version=bytes(4 * size),
        row_execution=bytes(4),
        executions=("e-000001.00",),
        advantages=(1.0,),
        target_counts=(targets,),
    )


def cell_of(world: World, name: str = "cell-0") -> WorldCell:
    return WorldCell(world, name, SCRIPT, world.disks[CHECKPOINTS])


def lives(loop: VirtualLoop, *mains: Main) -> list[Life]:
    """Runs programs, each in a life of its own, until all are over."""
    begun = []
    for index, main in enumerate(mains):
        life = Life(loop, f"trainer-cell-{index}")
        life.begin(main(life))
        begun.append(life)

    async def over() -> None:
        await asyncio.wait([life.ended for life in begun])

    loop.run_until_complete(over())
    return begun


def meeting(rank: int, size: int, rendezvous: str, key: str = "k", batch: str = "b-000001") -> Meeting:
    return Meeting(rendezvous=rendezvous, key=key, batch=batch, rank=rank, size=size)
