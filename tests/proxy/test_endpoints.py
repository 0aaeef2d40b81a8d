"""What a handler makes of clients that leave."""

from __future__ import annotations

import logging

import pytest
from aiohttp import ClientConnectionResetError, ClientSession, web
from aiohttp.test_utils import TestServer

from services.mesh.clock import SystemClock
from services.proxy.desk import Desk
from services.proxy.endpoints import DIALECTS, Endpoints


async def test_a_client_that_left_is_no_error_of_ours(caplog: pytest.LogCaptureFixture) -> None:
    async def leaves(request: web.Request, request_id: str) -> web.StreamResponse:
        raise ClientConnectionResetError("Cannot write to closing transport")

    endpoints = Endpoints(desk=Desk.__new__(Desk), secret=b"s", ping_s=1.0, model="policy", clock=SystemClock())
    app = web.Application()
    app.router.add_post("/", endpoints._guarded(DIALECTS[0], leaves))
    with caplog.at_level(logging.WARNING):
        async with TestServer(app) as server, ClientSession() as client:
            async with client.post(server.make_url("/")) as response:
                assert response.status == 499
    assert caplog.records == []
