"""The production services of one run, each with its worlds: what a supervisor runs as the program of a life."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

from replay.worlds.agent import AgentFolder, AgentLaunch
from replay.worlds.encoder import WorldEncoder
from replay.worlds.engine import WorldEngine
from replay.worlds.exchange import WorldExchange
from replay.worlds.faces import Life
from replay.worlds.group import WorldGroup
from replay.worlds.health import WorldClient
from replay.worlds.processes import WorldGuard
from replay.worlds.rows import WorldRows, at_once
from replay.worlds.tests import ScoreFolder, ScoreLaunch
from replay.worlds.training import Inline, WorldCell
from replay.worlds.world import CHECKPOINTS, World
from services.evaluator import service as evaluator
from services.harness import service as harness
from services.mesh.service import Context
from services.packer import service as packer
from services.proxy import service as proxy
from services.rollout import service as rollout
from services.scheduler import service as scheduler
from services.trainer import service as trainer
from services.trajectories import service as trajectories

WORKERS = ("scheduler", "trajectories", "packer", "harness", "evaluator")
"""One of each; there are `proxy.count` proxies, and rollout and trainer once a cell."""


async def serve(world: World, context: Context, life: Life, *, number: int, rows: WorldRows) -> None:
    """Run `context.service` in the running life, the `number`-th of its instance. `rows` outlive it."""
    match context.service:
        case "scheduler":
            await scheduler.serve(context)
        case "packer":
            await packer.serve(context)
        case "trajectories":
            await trajectories.serve(context, open_rows=lambda _: rows, in_thread=at_once)
        case "proxy":
            await proxy.serve(context, encoder=WorldEncoder(), client=WorldClient(world))
        case "harness":
            await harness.serve(
                context,
                launch=AgentLaunch(world),
                guard=partial(WorldGuard, world.machine, life, after_s=world.scripts.pace),
                folders=partial(AgentFolder, world),
                processes=world.machine,
            )
        case "evaluator":
            await evaluator.serve(
                context,
                launch=ScoreLaunch(world),
                guard=partial(WorldGuard, world.machine, life, after_s=world.scripts.pace),
                folders=partial(ScoreFolder, world),
                processes=world.machine,
            )
        case "rollout":
            script = world.engine_script(context.cell, number)
            await rollout.serve(context, adapter=WorldEngine(world, context.cell, script, life))
        case "trainer":
            await _train(world, context, life, number)
        case unknown:
            raise ValueError(f"there is no service {unknown}")


async def _train(world: World, context: Context, life: Life, number: int) -> None:
    script = world.cell_script(context.cell, number)
    # The worlds' parts have the faces of the real ones, as far as the service looks.
    await trainer.serve(
        context,
        build=lambda _: cast(Any, WorldCell(world, context.cell, script, world.disks[CHECKPOINTS])),
        open_group=lambda host: cast(Any, WorldGroup(world, life, script, host=host)),
        open_exchange=lambda _: cast(Any, WorldExchange(world, life, move_s=script.move_s)),
        worker=Inline(),
    )
