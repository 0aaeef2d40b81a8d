"""Executions that their group is complete without: running, placed, lost, or never placed, they end, once."""

from __future__ import annotations

from pathlib import Path

from schemas.events import ExecutionCancelled, ExecutionDispatched, ExecutionLost, ExecutionPlaced
from schemas.ids import execution_id
from schemas.units import check
from services.harness.service import serve
from tests.harness.agents import GOOD, HANG, alive, file_of, workspace
from tests.harness.world import E0, again, finish_of, place, proxy_joins, world_of
from tests.mesh.workers import World, serving

E1, E2 = execution_id(0, 1), execution_id(0, 2)


async def cancel(world: World, execution: str = E0) -> None:
    data = ExecutionCancelled(reason="surplus", checks=[check("valid executions N", 2, ">=", 2)])
    await world.say("trajectories", "execution.cancelled", execution, data, id=f"c-{execution}")


async def dispatch(world: World, execution: str) -> None:
    data = ExecutionDispatched(group="g-000000", member=0, task="card")
    await world.say("scheduler", "execution.dispatched", execution, data)


async def test_what_runs_is_stopped_and_nothing_of_it_is_preserved(tmp_path: Path) -> None:
    world = await world_of(tmp_path, HANG)
    async with serving(serve, world.context("harness")):
        await proxy_joins(world)
        await place(world, E0, E1)
        pids = [int(await file_of(workspace(tmp_path, execution) / "up")) for execution in (E0, E1)]
        await cancel(world)
        finished = await finish_of(world)
        assert not alive(pids[0]) and alive(pids[1])
    assert (finished.reason, finished.workspace, finished.attempt) == ("surplus", "", 0)
    assert finished.detail == "its group is complete without it"


async def test_what_never_started_ends_without_a_start(tmp_path: Path) -> None:
    """Placed and waiting for the proxy; queued; and queued when it was cancelled, placed by a scheduler that had not read it."""
    world = await world_of(tmp_path, GOOD)
    async with serving(serve, world.context("harness")):
        await place(world, E0)
        await dispatch(world, E1)
        await dispatch(world, E2)
        for execution in (E0, E1, E2):
            await cancel(world, execution)
            finished = await finish_of(world, execution)
            assert (finished.attempt, finished.reason, finished.exit_code) == (0, "surplus", None)
        await again(world, 0, E2)
        await proxy_joins(world)
        await place(world, execution_id(1, 0))
        assert (await finish_of(world, execution_id(1, 0))).reason == "completed"
    assert [event.entity for event in await world.events("execution.started")] == [execution_id(1, 0)]
    ended = await world.events("execution.finished")
    assert [event.id for event in ended[:3]] == [f"d-{E0}.finished.0", f"c-{E1}.finished.0", f"c-{E2}.finished.0"]
    assert len(ended) == 4
    assert not (tmp_path / "workspaces" / f"{E0}.0").exists()


async def test_one_that_had_ended_by_itself_ends_no_second_time(tmp_path: Path) -> None:
    world = await world_of(tmp_path, GOOD)
    async with serving(serve, world.context("harness")):
        await proxy_joins(world)
        await place(world)
        assert (await finish_of(world)).reason == "completed"
        await cancel(world)
        await place(world, E1)
        await finish_of(world, E1)
    assert len(await world.events("execution.finished")) == 2


async def test_a_service_that_starts_again_ends_what_was_cancelled_meanwhile(tmp_path: Path) -> None:
    """What ran; and what was lost and not placed again, which ends as the attempt that would have come."""
    world = await world_of(tmp_path, HANG)
    async with serving(serve, world.context("harness")):
        await proxy_joins(world)
        await place(world, E0, E1)
        for execution in (E0, E1):
            await world.wait("execution.started", execution)
    await cancel(world)
    await world.say("harness", "execution.lost", E1, ExecutionLost(attempt=0, reason="test"))
    await cancel(world, E1)
    async with serving(serve, world.context("harness")):
        ran, lost = await finish_of(world), await finish_of(world, E1)
        await world.say("scheduler", "execution.placed", E1, ExecutionPlaced(cell="cell-1", epoch=0, attempt=1))
        await place(world, E2)
        await world.wait("execution.started", E2)
    assert (ran.attempt, ran.reason) == (0, "surplus")
    assert (lost.attempt, lost.reason) == (1, "surplus")
    assert [event.data.attempt for event in await world.events("execution.started")] == [0, 0, 0]


async def test_one_that_is_lost_after_it_was_cancelled_is_not_waited_for(tmp_path: Path) -> None:
    world = await world_of(tmp_path, GOOD)
    async with serving(serve, world.context("harness")):
        await dispatch(world, E0)
        placed = ExecutionPlaced(cell="cell-1", epoch=0, attempt=0)
        await world.say("scheduler", "execution.placed", E0, placed, id="d")
        await world.say("harness", "execution.lost", E0, ExecutionLost(attempt=0, reason="test"))
        await cancel(world)
        finished = await finish_of(world)
    assert (finished.attempt, finished.reason) == (1, "surplus")
