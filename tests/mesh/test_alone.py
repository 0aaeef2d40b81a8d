"""Two instances of one decider: the second sees that the first answers, and leaves it alone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from schemas.errors import Fenced
from schemas.events import ServiceJoined
from services.mesh.bus import Bus
from services.mesh.clock import SystemClock
from services.mesh.memory_broker import MemoryBroker
from services.mesh.memory_bus import MemoryBus
from services.mesh.service import Context, run_service
from services.scheduler.service import serve
from tests.mesh.contexts import context_of

RUN = "r-alone"


@pytest.fixture
async def context(tmp_path: Path) -> Callable[[], Context]:
    broker = MemoryBroker(SystemClock())

    def make() -> Context:
        return context_of("scheduler", MemoryBus(broker, RUN, name="test"), tmp_path)

    await make().bus.open_run()
    return make


async def joined(bus: Bus, count: int) -> None:
    found = 0
    async with bus.read(f"LOG_{RUN}", 0) as reader:
        async for stored in reader:
            if stored.subject.endswith("scheduler.joined"):
                found += 1
                if found == count:
                    return
    raise AssertionError("the log ended")


async def test_the_second_leaves_the_first_alone_and_follows_it(context: Callable[[], Context]) -> None:
    first, second, third = context(), context(), context()
    running = asyncio.create_task(serve(first))
    await joined(first.bus, 1)
    with pytest.raises(Fenced, match="another instance of the scheduler runs at http") as raised:
        await serve(second)
    assert raised.value.exit_code == 4
    assert await run_service(serve, context()) == Fenced.exit_code
    assert not running.done()
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    await first.health.stop()
    following = asyncio.create_task(serve(third))
    await joined(third.bus, 2)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    await third.health.stop()


async def test_one_that_does_not_answer_is_displaced(context: Callable[[], Context]) -> None:
    """Its machine is stopped, say: once it goes on it cannot say anything."""
    first, second = context(), context()
    await first.publisher.take_fence()
    await first.say("service.joined", "scheduler", ServiceJoined(url="http://127.0.0.1:9", pid=1), id="first")
    running = asyncio.create_task(serve(second))
    await joined(second.bus, 2)
    with pytest.raises(Fenced, match="another instance of the scheduler runs at http"):
        await first.say("service.joined", "scheduler", ServiceJoined(url="http://127.0.0.1:9", pid=1), id="again")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await second.health.stop()
