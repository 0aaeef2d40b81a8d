"""What a client is told of a request without an answer: whether it may have been seen."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from aiohttp import web

from services.mesh.http import HttpClient, Unreachable


async def test_a_connection_that_breaks_is_told_apart_from_one_that_was_never_made() -> None:
    seen = asyncio.Event()

    async def breaks(request: web.Request) -> web.Response:
        await request.read()
        seen.set()
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    app = web.Application()
    app.router.add_post("/generate", breaks)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/generate"  # type: ignore[union-attr]
    async with contextlib.aclosing(HttpClient()) as client:
        with pytest.raises(ConnectionError) as broken:
            await client.post(url, b"{}")
        assert seen.is_set() and not isinstance(broken.value, Unreachable)
        await runner.cleanup()
        with pytest.raises(Unreachable):
            await client.post(url, b"{}")
