"""A rollout cell as the proxy calls it: SGLang's `/generate` and `/abort_request`, with the epoch of the route.

Foreign failures become six of ours: StaleEpoch (the cell doesn't serve this route), EngineLost (nobody is there to
answer now, the call is made again under a new rid), CallCut (likewise, but somebody was there and had the call), EngineBusy
(likewise, but somebody is there), EngineFailed (there was an answer, and it says that something broke: it may be this call
that breaks it) and EngineError (it will not work again either).
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import structlog

from schemas.errors import EngineError
from schemas.records import VersionSpan
from services.mesh.http import Client, Unreachable
from services.proxy.routes import Route

EPOCH_HEADER = "x-gyre-epoch"
TURN_HEADER = "x-gyre-turn"
"""Seconds that the turn of a suspect lasts (`suspects`). Its cell gives one at a time, whichever proxies ask."""
ABORT_S = 5.0

log = structlog.get_logger(service="proxy")


class StaleEpoch(EngineError):
    """The cell refused the call's epoch, or doesn't accept calls now."""


class EngineLost(EngineError):
    """The connection failed, or the engine said that it cannot serve at the moment."""


class CallCut(EngineLost):
    """The connection broke when the engine may have had the call, or its cell saw the engine die with it."""


class EngineFailed(EngineLost):
    """The engine is there and failed."""


class EngineBusy(EngineLost):
    """The engine is there and takes no more calls now."""


_BUSY = (429, 503)
"""SGLang says the second where its queue is full."""
_NOT_NOW = (408, 502, 504)
"""Of a cell whose engine doesn't answer it."""
_DIED = b'"type":"engine_died"'
"""What a cell says then whose engine had the call."""


class Sampled(msgspec.Struct, kw_only=True):
    """What was sampled for one call so far; grows when a call is resumed."""

    ids: list[int] = []
    logprobs: list[float] = []
    versions: list[VersionSpan] = []
    finish: Literal["stop", "length", "abort"] = "abort"

    def extend(self, more: Sampled) -> None:
        """Append a continuation, made from the prompt and these ids."""
        at = len(self.ids)
        for span in more.versions:
            last = self.versions[-1] if self.versions else None
            start = at + span.start
            if last and last.version == span.version and last.end == start:
                start = self.versions.pop().start
            self.versions.append(VersionSpan(version=span.version, start=start, end=at + span.end))
        self.ids += more.ids
        self.logprobs += more.logprobs
        self.finish = more.finish

    def stop_after(self, count: int) -> None:
        """The answer ends after so many tokens: a stop sequence was complete there."""
        del self.ids[count:], self.logprobs[count:]
        self.versions = [
            VersionSpan(version=span.version, start=span.start, end=min(span.end, count))
            for span in self.versions
            if span.start < count
        ]
        self.finish = "stop"


