"""An execution that is cancelled: its calls end, and it is told so in a way after which harnesses don't ask again."""

from __future__ import annotations

import asyncio

from schemas.events import ExecutionCancelled
from schemas.units import check
from tests.proxy.bodies import body_of
from tests.proxy.engines import Engine
from tests.proxy.world import EXECUTION, World


async def cancel(world: World, execution: str = EXECUTION) -> None:
    data = ExecutionCancelled(reason="surplus", checks=[check("valid executions N", 2, ">=", 2)])
    await world.say("trajectories", "execution.cancelled", execution, data)


async def test_calls_of_a_cancelled_execution_are_aborted_and_refused(world: World, engine: Engine) -> None:
    await world.place("e-000001.01")
    await world.ask(body_of("hi"))
    engine.hold = True
    late = asyncio.create_task(world.post(body_of("late")).__aenter__())
    await engine.until(2)
    await cancel(world)
    response = await late
    told = (await response.json())["error"]
    assert (response.status, told["type"]) == (400, "invalid_request_error")
    assert "is cancelled: its group is complete without it" in told["message"]
    assert engine.aborted == [engine.calls[1]["rid"]], "its engine is free"
    async with world.post(body_of("hi", "ok", "go")) as response:
        assert response.status == 400
    engine.hold = False
    engine.release.set()
    await world.ask(body_of("hi"), execution="e-000001.01")
    await world.finish()
    sealed = await world.event("execution.sealed")
    assert (sealed.entity, sealed.data.records) == (EXECUTION, 1), "what was answered is recorded"
    async with world.post(body_of("hi", "ok", "go")) as response:
        assert response.status == 401, "over like any other"


async def test_a_proxy_that_starts_again_knows_who_is_cancelled(world: World, engine: Engine) -> None:
    await world.ask(body_of("hi"))
    await world.kill()
    await cancel(world)
    await world.start()
    async with world.post(body_of("hi", "ok", "go")) as response:
        assert response.status == 400
    await world.finish()
    assert (await world.event("execution.sealed")).data.records == 1


async def test_one_that_is_placed_after_it_was_cancelled_may_not_call(world: World, engine: Engine) -> None:
    """Its scheduler had not read it yet."""
    await cancel(world, "e-000001.02")
    await world.place("e-000001.02")
    async with world.post(body_of("hi"), execution="e-000001.02") as response:
        assert response.status == 400
    assert engine.calls == []
