"""HTTP of the Messages API: who may ask, what is answered, and what a client sees while it waits.

Nothing but `message_start` and pings goes out before the record is stored, then everything at once. Pings stop while
no engine works on the call. A client that leaves ends its handler, never the call.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping

import msgspec
import structlog
from aiohttp import web

from schemas.errors import GyreError
from services.mesh.health import HealthFace
from services.mesh.tokens import read_token
from services.proxy.calls import Flight
from services.proxy.conversation import Request, decode_blocks
from services.proxy.desk import Desk
from services.proxy.dialects import anthropic
from services.proxy.executions import Execution
from services.proxy.refusal import Refused
from services.proxy.tree import Node

Answerer = Callable[[web.Request, str], Awaitable[web.StreamResponse]]

log = structlog.get_logger(service="proxy")


class Endpoints:
    def __init__(self, *, desk: Desk, secret: bytes, ping_s: float) -> None:
        self._desk, self._secret, self._ping_s = desk, secret, ping_s
        self.answers = 0
        """Answers handed out since the start, repetitions included."""

    def add_routes(self, health: HealthFace) -> None:
        """Serve under `/v1` and, for base addresses that end in it, under `/v1/v1`."""
        for prefix in ("/v1", "/v1/v1"):
            health.post(f"{prefix}/messages", self.messages, streamed=self._guarded(self._messages))
            health.app.add_routes([web.post(f"{prefix}/messages/count_tokens", self._guarded(self._count_tokens))])
        health.app.add_routes(
            [web.head("/{path:.*}", self._warm_up), web.post("/{path:.*}", self._guarded(self._unknown))]
        )

    async def messages(self, headers: Mapping[str, str], body: bytes) -> tuple[int, bytes]:
        """A request answered whole, streamed or not: status and body. Cancelling it is a client that leaves."""
        try:
            execution, asked = await self._read(headers, body)
            return 200, msgspec.json.encode(anthropic.message(await self._wait(execution, asked)))
        except GyreError as error:
            request_id = _request_id()
            refused = _refusal(error, request_id)
            return refused.status, msgspec.json.encode(anthropic.error(refused, request_id))

    async def _warm_up(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _unknown(self, request: web.Request, request_id: str) -> web.StreamResponse:
        log.warning("unknown path", path=request.path)
        raise Refused(404, f"there is nothing at {request.path}; this is POST /v1/messages")

    def _guarded(self, answer: Answerer) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            request_id = _request_id()
            try:
                return await answer(request, request_id)
            except ConnectionResetError:
                # The client left between two writes: nobody reads an answer, and nothing is wrong here.
                return web.Response(status=499)
            except web.HTTPRequestEntityTooLarge as error:
                refused = Refused(413, f"the body is too large: {error.text}")
            except GyreError as error:
                refused = _refusal(error, request_id)
            return web.json_response(
                anthropic.error(refused, request_id), status=refused.status, headers={"request-id": request_id}
            )

        return handle

    async def _identify(self, headers: Mapping[str, str]) -> Execution:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        token = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        known = read_token(self._secret, token)
        if known is None:
            raise Refused(401, "no execution of this run has this token")
        return await self._desk.find(*known)

    async def _read(self, headers: Mapping[str, str], body: bytes) -> tuple[Execution, Request]:
        execution = await self._identify(headers)
        return execution, anthropic.parse(body, headers)

    async def _count_tokens(self, request: web.Request, request_id: str) -> web.StreamResponse:
        execution, asked = await self._read(request.headers, await request.read())
        return web.json_response({"input_tokens": execution.count(asked)}, headers={"request-id": request_id})

    async def _messages(self, request: web.Request, request_id: str) -> web.StreamResponse:
        execution, asked = await self._read(request.headers, await request.read())
        if not asked.stream:
            answer = await self._wait(execution, asked)
            return web.json_response(anthropic.message(answer), headers={"request-id": request_id})
        if node := await execution.answered(asked):
            answer = self._answer(asked, node)
            response = await self._open(request, request_id, asked, answer.prompt_tokens)
            await self._end(response, anthropic.rest_of_stream(answer))
            return response
        flight = execution.join(asked)
        flight.attach()
        try:
            return await self._stream(request, request_id, asked, flight)
        finally:
            flight.detach()

    async def _wait(self, execution: Execution, asked: Request) -> anthropic.Answer:
        """The recorded answer, made if there is none."""
        if node := await execution.answered(asked):
            return self._answer(asked, node)
        flight = execution.join(asked)
        flight.attach()
        try:
            await flight.wait()
            return self._answer(asked, _node(flight))
        finally:
            flight.detach()

    def _answer(self, asked: Request, node: Node) -> anthropic.Answer:
        self.answers += 1
        return anthropic.Answer(
            request=node.request,
            model=asked.model,
            blocks=decode_blocks(node.answer),
            finish=node.finish,
            prompt_tokens=node.prompt_tokens,
            output_tokens=len(node.output_ids),
        )

    async def _open(self, request: web.Request, request_id: str, asked: Request, tokens: int) -> web.StreamResponse:
        headers = {"content-type": "text/event-stream", "cache-control": "no-cache", "request-id": request_id}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        await response.write(anthropic.message_start(asked.digest, asked.model, tokens) + anthropic.PING)
        return response

    async def _stream(
        self, request: web.Request, request_id: str, asked: Request, flight: Flight
    ) -> web.StreamResponse:
        response = await self._open(request, request_id, asked, len(flight.prompt.ids))
        while not flight.done.is_set():
            try:
                async with asyncio.timeout(self._ping_s):
                    await flight.wait()
            except TimeoutError:
                if flight.alive:
                    await response.write(anthropic.PING)
        try:
            last = anthropic.rest_of_stream(self._answer(asked, _node(flight)))
        except Refused as refused:
            last = anthropic.error_event(refused, request_id)
        await self._end(response, last)
        return response

    async def _end(self, response: web.StreamResponse, data: bytes) -> None:
        await response.write(data)
        await response.write_eof()


def _request_id() -> str:
    return f"req_{uuid.uuid4().hex[:24]}"


def _refusal(error: GyreError, request_id: str) -> Refused:
    if isinstance(error, Refused):
        return error
    log.error("request failed", request=request_id, what=str(error))
    return Refused(529, f"the request failed: {error.what}")


def _node(flight: Flight) -> Node:
    if flight.node is None:
        assert flight.refused is not None
        raise flight.refused
    return flight.node