class Engines:
    """All cells, as one client reaches them."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._silent: dict[str, int] = {}
        """Cells that don't answer, and how many calls were lost there since."""

    async def generate(
        self,
        route: Route,
        *,
        rid: str,
        input_ids: list[bytes],
        temperature: float,
        max_new_tokens: int,
        stop_ids: list[int],
        stops: tuple[str, ...] = (),
        turn_s: float = 0.0,
    ) -> Sampled:
        """One answer of the engine to a prompt, which is the inside of a JSON list of ids, in parts. Sampling is plain, so that the
        log-probabilities are those of the samples.

        A call with `turn_s` is a suspect: EngineBusy where the cell gives a turn to another.

        A cell that stops answering is logged once, and again when it answers: all its calls are lost together."""
        headers = {EPOCH_HEADER: str(route.epoch)}
        if turn_s:
            headers[TURN_HEADER] = str(turn_s)
        try:
            sampled = await self._generate(route, headers, rid, input_ids, temperature, max_new_tokens, stop_ids, stops)
        except EngineLost as error:
            if route.cell not in self._silent:
                log.warning("engine lost", cell=route.cell, what=error.what)
            self._silent[route.cell] = self._silent.get(route.cell, 0) + 1
            raise
        except StaleEpoch:
            self._answers(route.cell)
            raise
        self._answers(route.cell)
        return sampled

    def _answers(self, cell: str) -> None:
        if cell in self._silent:
            log.info("engine answers again", cell=cell, calls_lost=self._silent.pop(cell))

    async def _generate(
        self,
        route: Route,
        headers: dict[str, str],
        rid: str,
        input_ids: list[bytes],
        temperature: float,
        max_new_tokens: int,
        stop_ids: list[int],
        stops: tuple[str, ...],
    ) -> Sampled:
        sampling = {
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "top_p": 1.0,
            "top_k": -1,
            "stop_token_ids": stop_ids,
            "skip_special_tokens": False,
        }
        if stops:
            # What completes a stop sequence was sampled, so it stays.
            sampling |= {"stop": stops, "no_stop_trim": True}
        about = msgspec.json.encode({"rid": rid, "sampling_params": sampling, "return_logprob": True, "stream": False})
        # Joined once: with a long prompt the body is by far the largest thing that a call moves.
        ids = [b'{"input_ids":[' + input_ids[0], *input_ids[1:]]
        ids[-1] += b"]," + about[1:]
        try:
            status, data = await self._client.post(f"{route.url}/generate", b",".join(ids), headers=headers)
        except Unreachable as error:
            raise EngineLost(str(error), where=route.cell) from error
        except ConnectionError as error:
            raise CallCut(str(error), where=route.cell) from error
        if status == 409:
            raise StaleEpoch(f"epoch {route.epoch} is not served", where=route.cell)
        if status in _BUSY:
            raise EngineBusy(f"HTTP {status}: {_said(data)}", where=route.cell)
        if status in _NOT_NOW:
            raise (CallCut if _DIED in data else EngineLost)(f"HTTP {status}: {_said(data)}", where=route.cell)
        if status >= 500:
            raise EngineFailed(f"HTTP {status}: {_said(data)}", where=route.cell)
        if status != 200:
            raise EngineError(f"HTTP {status}: {_said(data)}", where=route.cell)
        return read_answer(data, where=f"{route.cell}, rid {rid}")

    async def abort(self, route: Route, rid: str) -> None:
        """Stops exactly this generation at the cell that has it. Raises EngineLost where the cell doesn't answer."""
        body = msgspec.json.encode({"rid": rid})
        try:
            await self._client.post(f"{route.url}/abort_request", body, timeout_s=ABORT_S)
        except ConnectionError as error:
            raise EngineLost(f"abort: {error}", where=route.cell) from error


def read_answer(data: bytes, *, where: str) -> Sampled:
    """SGLang's answer, checked: every sampled token has its log-probability and a version. Raises EngineError."""
    try:
        answer = msgspec.json.decode(data)
        meta: dict[str, Any] = answer["meta_info"]
        ids: list[int] = answer["output_ids"]
        pairs = meta.get("output_token_logprobs") or []
        # What is no number on the wire (JSON has no NaN) is null.
        logprobs = [float(pair[0]) for pair in pairs]
        finish = meta["finish_reason"]["type"]
        completion = meta.get("completion_tokens", len(ids))
        spans = [
            VersionSpan(version=_version(span["version"], where), start=span["start"], end=span["end"])
            for span in meta.get("weight_versions") or []
            # A call that was aborted before its first token has a span without tokens.
            if span["end"] > span["start"]
        ]
        if not spans and ids:
            spans = [VersionSpan(version=_version(meta["weight_version"], where), start=0, end=len(ids))]
    except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise EngineError(f"not an answer of /generate: {error!r}", where=where) from error
    if not len(ids) == len(pairs) == completion or [pair[1] for pair in pairs] != ids:
        raise EngineError(
            f"{len(ids)} ids, {len(pairs)} log-probabilities and {completion} completion tokens do not agree",
            where=where,
            remedy="the engine must return the log-probability of every sampled token, the stop token included",
        )
    ends = [0, *(span.end for span in spans)]
    if [span.start for span in spans] != ends[:-1] or ends[-1] != len(ids):
        raise EngineError(f"versions of {len(ids)} tokens do not cover them: {spans}", where=where)
    if finish not in ("stop", "length", "abort"):
        raise EngineError(f"unknown finish reason {finish!r}", where=where)
    return Sampled(ids=list(ids), logprobs=logprobs, versions=spans, finish=finish)


def _version(said: str | int, where: str) -> int:
    """An engine's name for its weights as a policy version."""
    try:
        return int(said)
    except ValueError:
        raise EngineError(
            f"its weights are version {said!r}, which is no number",
            where=where,
            remedy="start SGLang with --weight-version N, and give weight_version with every update of weights",
        ) from None


def _said(data: bytes) -> str:
    return data[:300].decode("utf-8", "replace")
