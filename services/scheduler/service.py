"""The scheduler's process: its decider in a shell, a watch over the rollout cells, and its figures as metrics."""

from __future__ import annotations

import asyncio

from services.mesh.liveness import Watch
from services.mesh.service import Context, alone, announce
from services.mesh.shell import Shell
from services.scheduler.core.state import State, served_capacity
from services.scheduler.decider import Scheduler


async def serve(context: Context) -> None:
    shell: Shell[State] = Shell(
        decider=Scheduler(),
        bus=context.bus,
        clock=context.clock,
        publisher=context.publisher,
        snapshot_every=context.snapshot_every,
    )
    health, driver = context.health, shell.driver
    health.ready = lambda: "" if shell.caught_up.is_set() else "reading the log"
    health.gauge("gyre_waterlevel", "w = d - f: outstanding executions", lambda: driver.state.d - driver.state.f)
    health.gauge("gyre_capacity", "C_R: executions that can be served", lambda: _capacity(driver.state))
    health.gauge("gyre_ready_groups", "Groups ready and unclaimed", lambda: driver.state.index.ready)
    health.gauge("gyre_input_sequence", "Last LOG sequence fed to the decider", lambda: driver.position)
    await alone(context)
    await announce(context)
    watch = Watch(context, service="rollout", lost_s=context.config.rollout.lost_s)
    tasks = [asyncio.create_task(each) for each in (shell.run(), _feed(context, watch), _look(shell, watch))]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for finished in done:
            finished.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _feed(context: Context, watch: Watch) -> None:
    async for event in context.events(about=("cell", "service", "run")):
        watch.fold(event)


async def _look(shell: Shell[State], watch: Watch) -> None:
    """What is said before the fence is taken would go past it."""
    await shell.caught_up.wait()
    await watch.run()


def _capacity(state: State) -> int:
    return served_capacity(state) if state.config is not None else 0
