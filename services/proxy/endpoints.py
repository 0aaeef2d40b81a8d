"""HTTP of the dialects: who may ask, what is answered, and what a client sees while it waits.

Nothing but a dialect's opening and pings goes out before the record is stored, then everything at once. Pings go on while
the call waits for an engine, as long as the execution's budget lasts, and stop while its engine is dead. A client that
leaves ends its handler, never the call.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import msgspec
import structlog
from aiohttp import web

from schemas.errors import GyreError
from services.mesh.clock import MICROSECONDS, Clock
from services.mesh.health import HealthFace
from services.mesh.tokens import read_token
from services.proxy.calls import Flight
from services.proxy.conversation import Request, decode_blocks
from services.proxy.desk import Desk
from services.proxy.dialects import anthropic, chat_completions, responses
from services.proxy.dialects.dialect import OVERLOADED, Answer, Dialect
from services.proxy.executions import Execution
from services.proxy.refusal import Refused
from services.proxy.tree import Node

DIALECTS: tuple[Dialect, ...] = (anthropic.DIALECT, chat_completions.DIALECT, responses.DIALECT)
PREFIXES = ("/v1", "/v1/v1", "//v1")
"""The second for base addresses that end in `/v1` where none is wanted, the third for those that end in a slash."""

Answerer = Callable[[web.Request, str], Awaitable[web.StreamResponse]]

log = structlog.get_logger(service="proxy")


class Endpoints:
    def __init__(self, *, desk: Desk, secret: bytes, ping_s: float, model: str, clock: Clock) -> None:
        self._desk, self._secret, self._ping_s, self._model, self._clock = desk, secret, ping_s, model, clock
        self.answers = 0
        """Answers handed out since the start, repetitions included."""

    def add_routes(self, health: HealthFace) -> None:
        """Serve every dialect under every prefix; what is asked elsewhere is told what there is."""
        routes: list[web.RouteDef] = []
        for prefix in PREFIXES:
            for dialect in DIALECTS:
                health.post(
                    prefix + dialect.path,
                    partial(self.answer, dialect),
                    streamed=self._guarded(dialect, partial(self._ask, dialect)),
                )
                if dialect.count_path:
                    count = self._guarded(dialect, partial(self._count, dialect))
                    routes.append(web.post(prefix + dialect.count_path, count))
            routes.append(web.get(f"{prefix}/models", self._guarded(DIALECTS[0], self._models)))
            routes.append(web.get(f"{prefix}/models/{{model:.+}}", self._guarded(DIALECTS[0], self._models)))
        routes.append(web.head("/{path:.*}", self._warm_up))
        routes.append(web.post("/{path:.*}", self._guarded(DIALECTS[0], self._unknown)))
        health.app.add_routes(routes)

    async def answer(self, dialect: Dialect, headers: Mapping[str, str], body: bytes) -> tuple[int, bytes]:
        """A request answered whole, streamed or not: status and body. Cancelling it is a client that leaves."""
        try:
            execution, asked = await self._read(dialect, headers, body)
            return 200, msgspec.json.encode(dialect.whole(await self._wait(execution, asked)))
        except (GyreError, RecursionError) as error:
            request_id = _request_id()
            refused = _refusal(error, request_id)
            return dialect.status(refused), msgspec.json.encode(dialect.error(refused, request_id))

    async def _warm_up(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _unknown(self, request: web.Request, request_id: str) -> web.StreamResponse:
        log.warning("unknown path", path=request.path)
        served = ", ".join(f"POST {PREFIXES[0]}{dialect.path}" for dialect in DIALECTS)
        raise Refused(404, f"there is nothing at {request.path}; there is {served}")

    async def _models(self, request: web.Request, request_id: str) -> web.StreamResponse:
        """The only model there is, or one by its name: any name is taken for it. In the words of both vendors."""
        await self._identify(request.headers)
        asked = request.match_info.get("model")
        name = asked or self._model
        since = {"created": 0, "created_at": "1970-01-01T00:00:00Z"}
        model = {"id": name, "object": "model", "type": "model", "display_name": name, "owned_by": "gyre", **since}
        listed = {"object": "list", "data": [model], "has_more": False, "first_id": name, "last_id": name}
        return web.json_response(model if asked else listed, headers={"request-id": request_id})

    def _guarded(self, dialect: Dialect, answer: Answerer) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            request_id = _request_id()
            try:
                return await answer(request, request_id)
            except ConnectionResetError:
                # The client left between two writes: nobody reads an answer, and nothing is wrong here.
                return web.Response(status=499)
            except web.HTTPRequestEntityTooLarge as error:
                refused = Refused(413, f"the body is too large: {error.text}")
            except (GyreError, RecursionError) as error:
                refused = _refusal(error, request_id)
            return web.json_response(
                dialect.error(refused, request_id),
                status=dialect.status(refused),
                headers={"request-id": request_id, **dialect.headers(refused)},
            )

        return handle

    async def _identify(self, headers: Mapping[str, str]) -> Execution:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        token = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        known = read_token(self._secret, token)
        if known is None:
            raise Refused(401, "no execution of this run has this token")
        return await self._desk.find(*known)

    async def _read(self, dialect: Dialect, headers: Mapping[str, str], body: bytes) -> tuple[Execution, Request]:
        execution = await self._identify(headers)
        await execution.refresh()
        return execution, dialect.parse(body, headers, execution.memory)

    async def _count(self, dialect: Dialect, http: web.Request, request_id: str) -> web.StreamResponse:
        execution, asked = await self._read(dialect, http.headers, await _body(http))
        return web.json_response(dialect.count(execution.count(asked)), headers={"request-id": request_id})

    async def _ask(self, dialect: Dialect, http: web.Request, request_id: str) -> web.StreamResponse:
        execution, asked = await self._read(dialect, http.headers, await _body(http))
        if not asked.stream:
            answer = await self._wait(execution, asked)
            return web.json_response(dialect.whole(answer), headers={"request-id": request_id})
        if node := await execution.answered(asked):
            answer = self._answer(execution, asked, node)
            response = await self._open(dialect, http, request_id, asked, answer.prompt_tokens)
            return await self._end(response, dialect.rest(answer))
        try:
            flight = execution.join(asked)
        except Refused as refused:
            if refused.code not in dialect.told_in_stream:
                raise
            response = await self._open(dialect, http, request_id, asked, 0)
            return await self._end(response, dialect.error_event(refused, asked, request_id, self._now()))
        flight.attach()
        try:
            return await self._stream(dialect, http, request_id, execution, asked, flight)
        finally:
            flight.detach()

    async def _wait(self, execution: Execution, asked: Request) -> Answer:
        """The recorded answer, made if there is none."""
        if node := await execution.answered(asked):
            return self._answer(execution, asked, node)
        flight = execution.join(asked)
        flight.attach()
        try:
            await flight.wait()
            return self._answer(execution, asked, await execution.taken(_node(flight)))
        finally:
            flight.detach()

    def _answer(self, execution: Execution, asked: Request, node: Node) -> Answer:
        self.answers += 1
        return Answer(
            asked=asked,
            blocks=decode_blocks(node.answer),
            finish=node.finish,
            stop_sequence=execution.stop_sequence(asked, node),
            prompt_tokens=node.prompt_tokens,
            output_tokens=len(node.output_ids),
            created=self._now(),
        )

    async def _open(
        self, dialect: Dialect, http: web.Request, request_id: str, asked: Request, prompt_tokens: int
    ) -> web.StreamResponse:
        headers = {"content-type": "text/event-stream", "cache-control": "no-cache", "request-id": request_id}
        response = web.StreamResponse(headers=headers)
        await response.prepare(http)
        if dialect.opening:
            await response.write(dialect.opening(asked, prompt_tokens, self._now()))
        return response

    async def _stream(
        self,
        dialect: Dialect,
        http: web.Request,
        request_id: str,
        execution: Execution,
        asked: Request,
        flight: Flight,
    ) -> web.StreamResponse:
        open_now = partial(self._open, dialect, http, request_id, asked, flight.prompt.tokens)
        response = await open_now() if dialect.opening else None
        while not flight.done.is_set():
            try:
                async with asyncio.timeout(self._ping_s):
                    await flight.wait()
            except TimeoutError:
                if flight.alive:
                    if response is None:
                        response = await open_now()
                    await response.write(dialect.ping)
        try:
            last = dialect.rest(self._answer(execution, asked, await execution.taken(_node(flight))))
        except (GyreError, RecursionError) as error:
            if response is None:
                raise
            refused = _refusal(error, request_id)
            last = dialect.error_event(refused, asked, request_id, self._now())
        return await self._end(await open_now() if response is None else response, last)

    async def _end(self, response: web.StreamResponse, data: bytes) -> web.StreamResponse:
        await response.write_eof(data)
        return response

    def _now(self) -> int:
        return self._clock.now_us() // MICROSECONDS


async def _body(http: web.Request) -> bytes:
    """What `http.read()` gives. That one puts the parts into an array which it copies as it grows, and once more at the end."""
    content, most = http.content, http.client_max_size
    content.set_read_chunk_size(most)
    parts, size = [], 0
    while part := await content.readany():
        parts.append(part)
        size += len(part)
        if size > most:
            raise web.HTTPRequestEntityTooLarge(most)
    return b"".join(parts)


def _request_id() -> str:
    return f"req_{uuid.uuid4().hex[:24]}"


def _refusal(error: GyreError | RecursionError, request_id: str) -> Refused:
    if isinstance(error, Refused):
        return error
    if isinstance(error, RecursionError):
        return Refused(400, "what is said in it is nested too deeply")
    log.error("request failed", request=request_id, what=str(error))
    return Refused(OVERLOADED, f"the request failed: {error.what}")


def _node(flight: Flight) -> Node:
    if flight.node is None:
        assert flight.refused is not None
        raise flight.refused
    return flight.node
