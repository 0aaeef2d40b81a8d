"""A run with one task, and what others say to the harness service: proxies, placements, losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from schemas.events import (
    ExecutionDispatched,
    ExecutionPlaced,
    ServiceJoined,
)
from schemas.ids import execution_id
from tests.mesh.workers import World, make_task, memory_world

E0 = execution_id(0, 0)


async def world_of(folder: Path, command: list[str], *, toml: str = "", clock: Any = None, **harness: Any) -> World:
    make_task(folder / "tasks" / "card", toml=toml)
    world = memory_world(folder, {"harness": {"command": command, **harness}}, clock=clock)
    await world.begin()
    return world


async def proxy_joins(world: World, url: str = "http://127.0.0.1:1", pid: int = 1) -> None:
    await world.say("proxy", "service.joined", "proxy", ServiceJoined(url=url, pid=pid))


async def place(world: World, *executions: str, task: str = "card") -> None:
    for member, execution in enumerate(executions or (E0,)):
        await world.say(
            "scheduler",
            "execution.dispatched",
            execution,
            ExecutionDispatched(group="g-000000", member=member, task=task),
        )
        placed = ExecutionPlaced(cell="cell-1", epoch=0, attempt=0)
        await world.say("scheduler", "execution.placed", execution, placed, id=f"d-{execution}")


async def finish_of(world: World, execution: str = E0) -> Any:
    return (await world.wait("execution.finished", execution)).data


async def again(world: World, attempt: int, execution: str = E0) -> None:
    """The next attempt is placed, as the scheduler does when the one before was lost."""
    placed = ExecutionPlaced(cell="cell-1", epoch=0, attempt=attempt)
    await world.say("scheduler", "execution.placed", execution, placed, id=f"d-{execution}.{attempt}")
