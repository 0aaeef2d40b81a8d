"""A rollout engine that follows a script: a few tokens a call, drawn from its rid, in virtual time.

    generate ── prefill ── token ── token ... ── stop | length | aborted, with the ids so far

It has the face of `services.rollout.adapter.EngineAdapter` and SGLang's answers. New weights take hold in the middle of
an answer, which then has two version spans. Faults: `die`, `hang`, `slow`, `abort_some`.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from replay.worlds.encoder import ASSISTANT, CLOSE, END, FIRST_WORD, OPEN, WORDS
from replay.worlds.faces import Life, now
from replay.worlds.world import EngineScript, World
from schemas.errors import EngineError
from services.rollout.adapter import EngineDied

CONTROL_S = 120.0
"""After which a control call to an engine that hangs fails, as the real adapter's does."""


class Sampling(msgspec.Struct, frozen=True):
    max_new_tokens: int


class Asked(msgspec.Struct, frozen=True):
    rid: str
    input_ids: list[int]
    sampling_params: Sampling


_asked = msgspec.json.Decoder(Asked)


class Running:
    """One request: what will be sampled, and how far it is."""

    __slots__ = ("begun", "cut", "ended", "finish", "ids", "spans", "timer", "token_s")

    def __init__(self, ids: list[int], finish: str, version: int, begun: float, token_s: float) -> None:
        self.ids, self.finish, self.begun, self.token_s = ids, finish, begun, token_s
        self.spans = [(version, 0)]
        self.cut = len(ids)
        self.timer: asyncio.TimerHandle | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def count(self, at: float) -> int:
        """Tokens sampled by then."""
        return max(0, min(len(self.ids), int((at - self.begun) / self.token_s)))

    def end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def abort(self, at: float) -> None:
        if not self.ended.done():
            self.cut, self.finish = self.count(at), "abort"
            self.end()


