"""An engine that plays a script behind the face of a cell (`tests.proxy.engines`), with its epochs.

As SGLang does, and as the proxy has to bear: unknown keys are refused, a live rid is refused twice, an abort takes every
rid that begins so and finds nothing without a word, a prompt with no room for what is asked is a 400, a caller that
leaves is an abort. As a cell does: calls of an old epoch are a 409.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal

import msgspec
from aiohttp import web

from schemas.records import VersionSpan
from tests.harnesses.script import Play, Script
from tests.proxy.engines import Face, answer_of

_KEYS = {"rid", "input_ids", "sampling_params", "return_logprob", "stream"}
_SAMPLING = {
    "max_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "stop",
    "stop_token_ids",
    "no_stop_trim",
    "skip_special_tokens",
}

End = Literal["release", "abort", "lose"]


class Live:
    """A generation: it stands at `at`, waiting for its `end`, or for a caller that leaves."""

    def __init__(self, engine: ScriptedEngine, rid: str, epoch: int, play: Play, start: int) -> None:
        self.engine, self.rid, self.epoch, self.play, self.start = engine, rid, epoch, play, start
        self.at = start
        self.end: asyncio.Future[End] = asyncio.get_running_loop().create_future()

    def finish(self, how: End) -> None:
        if not self.end.done():
            self.end.set_result(how)


Hold = Callable[[Play, int], int | None]
"""Of an answer, and how much of it is there already: where an engine stops and waits; None: nowhere."""


class ScriptedEngine(Face):
    """`hold` decides where calls wait; `held` gets those that do."""

    def __init__(self, cell: str, script: Script, *, version: int, context_length: int) -> None:
        super().__init__()
        self.cell, self.script, self.version, self.context_length = cell, script, version, context_length
        self.hold: Hold = lambda play, start: None
        self.held: asyncio.Queue[Live] = asyncio.Queue()
        self.live: dict[str, Live] = {}
        self.calls: list[dict[str, Any]] = []
        self.aborts: list[str] = []
        self.min_epoch = 0
        """Calls of older epochs are refused."""

    async def stop(self) -> None:
        self.end_all("release")
        await super().stop()

    def end_all(self, how: End) -> None:
        for live in list(self.live.values()):
            live.finish(how)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = msgspec.json.decode(await request.read())
        epoch = int(request.headers["x-gyre-epoch"])
        if epoch < self.min_epoch:
            return web.json_response({"error": {"type": "stale_epoch"}}, status=409)
        if wrong := self._wrong(body):
            return web.json_response({"error": {"message": wrong}}, status=400)
        self.calls.append(body)
        room = body["sampling_params"]["max_new_tokens"]
        play, start = self.script.take(body["input_ids"])
        live = self.live[body["rid"]] = Live(self, body["rid"], epoch, play, start)
        last = min(len(play.ids), start + room)
        how: End = "release"
        try:
            where = self.hold(play, start)
            if where is not None:
                live.at = min(where, last)
                self.held.put_nowait(live)
                how = await live.end
        except asyncio.CancelledError:
            self.script.suspend(play, start)
            raise
        finally:
            del self.live[body["rid"]]
        if how == "lose":
            self.script.suspend(play, start)
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if how == "release":
            live.at = last
        return web.json_response(self._part(live, how))

    def _wrong(self, body: dict[str, Any]) -> str:
        sampling = body["sampling_params"]
        if unknown := (set(body) - _KEYS) | (set(sampling) - _SAMPLING):
            return f"unknown keys {sorted(unknown)}"
        if body["rid"] in self.live:
            return f"Duplicate request ID: {body['rid']}"
        if len(body["input_ids"]) + sampling["max_new_tokens"] > self.context_length:
            return "Requested token count exceeds the model's maximum context length"
        return ""

    def _part(self, live: Live, how: End) -> dict[str, Any]:
        play, start, at = live.play, live.start, live.at
        ids = play.ids[start:at]
        finish: dict[str, Any] = {"type": "length", "length": len(ids)}
        if how == "abort":
            finish = {"type": "abort", "message": "Abort in decode"}
            self.script.suspend(play, at)
        elif at == len(play.ids) and play.finish == "stop":
            finish = {"type": "stop", "matched": ids[-1]}
        play.parts.append((self.cell, VersionSpan(version=self.version, start=start, end=at)))
        logprobs = [play.logprob(start + i) for i in range(len(ids))]
        prompt_tokens = len(play.prompt) + start
        return answer_of(ids, logprobs, finish=finish, version=self.version, id=live.rid, prompt_tokens=prompt_tokens)

    async def _abort(self, request: web.Request) -> web.Response:
        rid = (await request.json())["rid"]
        self.aborts.append(rid)
        for live in list(self.live.values()):
            if live.rid.startswith(rid):
                live.finish("abort")
        return web.json_response({})
