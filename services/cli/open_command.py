"""`gyre open`: what `gyre run` does before it starts services, for services that others start."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from schemas.config_file import load
from schemas.errors import ConfigError
from services.cli import preflight
from services.cli.output import quiet_logs, say, say_json
from services.cli.places import Places
from services.cli.run_command import prepared
from services.cli.standing import open_or_find
from services.cli.view import open_view


def open_command(file: Path, overrides: list[str], *, nats: str, state: Path, json: bool) -> int:
    """Prints the run's id. Raises ConfigError when nobody says where the event bus is."""
    config, here, places = load(file, overrides), file.absolute().parent, Places(state)
    url = nats or config.bus.url
    if not url:
        raise ConfigError(
            "no event bus is named", where=str(file), remedy="give --nats URL, set GYRE_NATS, or set bus.url"
        )
    config = msgspec.structs.replace(config, bus=msgspec.structs.replace(config.bus, url=url))
    quiet_logs()
    preflight.environment(config, places)
    asyncio.run(preflight.event_bus(url))
    with places.hold(f"gyre open {file.name}"):
        view = open_view(quiet=False, json=json)
        try:
            prepared(config, here=here, places=places, view=view)
        finally:
            view.close()
        tasks, held_out = preflight.inputs(config, places)
        run, opened = asyncio.run(open_or_find(config, tasks=tasks, held_out=held_out, places=places, url=url))
    if json:
        say_json({"run": run, "opened": opened})
    else:
        say(f"run {run} {'is open' if opened else 'goes on'}")
    return 0
