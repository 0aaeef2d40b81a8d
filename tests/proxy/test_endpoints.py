"""What every dialect's handler does alike."""

from __future__ import annotations

import logging

import pytest
from aiohttp import ClientConnectionResetError, ClientSession, web
from aiohttp.test_utils import TestServer

from schemas.records import CallRecord
from services.mesh.clock import SystemClock
from services.proxy.conversation import Text, decode_blocks
from services.proxy.desk import Desk
from services.proxy.dialects.dialect import Dialect
from services.proxy.endpoints import DIALECTS, Endpoints
from tests.proxy.bodies import call_text
from tests.proxy.engines import Engine
from tests.proxy.world import World


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


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
async def test_without_tools_a_call_is_text(world: World, engine: Engine, dialect: Dialect) -> None:
    """OpenCode and Codex ask so for summaries, and OpenCode's fails on a call."""
    said = [{"role": "user", "content": "Summarize."}]
    engine.script.append(engine.say(call_text("bash", {"command": "ls"})))
    async with world.post({"model": "policy", "messages": said, "input": said}, "/v1" + dialect.path) as response:
        answer = await response.text()
        assert response.status == 200
    (record,) = await world.records()
    assert isinstance(record, CallRecord)
    (block,) = decode_blocks(record.answer)
    assert isinstance(block, Text) and block.text.startswith("<tool_call>") and "<tool_call>" in answer
