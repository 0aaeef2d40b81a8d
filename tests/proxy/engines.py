"""Scripted cells: the HTTP face of SGLang's `/generate` and `/abort_request`, and who answers behind it.

`Engine` gives the next line of its script to every call. `Player` plays one fixed answer as far as a test lets it, and
gives a call up when it is aborted. The policy of whole tasks is in `tests.harnesses.engine`.
"""

from __future__ import annotations

import abc
import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, Self

import msgspec
from aiohttp import web

from services.mesh.chat import ChatTokenizer


class Face(abc.ABC):
    """A server on 127.0.0.1. A caller that leaves cancels its handler, as it aborts a generation of SGLang."""

    def __init__(self) -> None:
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def start(self) -> Self:
        app = web.Application(client_max_size=256 << 20)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]
        return self

    async def stop(self) -> None:
        if self._runner:
            await self._runner.cleanup()

    @abc.abstractmethod
    async def _generate(self, request: web.Request) -> web.StreamResponse: ...

    @abc.abstractmethod
    async def _abort(self, request: web.Request) -> web.Response: ...


def answer_of(
    ids: list[int], logprobs: Sequence[float], *, finish: dict[str, Any], version: int, **meta: Any
) -> dict[str, Any]:
    """The body of an answer of `/generate`; `meta` is what else its `meta_info` says."""
    return {
        "text": "",
        "output_ids": ids,
        "meta_info": {
            "finish_reason": finish,
            "completion_tokens": len(ids),
            "weight_version": str(version),
            "output_token_logprobs": [[logprob, token, None] for logprob, token in zip(logprobs, ids, strict=True)],
            **meta,
        },
    }


class Engine(Face):
    """A cell's `/generate` and `/abort_request`. Each call takes the next line of `script`; with `hold` it waits for
    `release` first. `started` counts calls that arrived."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.end = tokenizer.eos_token_id
        self.script: deque[Any] = deque()
        self.calls: list[dict[str, Any]] = []
        self.epochs: list[str] = []
        self.aborted: list[str] = []
        self.hold = False
        self.release = asyncio.Event()
        self.arrived = asyncio.Condition()
        self.abort_seen = asyncio.Event()
        self.version = 7

    def say(self, text: str, *, finish: str = "stop") -> dict[str, Any]:
        """The answer that an engine gives which samples this text."""
        ids = self.tokenizer.encode(text) + ([self.end] if finish == "stop" else [])
        return self.ids(ids, finish=finish)

    def ids(self, ids: list[int], *, finish: str = "stop") -> dict[str, Any]:
        logprobs = [-0.5 - i / 1000 for i in range(len(ids))]
        return answer_of(ids, logprobs, finish={"type": finish}, version=self.version)

    async def until(self, count: int) -> None:
        """Until so many calls have arrived."""
        async with self.arrived:
            await self.arrived.wait_for(lambda: len(self.calls) >= count)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = msgspec.json.decode(await request.read())
        line = self.script.popleft() if self.script else self.say("ok")
        async with self.arrived:
            self.calls.append(body)
            self.epochs.append(request.headers["x-gyre-epoch"])
            self.arrived.notify_all()
        if line == "stale":
            return web.json_response({"error": {"type": "stale_epoch"}}, status=409)
        if line == "failed":
            return web.json_response({"error": {"message": "out of memory"}}, status=500)
        if line == "full":
            return web.json_response({"error": {"message": "The request queue is full."}}, status=503)
        if line == "gone":
            return web.json_response({"error": {"type": "engine_unreachable"}}, status=502)
        if line == "lost":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if self.hold:
            await self.release.wait()
        return web.json_response(line(body) if callable(line) else line)

    async def _abort(self, request: web.Request) -> web.Response:
        self.aborted.append((await request.json())["rid"])
        self.abort_seen.set()
        return web.json_response({})


class Play:
    """The answer that all engines play: `ids`, the stop token included, after a prompt that the first call brings."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids
        self.prompt: list[int] | None = None

    def logprob(self, at: int) -> float:
        return -0.5 - at / 1000

    def position(self, input_ids: list[int]) -> int:
        """How much of the answer the caller has already."""
        if self.prompt is None:
            self.prompt = input_ids
        known = input_ids[len(self.prompt) :]
        assert input_ids[: len(self.prompt)] == self.prompt and known == self.ids[: len(known)]
        return len(known)

    def part(self, start: int, end: int, finish: str, version: int) -> dict[str, Any]:
        ids = self.ids[start:end]
        logprobs = [self.logprob(at) for at in range(start, start + len(ids))]
        return answer_of(ids, logprobs, finish={"type": finish}, version=version)


class Player(Engine):
    """A call waits until it is aborted, or until `release` is set and it plays to the end.

    An aborted call has sampled `sampled` tokens by then, its reason is `finish`; the first `deaf` aborts find nothing;
    with `lose` an abort breaks the connections instead. `script` holds "stale" for calls that are refused.
    """

    def __init__(self, tokenizer: ChatTokenizer, play: Play, *, version: int) -> None:
        super().__init__(tokenizer)
        self.play, self.version = play, version
        self.sampled, self.finish, self.deaf, self.lose = 0, "abort", 0, False
        self.live: dict[str, asyncio.Future[Any]] = {}
        self.left = asyncio.Event()
        """A caller closed its connection."""

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = msgspec.json.decode(await request.read())
        start = self.play.position(body["input_ids"])
        aborted: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.live[body["rid"]] = aborted
        async with self.arrived:
            self.calls.append(body)
            self.epochs.append(request.headers["x-gyre-epoch"])
            self.arrived.notify_all()
        released = asyncio.create_task(self.release.wait())
        try:
            if self.script:
                return web.json_response({"error": {"type": self.script.popleft()}}, status=409)
            await asyncio.wait({aborted, released}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self.left.set()
            raise
        finally:
            released.cancel()
            del self.live[body["rid"]]
        if not aborted.done():
            return web.json_response(self.play.part(start, len(self.play.ids), "stop", self.version))
        if self.lose:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        return web.json_response(self.play.part(start, start + self.sampled, self.finish, self.version))

    async def _abort(self, request: web.Request) -> web.Response:
        rid = (await request.json())["rid"]
        self.aborted.append(rid)
        self.abort_seen.set()
        if self.deaf:
            self.deaf -= 1
        elif rid in self.live and not self.live[rid].done():
            self.live[rid].set_result(None)
        return web.json_response({})
