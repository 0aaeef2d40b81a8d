"""`gyre service NAME`: one service of a run in this process."""

from __future__ import annotations

import asyncio
import importlib
import os
from pathlib import Path

from schemas.errors import ConfigError
from services.cli.places import Places
from services.cli.plan import SERVICES
from services.mesh import host as mesh_host
from services.mesh.processes import end, end_with_parent
from services.mesh.service import Serve, configure_logging, open_context, run_service


def service_command(
    name: str, *, run: str | None, nats: str, state: Path, here: Path, cell: str, host: str, port: int
) -> int:
    """Serve until SIGTERM; without `run` the open run of the state folder, until a newer one is opened.

    `name` is a service, or with its cell or number an instance such as rollout-cell-1, rollout-pool-0 or proxy-1. Raises
    ConfigError for another."""
    service, dash, instance = name.partition("-")
    if service not in SERVICES:
        raise ConfigError(f"no service is called {name!r}", remedy=f"choose from {', '.join(SERVICES)}")
    if dash:
        cell = instance
    # What this service starts has to know it too.
    os.environ[mesh_host.VARIABLE] = host
    configure_logging()
    end_with_parent()
    # The services that hold a model load what only they need.
    module = importlib.import_module(f"services.{service}.service")
    code = asyncio.run(
        _serve(module.serve, service, run=run, nats=nats, places=Places(state), here=here, cell=cell, port=port)
    )
    return end(code)


async def _serve(
    serve: Serve, service: str, *, run: str | None, nats: str, places: Places, here: Path, cell: str, port: int
) -> int:
    if run is None:
        from services.cli.standing import until_replaced, wait_for_run

        run = await wait_for_run(places, nats)
        serve = until_replaced(serve, places)
    context = await open_context(
        url=nats,
        run=run,
        service=service,
        folder=places.run(run),
        cache=places.cache,
        here=here.absolute(),
        cell=cell,
        port=port,
    )
    return await run_service(serve, context)
