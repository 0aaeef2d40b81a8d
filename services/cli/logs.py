"""Reading a run's log, whether its mesh is up or not.

While a mesh runs from the state folder its bus is used; else a server of our own is started on the store for as long as
the reading takes.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec

from replay.logfile import Manifest
from replay.logwriter import export
from schemas import streams
from schemas.envelope import Event
from schemas.errors import BusError, GyreError
from services.cli.places import Places
from services.cli.progress import Progress
from services.cli.projection import evolve
from services.mesh.bus import Bus, Stored
from services.mesh.codec import decode
from services.mesh.nats_bus import connect
from services.mesh.processes import read_mesh
from services.mesh.server import NatsServer


@contextlib.asynccontextmanager
async def open_log(places: Places, run: str) -> AsyncIterator[Bus]:
    """A bus on which the run's streams can be read. Raises GyreError when the log is nowhere."""
    mesh, live = read_mesh(places.run(run)), places.live()
    external = mesh is not None and mesh.nats_pid == 0
    server = None
    if mesh is not None and external:
        url = mesh.nats
    elif live is not None:
        url = live.nats
    else:
        server = NatsServer(places.nats)
        await server.start_async()
        url = server.url
    try:
        bus = await connect(url, run, name=f"gyre/{run}/reader")
        try:
            yield bus
        finally:
            await bus.close()
    finally:
        if server is not None:
            await server.stop_async()


async def export_run(places: Places, run: str, path: Path) -> Manifest:
    """The whole log, as it is now, into one file."""
    async with open_log(places, run) as bus:
        log = streams.log_stream(run)
        return await export(bus.read_range(log, 0, await log_end(bus, run)), path)


async def read_events(
    places: Places, run: str, *, follow: bool = False, kinds: list[str] | None = None
) -> AsyncGenerator[tuple[Stored, Event], None]:
    """Every event of the kinds (patterns such as `cell.*`), then with `follow` those to come until the run is over. Of a run
    that nobody keeps up none will come."""
    to_come = follow and places.goes_on(run)
    async with open_log(places, run) as bus, contextlib.aclosing(read_log(bus, run, follow=to_come)) as events:
        async for stored, event in events:
            if not kinds or any(fnmatchcase(event.kind, kind) for kind in kinds):
                yield stored, event


async def read_log(bus: Bus, run: str, *, follow: bool) -> AsyncGenerator[tuple[Stored, Event], None]:
    """Every event that is there now, then with `follow` those to come until the run is over."""
    log = streams.log_stream(run)
    async with bus.read(log, 0) if follow else bus.read_range(log, 0, await log_end(bus, run)) as reading:
        async for stored in reading:
            event = decode(stored)
            yield stored, event
            if follow and event.kind == "run.finished":
                return


async def read_progress(places: Places, run: str) -> Progress:
    """The projection over everything that is in the log now."""
    progress = Progress()
    async with contextlib.aclosing(read_events(places, run)) as events:
        async for _, event in events:
            evolve(progress, event)
    return progress


def event_line(event: Event, *, began_us: int) -> str:
    """One event as one line: sequence, seconds since the run began, kind, entity, owner, what it says."""
    raw = event.data if isinstance(event.data, msgspec.Raw) else msgspec.json.encode(event.data)
    text = bytes(raw).decode()
    if len(text) > 160:
        text = text[:160] + "..."
    seconds = (event.time_us - began_us) / 1e6
    return (
        f"{event.seq:6d} {seconds:9.3f}  {event.kind:24s} {event.entity:18s} {event.instance or event.owner:16s} {text}"
    )


async def log_end(bus: Bus, run: str) -> int:
    """Sequence of the last event. Raises GyreError when the store has no log of the run."""
    try:
        return await bus.last_seq(streams.log_stream(run))
    except BusError as error:
        raise GyreError(
            f"the log of {run} is not in this store: {error.what}",
            where="event bus",
            remedy="give the state folder of that run with --state DIR",
        ) from error
