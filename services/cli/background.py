"""A mesh in the background: `gyre up`, `gyre down`, `gyre status`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import msgspec

from schemas.errors import GyreError
from services.cli.figures import Figure, figures
from services.cli.logs import read_progress
from services.cli.places import Places
from services.mesh.processes import Mesh, Process, is_alive, last_line, read_mesh

UP_LOG = "up.log"
POLL_S = 0.2
PROBE_S = 2.0
READY = "ready"
DOWN_S = 90.0


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """One service as it is now."""

    name: str
    state: str
    pid: int
    restarts: int
    health: str
    """`ready`, the reason why not, or `gone`."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    up: bool
    supervisor: int
    nats: str
    folder: str
    finished: str
    """How the run ended; empty while it goes on or could."""
    services: list[Health]
    figures: dict[str, Figure]
    waterlevel: int = 0
    capacity: int = 0
    roles: dict[str, str] = {}


def up(file: Path, places: Places, overrides: list[str], *, tell: Callable[[str], None], new: bool = False) -> Mesh:
    """Start the run in a session of its own and wait until its services were started.

    Raises GyreError with its last words when it ends before that.
    """
    log = places.root / UP_LOG
    command = [sys.executable, "-m", "services.cli", "run", str(file), "--state", str(places.root)]
    if new:
        command.append("--new")
    for override in overrides:
        command += ["--set", override]
    began = time.time()
    with places.new_log(UP_LOG) as out:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
    tell(f"starting in the background, pid {child.pid}; its output is in {log}")
    while child.poll() is None:
        mesh = places.live()
        if mesh and mesh.supervisor == child.pid and mesh.services and _all_began(mesh):
            return mesh
        time.sleep(POLL_S)
    raise GyreError(
        f"ended with {child.returncode} after {time.time() - began:.0f} s: {_why(log)}",
        where=str(log),
        remedy="read that file, correct the cause and start again",
    )


def down(places: Places) -> int:
    """End what runs from this folder and wait for it. Returns its pid, 0 when nothing ran."""
    holder = places.holder()
    if holder is None:
        return 0
    os.kill(holder.pid, signal.SIGTERM)
    deadline = time.monotonic() + DOWN_S
    while is_alive(holder.pid, holder.created):
        if time.monotonic() > deadline:
            raise GyreError(
                f"process {holder.pid} does not end",
                where=str(places.root),
                remedy=f"look at its services' logs; kill -9 {holder.pid} ends it by force and its services follow",
            )
        time.sleep(POLL_S)
    return holder.pid


async def status(places: Places, run: str) -> Status:
    """Processes, their health, and how far the run is."""
    folder = places.run(run)
    mesh = read_mesh(folder)
    if mesh is None:
        raise GyreError(f"{run} never had a mesh", where=str(folder), remedy="start a run with `gyre run FILE`")
    progress = await read_progress(places, run)
    urls = progress.services
    if mesh.supervisor:
        up = not mesh.ended and is_alive(mesh.supervisor, mesh.supervisor_created)
        probes = [_health(process, urls.get(process.name, "")) for process in mesh.services]
    else:
        # Services that others keep: of their processes we know only what they said.
        up = not progress.finished
        probes = [_answers(name, url) for name, url in sorted(urls.items())]
    return Status(
        run=run,
        up=up,
        supervisor=mesh.supervisor if up else 0,
        nats=mesh.nats if up else "",
        folder=str(folder),
        finished=progress.finished,
        services=list(await asyncio.gather(*probes)),
        figures=figures(progress, peak_rss_bytes=mesh.peak_rss_bytes),
        waterlevel=progress.waterlevel,
        capacity=progress.capacity,
        roles={name: cell.phase or cell.role for name, cell in sorted(progress.cells.items())},
    )


async def _health(process: Process, url: str) -> Health:
    if not is_alive(process.pid, process.created):
        health = "gone"
    elif not url:
        health = "starting"
    else:
        health = await asyncio.to_thread(probe, url)
    return Health(name=process.name, state=process.state, pid=process.pid, restarts=process.restarts, health=health)


async def _answers(name: str, url: str) -> Health:
    return Health(name=name, state="joined", pid=0, restarts=0, health=await asyncio.to_thread(probe, url))


def probe(url: str) -> str:
    """What a service answers to `/readyz`: `ready`, the reason why not, or that it doesn't answer. Blocks."""
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=PROBE_S) as answer:
            body = answer.read()
    except urllib.error.HTTPError as error:
        with error:
            body = error.read()
    except OSError as error:
        return f"does not answer: {error}"
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(body, type=dict[str, str]).get("status", "unknown")
    return "unknown"


def _all_began(mesh: Mesh) -> bool:
    return all(process.state != "starting" for process in mesh.services)


def _why(log: Path) -> str:
    """What a command of ours said last: an error's first line, not its remedy."""
    lines = log.read_text(errors="replace").splitlines()
    for index, line in enumerate(lines):
        if line.startswith("gyre: "):
            return " ".join(each.strip() for each in lines[index:]).removeprefix("gyre: ")
    return last_line(log) or "it said nothing"