class WorldEngine:
    """The engine of one life of a cell's rollout process."""

    engine = "scripted"

    def __init__(self, world: World, cell: str, script: EngineScript, life: Life) -> None:
        self.capabilities = ["abort", "release_memory", "weights_from_transfer", "version_spans"]
        self.version = 0
        self._world, self._cell, self._script = world, cell, script
        self._running: dict[str, Running] = {}
        self._has_memory = True
        self._pace = 1.0
        self._hangs: asyncio.Future[None] | None = None
        self._code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        life.at_end(self._forget)

    def __repr__(self) -> str:
        state = "dead" if self._code.done() else "hangs" if self._hangs else "up"
        return f"<WorldEngine {self._cell} [{state}, v{self.version}, {len(self._running)} running]>"

    # the adapter's face

    async def start(self) -> None:
        await asyncio.sleep(self._script.start_s)
        self._world.engines[self._cell] = self

    async def stop(self) -> None:
        self._end(0)

    async def died(self) -> int:
        return await asyncio.shield(self._code)

    async def generate(self, body: bytes) -> tuple[int, bytes]:
        if self._code.done():
            raise EngineError("the engine is gone", where=self._cell)
        if not self._has_memory:
            self._world.violations.append(f"{self._cell} is asked for tokens after it gave its memory away")
            return 503, b'{"error":{"message":"no memory"}}'
        asked = _asked.decode(body)
        ids, finish = sample(asked.input_ids, asked.rid, asked.sampling_params.max_new_tokens)
        script, begun = self._script, now()
        token_s = script.token_s * self._pace
        running = Running(ids, finish, self.version, begun + script.prefill_s * self._pace, token_s)
        self._running[asked.rid] = running
        self._go(running)
        try:
            await running.ended
        finally:
            self._running.pop(asked.rid, None)
            if running.timer is not None:
                running.timer.cancel()
        if self._code.done():
            kind = EngineDied if self._code.result() else EngineError
            raise kind("the engine ended", where=self._cell)
        return 200, self._answer(asked.rid, running)

    async def abort(self, body: bytes) -> tuple[int, bytes]:
        await self._awake()
        running = self._running.get(msgspec.json.decode(body)["rid"])
        if running is not None:
            running.abort(now())
        return 200, b"{}"

    async def abort_all(self) -> None:
        await self._awake()
        self.abort_some(len(self._running))

    async def pull_weights(self, address: dict[str, Any], version: int) -> None:
        await self._awake()
        name = address["name"]
        await asyncio.sleep(self._script.pull_s * self._pace)
        flat = self._world.pulled(name, version)
        if flat is None:
            raise EngineError(f"nobody exposes {name}", where=self._cell)
        at = now()
        self.version = version
        for running in self._running.values():
            running.spans.append((version, running.count(at)))

    async def release_memory(self) -> None:
        await self._awake()
        for running in list(self._running.values()):
            running.abort(now())
        await asyncio.sleep(self._script.memory_s)
        self._has_memory = False

    async def resume_memory(self) -> None:
        await self._awake()
        await asyncio.sleep(self._script.memory_s)
        self._has_memory = True

    # faults

    def die(self, code: int = 1) -> None:
        """The engine's process ends, every request with it."""
        self._end(code)

    def hang(self, seconds: float) -> None:
        """Nothing is sampled and nothing answered for so long."""
        if self._hangs is None and not self._code.done():
            self._hangs = asyncio.get_running_loop().create_future()
            for running in self._running.values():
                if running.timer is not None:
                    running.timer.cancel()
            asyncio.get_running_loop().call_later(seconds, self._wake)

    def slow(self, factor: float, seconds: float) -> None:
        """What begins from now on takes `factor` as long, for a time."""
        self._pace = factor
        asyncio.get_running_loop().call_later(seconds, setattr, self, "_pace", 1.0)

    def abort_some(self, count: int) -> int:
        """Requests that are ended with what was sampled, the oldest first. Returns how many there were."""
        chosen = list(self._running.values())[:count]
        for running in chosen:
            running.abort(now())
        return len(chosen)

    # inside

    def _go(self, running: Running) -> None:
        if self._hangs is None:
            due = running.begun + len(running.ids) * running.token_s
            running.timer = asyncio.get_running_loop().call_later(max(0.0, due - now()), running.end)

    async def _awake(self) -> None:
        """Raises EngineError where the engine hangs for too long, or is gone."""
        if self._hangs is not None:
            either: list[asyncio.Future[Any]] = [self._hangs, self._code]
            await asyncio.wait(either, timeout=CONTROL_S, return_when=asyncio.FIRST_COMPLETED)
            if self._hangs is not None:
                raise EngineError("no answer", where=self._cell)
        if self._code.done():
            raise EngineError("the engine is gone", where=self._cell)

    def _wake(self) -> None:
        hangs, self._hangs = self._hangs, None
        if hangs is not None and not hangs.done():
            hangs.set_result(None)
        for running in list(self._running.values()):
            self._go(running)

    def _end(self, code: int) -> None:
        if not self._code.done():
            self._code.set_result(code)
            for running in list(self._running.values()):
                running.end()
            self._forget()

    def _forget(self) -> None:
        if self._world.engines.get(self._cell) is self:
            del self._world.engines[self._cell]

    def _answer(self, rid: str, running: Running) -> bytes:
        ids = running.ids[: running.cut]
        starts = [min(start, len(ids)) for _, start in running.spans] + [len(ids)]
        spans = [
            {"version": version, "start": start, "end": end}
            for (version, _), start, end in zip(running.spans, starts, starts[1:], strict=False)
            if end > start
        ]
        meta = {
            "id": rid,
            "finish_reason": {"type": running.finish},
            "completion_tokens": len(ids),
            "weight_version": str(self.version),
            "weight_versions": spans,
            "output_token_logprobs": [(-0.25 - (token % 8) / 16, token, None) for token in ids],
        }
        return msgspec.json.encode({"output_ids": ids, "meta_info": meta})


def sample(input_ids: list[int], rid: str, limit: int) -> tuple[list[int], str]:
    """Ids and finish reason: a few words, perhaps a call, the end of the turn. A turn that was begun goes on."""
    bits = int(rid, 16)
    begun = 0
    for token in reversed(input_ids[-8:]):
        if token == ASSISTANT:
            break
        begun += 1
    tail = input_ids[len(input_ids) - begun :]
    if OPEN in tail and CLOSE not in tail:
        have = len(tail) - tail.index(OPEN)
        ids = [*(_word(bits, at) for at in range(have - 1, 2)), CLOSE, END][: limit + 1]
    else:
        said = [_word(bits, at) for at in range(2, 3 + bits % 4)]
        ids = [*said, OPEN, _word(bits, 0), _word(bits, 1), CLOSE, END] if bits >> 8 & 1 else [*said, END]
    if len(ids) > limit:
        return ids[:limit], "length"
    return ids, "stop"


def _word(bits: int, at: int) -> int:
    return FIRST_WORD + (bits >> (16 + 6 * at)) % WORDS
