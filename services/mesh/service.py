"""What every service stands on: its identity, the bus, the clock, what it was configured with, and how it says things.

A service package has `service.py` with `async def serve(context: Context) -> None`, which runs until it is cancelled.
`run_service` makes the context, announces the service, serves, and leaves cleanly on SIGTERM or SIGINT.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import structlog

from schemas import streams
from schemas.config import Config
from schemas.envelope import Event
from schemas.errors import BusError, GyreError
from schemas.events import RunStarted, ServiceJoined, ServiceLeft
from schemas.units import Value
from services.mesh.bus import Bus
from services.mesh.clock import Clock, SystemClock
from services.mesh.codec import decode
from services.mesh.health import Health, HealthFace
from services.mesh.host import own_host
from services.mesh.publisher import Publisher, fenced, newest_process

ALONE_S = 2.0
"""How long another instance may take to answer."""
LEAVE_S = 5.0
"""How long a service that ends tries to say so."""
SNAPSHOT_EVERY = 500
"""Inputs of a decider between two snapshots: how much of the log is read again at most, after a life of so many."""
Serve = Callable[["Context"], Awaitable[None]]


class Context:
    """One service in one run. Everything it touches comes from here, so a test can hand it a memory bus."""

    def __init__(
        self,
        *,
        bus: Bus,
        clock: Clock,
        started: RunStarted,
        run: str,
        service: str,
        instance: str,
        folder: Path,
        cache: Path,
        here: Path,
        secret: bytes,
        cell: str = "",
        port: int = 0,
        health: HealthFace | None = None,
        pid: int = 0,
        snapshot_every: int = SNAPSHOT_EVERY,
    ) -> None:
        self.bus, self.clock, self.started = bus, clock, started
        self.config: Config = started.config
        self.run, self.service, self.instance, self.cell = run, service, instance, cell
        self.folder = folder
        """The run's own folder: logs, checkpoints, workspaces, database."""
        self.cache = cache
        """What runs share: the starting policy, generated tasks."""
        self.here = here
        """Folder of the configuration file."""
        self.secret = secret
        """Key of the executions' bearer tokens; never in an event."""
        self.host = own_host()
        """Where whatever this service offers to others listens, and what it tells them."""
        self.port = port
        """Port of its HTTP server, when whoever started it wants one; 0 leaves it to the service."""
        self.publisher = Publisher(bus=bus, clock=clock, run=run, owner=service, instance=instance)
        self.health: HealthFace = health or Health(service=service, instance=instance, host=self.host)
        self.pid = pid or os.getpid()
        """Tells the lives of one instance apart, as long as they are on one host."""
        self.snapshot_every = snapshot_every
        """Inputs between two snapshots of its decider, for a service that decides."""
        self.joined = 0
        """Sequence of the `service.joined` of this life; 0 until it is said."""
        self.log = structlog.get_logger(service=service, instance=instance)

    async def say(
        self,
        kind: str,
        entity: str,
        data: Value,
        *,
        id: str,
        causation: int = 0,
        claim: tuple[str, int] | None = None,
    ) -> int:
        """Publish one fact (see Publisher.say)."""
        return await self.publisher.say(kind, entity, data, id=id, causation=causation, claim=claim)

    async def events(self, after: int = 0, *, about: Sequence[str] = (), owner: str = "*") -> AsyncIterator[Event]:
        """LOG from `after` on, or what is `about` entities of these kinds and, where one is named, said by an `owner`:
        without end, decoded, in order, without gaps."""
        wanted = streams.about(self.run, *about, owner=owner) if about else None
        async for stored in self.bus.read(streams.log_stream(self.run), after, subject_filter=wanted):
            self.health.events.inc()
            self.health.read_to.set(stored.seq)
            yield decode(stored)

    async def history(self, *, about: Sequence[str] = ()) -> tuple[list[Event], int]:
        """Everything in LOG now, or what is `about` entities of these kinds, and the sequence to go on after: how a
        worker finds what it left undone."""
        end = await self.bus.last_seq(streams.log_stream(self.run))
        wanted = streams.about(self.run, *about) if about else None
        past = self.bus.read_range(streams.log_stream(self.run), 0, end, subject_filter=wanted)
        return [decode(stored) async for stored in past], end

    def path(self, name: str) -> Path:
        """A configured path: absolute, or relative to the cache."""
        path = Path(name)
        return path if path.is_absolute() else self.cache / path

    def tasks_folder(self, *, held_out: bool) -> Path:
        """Folder of the training tasks, or of the held-out ones."""
        return self.path(self.config.eval.path if held_out else self.config.tasks.path)


