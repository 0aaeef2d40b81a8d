"""`python -m services.rollout.reference`: one engine as an operating-system process, on 127.0.0.1.

The port file appears, whole, once requests are answered. SIGTERM and SIGINT abort what is running and end with code 0;
a failure of the compute thread ends with code 1.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import structlog
import torch
from aiohttp import web

from schemas.errors import ConfigError, EnvironmentMissing, GyreError
from services.rollout.reference.batcher import Batcher
from services.rollout.reference.decode import PagedDecoder
from services.rollout.reference.kv import BLOCK_SIZE
from services.rollout.reference.model import flatten, load
from services.rollout.reference.server import Server
from services.rollout.reference.worker import Worker

HOST = "127.0.0.1"
_LOG = structlog.get_logger()


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m services.rollout.reference", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder with config.json and model.safetensors")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--port-file", type=Path, help="where to write the port once requests are answered")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--max-running", type=int, default=32, help="requests computed together")
    parser.add_argument("--kv-tokens", type=int, default=32768, help="size of the KV pool")
    parser.add_argument("--context-length", type=int, help="default: what the model allows, at most --kv-tokens")
    parser.add_argument("--prefill-tokens", type=int, default=512, help="prompt tokens computed in one step")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--weight-version", default="0", help="version of the weights in the folder")
    return parser.parse_args(arguments)


def build(options: argparse.Namespace) -> tuple[Batcher, PagedDecoder]:
    """The batcher over the weights of `--model`. Raises ConfigError or EngineError."""
    model = load(options.model)
    config = model.config
    context = options.context_length or min(config.max_position_embeddings, options.kv_tokens)
    for name, value, least in (
        ("--kv-tokens", options.kv_tokens, BLOCK_SIZE),
        ("--context-length", context, 2),
        ("--max-running", options.max_running, 1),
        ("--prefill-tokens", options.prefill_tokens, 1),
        ("--threads", options.threads, 1),
    ):
        if value < least:
            raise ConfigError(f"{name} is {value}", remedy=f"give at least {least}")
    if context > config.max_position_embeddings:
        raise ConfigError(
            f"--context-length is {context}, the model was made for {config.max_position_embeddings}",
            remedy="give no more than the model's max_position_embeddings",
        )
    decoder = PagedDecoder(
        config,
        dtype=getattr(torch, options.dtype),
        num_blocks=options.kv_tokens // BLOCK_SIZE,
        context_length=context,
    )
    decoder.set_weights(flatten(model))
    batcher = Batcher(
        decoder,
        context_length=context,
        max_running=options.max_running,
        prefill_tokens=options.prefill_tokens,
        weight_version=options.weight_version,
    )
    return batcher, decoder


async def serve(options: argparse.Namespace) -> int:
    """Serve until a signal or a failure; the exit code."""
    batcher, decoder = build(options)
    loop, stopping = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    worker = Worker(batcher)
    server = Server(worker, config=decoder.config, model_path=str(options.model), dtype=options.dtype)
    runner = web.AppRunner(server.application(), handler_cancellation=True, access_log=None, shutdown_timeout=5.0)
    await runner.setup()
    site = web.TCPSite(runner, HOST, options.port)
    try:
        await site.start()
    except OSError as error:
        await runner.cleanup()
        raise EnvironmentMissing(
            f"port {options.port} cannot be opened: {error.strerror}", where=HOST, remedy="give another --port, or 0"
        ) from error
    worker.start()
    port = runner.addresses[0][1]
    if options.port_file is not None:
        part = options.port_file.with_name(options.port_file.name + ".part")
        part.write_text(f"{port}\n")
        os.replace(part, options.port_file)
    _LOG.info("engine serves", port=port, model=str(options.model), dtype=options.dtype, pid=os.getpid())
    waits = [asyncio.ensure_future(event.wait()) for event in (stopping, worker.failed)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    await site.stop()
    await worker.stop()
    await runner.cleanup()
    await server.close()
    return 1 if worker.failed.is_set() else 0


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        if options.threads > 0:
            torch.set_num_threads(options.threads)
        return asyncio.run(serve(options))
    except GyreError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
