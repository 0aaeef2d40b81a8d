"""The scheduler's process: its decider in a shell, and its figures as metrics."""

from __future__ import annotations

from services.mesh.service import Context, announce
from services.mesh.shell import Shell
from services.scheduler.core.state import State, ready_unclaimed, served_capacity
from services.scheduler.decider import Scheduler


async def serve(context: Context) -> None:
    shell: Shell[State] = Shell(
        decider=Scheduler(), bus=context.bus, clock=context.clock, publisher=context.publisher
    )
    health, driver = context.health, shell.driver
    health.ready = lambda: "" if shell.caught_up.is_set() else "reading the log"
    health.gauge("gyre_waterlevel", "w = d - f: outstanding executions", lambda: driver.state.d - driver.state.f)
    health.gauge("gyre_capacity", "C_R: executions that can be served", lambda: _capacity(driver.state))
    health.gauge("gyre_ready_groups", "Groups ready and unclaimed", lambda: len(ready_unclaimed(driver.state)))
    health.gauge("gyre_input_sequence", "Last LOG sequence fed to the decider", lambda: driver.position)
    await announce(context)
    await shell.run()


def _capacity(state: State) -> int:
    return served_capacity(state) if state.config is not None else 0
