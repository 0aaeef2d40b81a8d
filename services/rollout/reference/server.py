"""The engine's HTTP face: SGLang's routes and semantics over the worker.

Differences from SGLang, on purpose: answers carry no text; requests that the engine cannot honour exactly are refused,
never approximated; `/update_weights_from_transfer` pulls weights by address; an update always empties the prefix cache
and retracts what is running, so no token is conditioned on keys and values of older weights. As in SGLang, the rid of
`/abort_request` is a prefix: give all rids one length.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import structlog
import torch
from aiohttp import web
from aiohttp.typedefs import Handler

from schemas.errors import ConfigError, EngineError, EnvironmentMissing, TransportError
from services.mesh.chat import load_tokenizer
from services.mesh.weights.layout import Qwen3Config, fingerprint, flat_size
from services.mesh.weights.transport import Transport, open_transport
from services.rollout.reference import wire
from services.rollout.reference.batcher import MEMORY_TAGS, Batcher
from services.rollout.reference.kv import BLOCK_SIZE
from services.rollout.reference.model import flatten, load
from services.rollout.reference.request import RequestRefused
from services.rollout.reference.worker import Worker

MAX_BODY = 64 << 20

log = structlog.get_logger()


class Server:
    """Routes of one engine. `application()` is what a runner serves; `handler_cancellation` must be on in it, since a
    client that leaves aborts its request that way.
    """

    def __init__(self, worker: Worker, *, config: Qwen3Config, model_path: str, dtype: str) -> None:
        self._worker = worker
        self._config = config
        self._model_path = model_path
        self._dtype = dtype
        self._decode: Callable[[list[int]], str] | None = None
        self._transports: dict[str, Transport] = {}
        # One update at a time: a pull and the swap that follows belong together.
        self._updating = asyncio.Lock()

    def application(self) -> web.Application:
        app = web.Application(
            middlewares=[_refusals],  # type: ignore[list-item]
            client_max_size=MAX_BODY,
        )
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/model_info", self._model_info)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_get("/v1/loads", self._loads)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_get("/flush_cache", self._flush)
        app.router.add_post("/flush_cache", self._flush)
        app.router.add_post("/pause_generation", self._pause)
        app.router.add_post("/continue_generation", self._continue)
        app.router.add_post("/release_memory_occupation", self._release)
        app.router.add_post("/resume_memory_occupation", self._resume)
        app.router.add_post("/update_weights_from_transfer", self._update_from_transfer)
        app.router.add_post("/update_weights_from_disk", self._update_from_disk)
        return app

    async def close(self) -> None:
        """Free the transports. The worker belongs to the caller."""
        for transport in self._transports.values():
            await asyncio.to_thread(transport.close)
        self._transports.clear()

    # Generation

    async def _generate(self, http: web.Request) -> web.Response:
        body = wire.decode(await http.read(), wire.GenerateBody)
        decode = await self._text_of_ids() if body.stops else None
        request = await self._worker.generate(body.request(self._config.eos_token_ids, decode))
        answer = request.answer(return_logprob=body.return_logprob)
        assert request.finish is not None
        if request.finish.status_code is not None:
            return _json({"error": {"message": request.finish.message}, **answer}, status=request.finish.status_code)
        return _json(answer)

    async def _text_of_ids(self) -> Callable[[list[int]], str] | None:
        """The tokenizer's, read when it is first needed: few requests stop at a text."""
        if self._decode is None:
            try:
                self._decode = (await asyncio.to_thread(load_tokenizer, self._model_path)).decode
            except ConfigError as error:
                log.warning("no stop texts", what=str(error))
        return self._decode

    async def _abort(self, http: web.Request) -> web.Response:
        body = wire.decode(await http.read(), wire.AbortBody)
        await self._worker.call(lambda batcher: batcher.abort(body.rid, everything=body.abort_all))
        return web.Response()

    # State

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self._worker.failed.is_set() else 200)

    async def _ready(self, _: web.Request) -> web.Response:
        if self._worker.failed.is_set():
            return _json({"ready": False, "state": "failed"}, status=503)
        ready, state = await self._worker.call(lambda batcher: (batcher.ready, _state(batcher)))
        return _json({"ready": ready, "state": state}, status=200 if ready else 503)

    async def _model_info(self, _: web.Request) -> web.Response:
        version = await self._worker.call(lambda batcher: batcher.weight_version)
        return _json(
            {
                "model_path": self._model_path,
                "weight_version": version,
                "is_generation": True,
                "model_type": "qwen3",
                "architectures": ["Qwen3ForCausalLM"],
                "vocab_size": self._config.vocab_size,
                "layout": fingerprint(self._config),
                "parameters": flat_size(self._config),
            }
        )

    async def _server_info(self, _: web.Request) -> web.Response:
        def read(batcher: Batcher) -> dict[str, Any]:
            return {
                "engine": "reference",
                "model_path": self._model_path,
                "dtype": self._dtype,
                "context_length": batcher.context_length,
                "max_running_requests": batcher.max_running,
                "max_total_num_tokens": batcher.pool.num_blocks * BLOCK_SIZE,
                "page_size": BLOCK_SIZE,
                "weight_version": batcher.weight_version,
                "state": _state(batcher),
                "paused": batcher.paused,
                "weights_loaded": batcher.decoder.has_weights,
                "weight_bytes": batcher.decoder.weight_bytes,
                "kv_bytes": batcher.decoder.kv_bytes,
                "cached_tokens": batcher.pool.cached * BLOCK_SIZE,
                "totals": {
                    "steps": batcher.steps,
                    "generated_tokens": batcher.generated,
                    "prefilled_tokens": batcher.prefilled,
                    "reused_tokens": batcher.reused,
                    "retractions": batcher.retractions,
                },
            }

        info = await self._worker.call(read)
        info["transports"] = {kind: transport.reason for kind, transport in self._transports.items()}
        return _json(info)

    async def _loads(self, _: web.Request) -> web.Response:
        def read(batcher: Batcher) -> dict[str, Any]:
            total = batcher.pool.num_blocks * BLOCK_SIZE
            used = total - batcher.pool.available * BLOCK_SIZE
            return {
                "dp_rank": 0,
                "num_running_reqs": len(batcher.running),
                "num_waiting_reqs": len(batcher.waiting),
                "num_used_tokens": used,
                "max_total_num_tokens": total,
                "token_usage": used / total,
            }

        return _json({"loads": [await self._worker.call(read)]})

    # Control

    async def _flush(self, _: web.Request) -> web.Response:
        await self._worker.call(lambda batcher: batcher.flush())
        return web.Response(text="Cache flushed.\n")

    async def _pause(self, http: web.Request) -> web.Response:
        body = wire.decode(await http.read(), wire.PauseBody)
        await self._worker.call(lambda batcher: batcher.pause(body.mode))
        return _json({"message": f"Generation paused ({body.mode}).", "status": "ok"})

    async def _continue(self, http: web.Request) -> web.Response:
        wire.decode(await http.read(), wire.ContinueBody)
        await self._worker.call(lambda batcher: batcher.resume())
        return _json({"message": "Generation continued.", "status": "ok"})

    async def _release(self, http: web.Request) -> web.Response:
        body = wire.decode(await http.read(), wire.MemoryBody)
        tags = list(MEMORY_TAGS) if body.tags is None else body.tags
        await self._worker.call(lambda batcher: batcher.release_memory(tags))
        return web.Response()

    async def _resume(self, http: web.Request) -> web.Response:
        body = wire.decode(await http.read(), wire.MemoryBody)
        tags = list(MEMORY_TAGS) if body.tags is None else body.tags
        await self._worker.call(lambda batcher: batcher.resume_memory(tags))
        return web.Response()

    # Weights

    async def _update_from_transfer(self, http: web.Request) -> web.Response:
        body = wire.decode(await http.read(), wire.TransferBody)
        _needs_flush(body.flush_cache)
        version = body.address.version if body.weight_version is None else body.weight_version
        async with self._updating:
            flat = await asyncio.to_thread(self._pull, body)
            return await self._swap(flat, str(version))

    async def _update_from_disk(self, http: web.Request) -> web.Response:
        body = wire.decode(await http.read(), wire.DiskBody)
        _needs_flush(body.flush_cache)
        async with self._updating:
            flat = await asyncio.to_thread(self._read, Path(body.model_path))
            current = await self._worker.call(lambda batcher: batcher.weight_version)
            return await self._swap(flat, current if body.weight_version is None else str(body.weight_version))

    def _pull(self, body: wire.TransferBody) -> torch.Tensor:
        transport = self._transports.get(body.address.kind)
        if transport is None:
            transport = self._transports[body.address.kind] = open_transport(body.address.kind)
        flat = np.empty(flat_size(self._config), dtype=np.float32)
        transport.pull(body.address, flat)
        return torch.from_numpy(flat)

    def _read(self, folder: Path) -> torch.Tensor:
        model = load(folder)
        if model.config != msgspec.structs.replace(self._config, eos_token_id=model.config.eos_token_id):
            raise EngineError(
                "this checkpoint has another architecture than the engine's",
                where=str(folder),
                remedy="start an engine on that folder instead",
            )
        return flatten(model)

    async def _swap(self, flat: torch.Tensor, version: str) -> web.Response:
        retracted = await self._worker.call(lambda batcher: batcher.set_weights(flat, version))
        message = f"Weights are now version {version}."
        return _json(
            {"success": True, "message": message, "weight_version": version, "num_retracted_requests": retracted}
        )


def _state(batcher: Batcher) -> str:
    if batcher.paused is not None:
        return f"paused ({batcher.paused})"
    if not batcher.decoder.kv_bytes or not batcher.decoder.weight_bytes:
        return "memory released"
    return "serving" if batcher.ready else "waiting for weights"


def _needs_flush(flush_cache: bool) -> None:
    if not flush_cache:
        raise RequestRefused(
            "flush_cache is false: keys and values of older weights are never kept, since tokens conditioned on them "
            "would come from no policy at all"
        )


@web.middleware
async def _refusals(http: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(http)
    except (EngineError, ConfigError, TransportError, EnvironmentMissing) as error:
        return _json({"error": {"message": str(error)}}, status=400)


def _json(value: Any, *, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")
