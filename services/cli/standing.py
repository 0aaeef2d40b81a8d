"""Runs whose services others keep: one container or unit each, from compose or systemd.

    gyre open ──> run.started, mesh.json ──> every `gyre service` without --run takes it ... run.finished
    gyre open ──> the next run           ──> the services leave the old one, are started again, and take it

Invariants
- one such run of a state folder is open at a time: to open again while it goes on answers its id and changes nothing;
- its mesh.json names no supervisor, and appears after `run.started` is stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from schemas import ids
from schemas.config import Config
from schemas.units import TaskRef
from services.cli.launch import begin
from services.cli.places import Places
from services.mesh import operators
from services.mesh.clock import SystemClock
from services.mesh.nats_bus import connect
from services.mesh.processes import Mesh, read_mesh
from services.mesh.service import Context, Serve

POLL_S = 1.0


def newest(places: Places) -> str | None:
    """The run that was opened last for services that others keep."""
    kept = [path.parent for path in places.runs.glob("r-*/mesh.json") if not _supervised(path.parent)]
    return max(kept, key=lambda folder: (folder / "secret").stat().st_mtime_ns).name if kept else None


def _supervised(folder: Path) -> bool:
    mesh = read_mesh(folder)
    return mesh is None or mesh.supervisor != 0


async def open_or_find(
    config: Config, *, tasks: list[TaskRef], held_out: Sequence[TaskRef] = (), places: Places, url: str
) -> tuple[str, bool]:
    """The open run's id, and whether it was opened just now. The caller holds the state folder."""
    found = newest(places)
    if found is not None and not await is_over(found, url):
        return found, False
    run = ids.run_id(datetime.now(UTC), secrets.token_hex(2))
    bus = await connect(url, run, name=f"gyre/{run}/operator")
    try:
        publisher = operators.publisher(bus, clock=SystemClock(), run=run)
        folder = places.run(run)
        await begin(config, tasks=tasks, held_out=held_out, folder=folder, bus=bus, publisher=publisher)
    finally:
        await bus.close()
    mesh = Mesh(run=run, supervisor=0, supervisor_created=0.0, nats=url)
    new = places.run(run) / "mesh.json.new"
    new.write_bytes(msgspec.json.format(msgspec.json.encode(mesh)))
    new.replace(new.with_suffix(""))
    return run, True


async def is_over(run: str, url: str) -> bool:
    """Whether `run.finished` was said. Raises EnvironmentMissing when the event bus doesn't answer."""
    bus = await connect(url, run, name=f"gyre/{run}/reader")
    try:
        return await operators.is_over(bus, run)
    finally:
        await bus.close()


async def wait_for_run(places: Places, url: str) -> str:
    """The open run, as soon as there is one."""
    over: str | None = None
    while True:
        found = newest(places)
        if found is not None and found != over:
            if not await is_over(found, url):
                return found
            over = found
        await asyncio.sleep(POLL_S)


def until_replaced(serve: Serve, places: Places) -> Serve:
    """`serve` that also returns once a newer run was opened: whoever keeps the service starts it again, for that run."""

    async def replaced(run: str) -> None:
        while newest(places) == run:
            await asyncio.sleep(POLL_S)

    async def serving(context: Context) -> None:
        work = asyncio.ensure_future(serve(context))
        newer = asyncio.create_task(replaced(context.run))
        try:
            await asyncio.wait({work, newer}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            else:
                context.log.info("a newer run was opened")
        finally:
            newer.cancel()
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work

    return serving
