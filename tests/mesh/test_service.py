"""How a service ends: when it is told to, by itself, or by an error, on its way out too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from schemas import streams
from schemas.errors import EngineError
from services.mesh.clock import SystemClock
from services.mesh.codec import decode
from services.mesh.memory_broker import MemoryBroker
from services.mesh.memory_bus import MemoryBus
from services.mesh.service import Context, serve_until
from tests.mesh.contexts import context_of

RUN = "r-service"


@pytest.fixture
async def context(tmp_path: Path) -> AsyncIterator[Context]:
    bus = MemoryBus(MemoryBroker(SystemClock()), RUN, name="test")
    await bus.open_run()
    yield context_of("packer", bus, tmp_path)
    await bus.close()


async def said(context: Context) -> list[str]:
    end = await context.bus.last_seq(streams.log_stream(RUN))
    return [decode(stored).kind async for stored in context.bus.read_range(streams.log_stream(RUN), 0, end)]


async def test_one_that_is_told_to_stop_is_cancelled_and_says_that_it_left(context: Context) -> None:
    stop, ended = asyncio.Event(), asyncio.Event()

    async def serve(context: Context) -> None:
        stop.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    await serve_until(serve, context, stop)
    assert ended.is_set()
    assert await said(context) == ["service.left"]


async def test_one_that_ends_by_itself_left(context: Context) -> None:
    async def serve(context: Context) -> None:
        """Nothing to do."""

    await serve_until(serve, context, asyncio.Event())
    assert await said(context) == ["service.left"]


@pytest.mark.parametrize("told", [True, False], ids=["on its way out", "by itself"])
async def test_an_error_is_raised_and_nothing_is_said(context: Context, told: bool) -> None:
    stop = asyncio.Event()

    async def serve(context: Context) -> None:
        if told:
            stop.set()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.Event().wait()
        raise EngineError("it failed", where="here")

    with pytest.raises(EngineError, match="it failed"):
        await serve_until(serve, context, stop)
    assert await said(context) == []