async def read_started(bus: Bus, run: str) -> RunStarted:
    """The event that began the run. Raises BusError when there is none."""
    found = await bus.last_for(streams.log_stream(run), streams.subject(run, "operator", "run.started", run))
    if found is None:
        raise BusError(f"run {run} was never started", remedy="start it with `gyre run FILE`")
    data = decode(found).data
    assert isinstance(data, RunStarted)
    return data


def configure_logging(level: str = "INFO") -> None:
    """One JSON line an event to standard error."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level)),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    # Libraries that log by themselves write to the same place.
    logging.basicConfig(level="WARNING", stream=sys.stderr)


async def run_service(serve: Serve, context: Context) -> int:
    """Serve until told to stop. Returns the process's exit code; an error is one logged line with its remedy."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    try:
        await serve_until(serve, context, stop)
    except GyreError as error:
        context.log.error("failed", what=str(error))
        return error.exit_code
    except Exception:
        context.log.exception("crashed")
        return 1
    finally:
        await context.health.stop()
        await context.bus.close()
    return 0


async def serve_until(serve: Serve, context: Context, stop: asyncio.Event) -> None:
    """Serve until `stop` is set, or the service ends by itself, and say that it left. Raises what the service raises, on
    its way out too."""
    work = asyncio.ensure_future(serve(context))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({work, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
    with contextlib.suppress(BusError, TimeoutError):
        async with asyncio.timeout(LEAVE_S):
            await context.say(
                "service.left",
                context.instance,
                ServiceLeft(reason="stopped"),
                # In a container every life has the same pid.
                id=f"{context.run}.{context.instance}.left.{context.pid}.{context.clock.now_us()}",
            )


async def alone(context: Context) -> None:
    """For a service that decides, before it joins: raises Fenced while another instance of it answers, so that two
    don't displace each other for ever. One that doesn't answer is displaced: it is gone, or will find out."""
    other = await newest_process(context.bus, context.run, context.instance)
    if other is not None and await context.health.answering({context.instance: other.url}, timeout_s=ALONE_S):
        raise fenced(context.service, context.run, other)


async def announce(context: Context, *, port: int = 0) -> str:
    """Start the service's HTTP server and say that it joined. Called by `serve` once its routes are added.

    `port` is what the service would like; `context.port` goes before it."""
    url = await context.health.start(port=context.port or port)
    context.joined = await context.say(
        "service.joined",
        context.instance,
        ServiceJoined(url=url, pid=context.pid),
        id=f"{context.run}.{context.instance}.joined.{context.pid}.{context.clock.now_us()}",
    )
    return url


async def rest(context: Context) -> None:
    """For a process that starts when its run is finished and that would load a model: it joins, says why it does nothing,
    and waits until it is told to end."""
    context.health.ready = lambda: ""
    await announce(context)
    context.log.info("the run is finished: nothing is loaded, nothing will be done")
    await asyncio.Event().wait()


async def open_context(
    *,
    url: str,
    run: str,
    service: str,
    folder: Path,
    cache: Path,
    here: Path,
    cell: str = "",
    port: int = 0,
) -> Context:
    """A context on a real bus, for the process of a service."""
    from services.mesh.nats_bus import connect

    instance = f"{service}-{cell}" if cell else service
    bus = await connect(url, run, name=f"gyre/{run}/{instance}")
    started = await read_started(bus, run)
    secret = (folder / "secret").read_bytes()
    return Context(
        bus=bus,
        clock=SystemClock(),
        started=started,
        run=run,
        service=service,
        instance=instance,
        folder=folder,
        cache=cache,
        here=here,
        secret=secret,
        cell=cell,
        port=port,
    )
