"""Engines that play one fixed answer, as far as a test lets them, and give a call up when it is aborted."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from aiohttp import web

from services.mesh.chat import ChatTokenizer
from tests.proxy.conftest import Engine


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
        return {
            "output_ids": ids,
            "meta_info": {
                "finish_reason": {"type": finish},
                "completion_tokens": len(ids),
                "weight_version": str(version),
                "output_token_logprobs": [[self.logprob(start + i), token, None] for i, token in enumerate(ids)],
            },
        }


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
