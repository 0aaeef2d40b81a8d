"""`gyre service NAME`: one service of a run in this process."""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path

from schemas.errors import ConfigError
from services.cli.places import Places
from services.cli.plan import SERVICES
from services.mesh.processes import end_with_parent
from services.mesh.service import Serve, configure_logging, open_context, run_service


def service_command(name: str, *, run: str, nats: str, state: Path, here: Path, cell: str) -> int:
    """Serve until SIGTERM. Raises ConfigError for a service that doesn't exist."""
    if name not in SERVICES:
        raise ConfigError(f"no service is called {name!r}", remedy=f"choose from {', '.join(SERVICES)}")
    configure_logging()
    end_with_parent()
    # The services that hold a model load what only they need.
    module = importlib.import_module(f"services.{name}.service")
    return asyncio.run(_serve(module.serve, name, run=run, nats=nats, places=Places(state), here=here, cell=cell))


async def _serve(serve: Serve, name: str, *, run: str, nats: str, places: Places, here: Path, cell: str) -> int:
    context = await open_context(
        url=nats, run=run, service=name, folder=places.run(run), cache=places.cache, here=here.absolute(), cell=cell
    )
    return await run_service(serve, context)
