"""`gyre up`, `gyre down`, `gyre status` as commands."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from schemas.config_file import load
from services.cli import background
from services.cli.output import quiet_logs, say, say_json, table
from services.cli.places import Places


def up_command(file: Path, overrides: list[str], *, state: Path, json: bool, new: bool = False) -> int:
    # Decoded here as well: a mistake is told at once and not through a log.
    load(file, overrides)

    def tell(text: str) -> None:
        print(text, file=sys.stderr, flush=True)  # noqa: T201

    mesh = background.up(file, Places(state), overrides, tell=tell, new=new)
    if json:
        say_json({"run": mesh.run, "supervisor": mesh.supervisor, "nats": mesh.nats})
    else:
        say(f"run {mesh.run} is up; see it with `gyre status`, end it with `gyre down`")
    return 0


def down_command(*, state: Path, json: bool) -> int:
    pid = background.down(Places(state))
    if json:
        say_json({"ended": pid})
    else:
        say(
            f"process {pid} and its services ended; `gyre up FILE` goes on with its run" if pid else "nothing runs here"
        )
    return 0


def status_command(run: str | None, *, state: Path, json: bool) -> int:
    quiet_logs()
    places = Places(state)
    found = asyncio.run(background.status(places, places.chosen(run)))
    if json:
        say_json(found)
        return 0
    stands = "up" if found.up else "over" if found.finished else "stopped; `gyre run FILE` goes on with it"
    say(f"run {found.run} is {stands}; {found.folder}")
    if found.up:
        say(
            f"event bus {found.nats}, "
            + (f"supervisor {found.supervisor}" if found.supervisor else "services kept by others")
        )
        rows = [("service", "state", "pid", "restarts", "health")]
        rows += [(s.name, s.state, str(s.pid), str(s.restarts), s.health) for s in found.services]
        for line in table(rows):
            say(f"  {line}")
        say(f"waterlevel {found.waterlevel}, capacity {found.capacity}")
        say("roles " + ", ".join(f"{name} {role}" for name, role in found.roles.items()))
    for line in table([(name, "-" if value is None else f"{value:g}") for name, value in found.figures.items()]):
        say(f"  {line}")
    return 0
