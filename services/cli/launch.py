"""A run from its first process to its last.

    bus up --> run.started said --> services up --> follow LOG ... run.finished or a signal --> services down --> bus down
           `-> a run that is not finished: run.continued said -^

Invariants
- what fails before `run.started` leaves no process and no run folder behind;
- however it ends, the services end in order, bounded in time, and the bus last;
- a run that is stopped, or whose processes are gone, stays open: only the scheduler's `run.finished` ends it, or a
  person who begins another.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from schemas import ids, streams
from schemas.config import Config
from schemas.errors import EnvironmentMissing, Fenced, GyreError
from schemas.events import RunStarted
from schemas.flags import NEWEST
from schemas.units import TaskRef
from services.cli.chaos import Chaos
from services.cli.figures import Summary, summarize
from services.cli.places import Places
from services.cli.plan import added_specs, service_specs
from services.cli.preflight import code_identity
from services.cli.progress import Progress
from services.cli.projection import evolve
from services.cli.resuming import open_run
from services.cli.view import View
from services.mesh import operators
from services.mesh.bus import Bus
from services.mesh.clock import SystemClock
from services.mesh.codec import decode
from services.mesh.nats_bus import connect
from services.mesh.processes import Process, last_line, read_mesh
from services.mesh.publisher import Publisher
from services.mesh.server import NatsServer
from services.mesh.supervise import Spec, Supervisor
from services.mesh.tokens import SECRET_BYTES

TICK_S = 2.0
SETTLE_S = 15.0
"""How long executions that still run at the end may take to be reported as cancelled."""
GRACE_S = 10.0
SERVER_RESTARTS = 5
Plan = Callable[[str, str], list[Spec]]
"""(run, url of the bus) to the services to start."""


Grow = Callable[[str], Awaitable[None]]
"""Starts the services of a cell that was added to the run, before or now."""


class GivenUp(GyreError):
    """Something that the run needs failed until it was given up: what that was, and what the run came to before."""

    def __init__(self, error: GyreError, summary: Summary) -> None:
        super().__init__(error.what, where=error.where, remedy=error.remedy)
        self.exit_code = error.exit_code
        self.summary = summary


class Stops:
    """What asks a run to end: the first signal politely, the second at once."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.signum = 0

    def on_signal(self, signum: int) -> None:
        if self.asked.is_set():
            # Children are told by the kernel; the bus keeps what it acknowledged.
            os._exit(128 + signum)
        self.signum = signum
        self.asked.set()

    @contextlib.contextmanager
    def listening(self) -> Iterator[Stops]:
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        for signum in signals:
            loop.add_signal_handler(signum, self.on_signal, signum)
        try:
            yield self
        finally:
            for signum in signals:
                loop.remove_signal_handler(signum)


async def launch(
    config: Config,
    *,
    tasks: list[TaskRef],
    held_out: Sequence[TaskRef] = (),
    here: Path,
    places: Places,
    view: View,
    plan: Plan | None = None,
    settle_s: float = SETTLE_S,
    chaos_seed: int | None = None,
    new: bool = False,
) -> tuple[Summary, int]:
    """Start the mesh, follow it to its end, take it down. Returns the summary and the signal that stopped it, or 0.

    Goes on with the newest run when that isn't finished, unless `new` (see services.cli.resuming).
    With `chaos_seed` every process is killed once meanwhile (see services.cli.chaos).
    Raises EnvironmentMissing when the bus doesn't come up, GivenUp when it or a service keeps failing.
    """
    with Stops().listening() as stops:
        async with _bus_server(config, places, view) as (url, server):
            known = await open_run(config, tasks=tasks, held_out=held_out, places=places, url=url, new=new, view=view)
            run = known or ids.run_id(datetime.now(UTC), secrets.token_hex(2))
            folder = places.run(run)
            before = read_mesh(folder)
            bus = await connect(url, run, name=f"gyre/{run}/operator")
            try:
                if known is None:
                    publisher = operators.publisher(bus, clock=SystemClock(), run=run)
                    await begin(config, tasks=tasks, held_out=held_out, folder=folder, bus=bus, publisher=publisher)
                supervisor = Supervisor(
                    run=run,
                    folder=folder,
                    nats=url,
                    nats_pid=server.pid if server else 0,
                    on_change=lambda process: _tell(view, process),
                    peak_rss_bytes=before.peak_rss_bytes if before else 0,
                )
                progress = Progress()
                specs = (plan or _plan(config, places, here))(run, url)
                grow = _grow(config, places, here, run, url, supervisor) if plan is None else None
                chaos = None
                if chaos_seed is not None:
                    names = [spec.name for spec in specs]
                    chaos = Chaos(seed=chaos_seed, config=config, services=names, own_bus=server is not None)
                failure: GyreError | None = None
                try:
                    await _follow(bus, run, supervisor, specs, server, progress, stops, view, settle_s, chaos, grow)
                except GyreError as error:
                    failure = error
                finally:
                    view.note("stopping services")
                    supervisor.rss_bytes()
                    await supervisor.stop(grace_s=GRACE_S)
                summary = summarize(
                    progress,
                    peak_rss_bytes=supervisor.peak_rss_bytes,
                    crashes=supervisor.crashes,
                    killed=chaos.killed if chaos else (),
                    kills=len(chaos.plan) if chaos else None,
                )
                (folder / "summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(summary)))
                if failure is not None:
                    raise GivenUp(failure, summary) from failure
                return summary, stops.signum
            finally:
                await bus.close()


def _plan(config: Config, places: Places, here: Path) -> Plan:
    return lambda run, url: service_specs(config, run=run, url=url, state=places.root, here=here)


def _grow(config: Config, places: Places, here: Path, run: str, url: str, supervisor: Supervisor) -> Grow:
    async def grow(cell: str) -> None:
        for spec in added_specs(config, cell, run=run, url=url, state=places.root, here=here):
            await supervisor.start(spec)

    return grow


@contextlib.asynccontextmanager
async def _bus_server(config: Config, places: Places, view: View) -> AsyncIterator[tuple[str, NatsServer | None]]:
    if config.bus.url:
        yield config.bus.url, None
        return
    view.note("starting the event bus")
    server = NatsServer(places.nats, port=config.bus.port)
    await server.start_async()
    try:
        yield server.url, server
    finally:
        await server.stop_async()


async def begin(
    config: Config,
    *,
    tasks: list[TaskRef],
    held_out: Sequence[TaskRef] = (),
    folder: Path,
    bus: Bus,
    publisher: Publisher,
) -> int:
    """Folder, secret, streams, and the event that begins the run: all or nothing. Returns that event's sequence."""
    try:
        folder.mkdir(parents=True)
        descriptor = os.open(folder / "secret", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as secret:
            secret.write(secrets.token_bytes(SECRET_BYTES))
        await bus.open_run()
        started = RunStarted(
            seed=config.seed, config=config, tasks=tasks, held_out=list(held_out), code=code_identity(), flags=NEWEST
        )
        return await publisher.say("run.started", publisher.run, started, id=f"{publisher.run}.started")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


async def _follow(
    bus: Bus,
    run: str,
    supervisor: Supervisor,
    specs: list[Spec],
    server: NatsServer | None,
    progress: Progress,
    stops: Stops,
    view: View,
    settle_s: float,
    chaos: Chaos | None,
    grow: Grow | None,
) -> None:
    reader = asyncio.create_task(_read(bus, run, progress, view, settle_s, chaos, grow))
    tick = asyncio.create_task(_tick(supervisor, server, view, SERVER_RESTARTS + (chaos is not None)))
    asked = asyncio.create_task(stops.asked.wait())
    tasks: list[asyncio.Task[Any]] = [reader, tick, asked]
    try:
        view.note(f"starting {len(specs)} services; the first step is trained when the first executions have ended")
        for spec in specs:
            await supervisor.start(spec)
        if chaos is not None:
            tasks.append(asyncio.create_task(chaos.run(supervisor, server, bus, view.note)))
        waiting: list[asyncio.Future[Any]] = [*tasks, supervisor.failed]
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if not progress.finished:
            view.note("asked to stop" if asked in done else "something keeps failing: stopping")
        for task in done:
            task.result()
        if progress.finished and not reader.done():
            await _settle(reader, settle_s)
    finally:
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _settle(reader: asyncio.Task[None], settle_s: float) -> None:
    """Wait until nothing runs any more, at most `settle_s`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(settle_s):
            await reader


async def _read(
    bus: Bus,
    run: str,
    progress: Progress,
    view: View,
    settle_s: float,
    chaos: Chaos | None,
    grow: Grow | None,
) -> None:
    """Until the run is finished and no harness runs any more."""
    overdue: float | None = None
    past = await bus.last_seq(streams.log_stream(run))
    reading = bus.read(streams.log_stream(run), 0)
    loop = asyncio.get_running_loop()
    async with reading:
        while not (progress.finished and not progress.running):
            if progress.finished and overdue is None:
                overdue = loop.time() + settle_s
            try:
                async with asyncio.timeout_at(overdue):
                    stored = await anext(reading)
            except TimeoutError:
                return
            event = decode(stored)
            evolve(progress, event)
            # What an earlier mesh did is shown at once.
            if event.seq >= past:
                view.update(progress)
            if event.kind == "cell.added" and grow is not None:
                await grow(event.entity)
            if chaos is not None:
                chaos.observe(event)


async def _tick(supervisor: Supervisor, server: NatsServer | None, view: View, limit: int) -> None:
    """Memory, and the event bus, which is restarted when it dies: its store holds every acknowledged event."""
    restarts = 0
    while True:
        await asyncio.sleep(TICK_S)
        view.memory(supervisor.rss_bytes())
        if server is None or server.running:
            continue
        restarts += 1
        if restarts > limit:
            raise EnvironmentMissing(
                f"nats-server ended {restarts} times", where=str(server.log_file), remedy="read that log"
            )
        view.note("the event bus ended; starting it again")
        await server.start_async()
        supervisor.bus_is(server.pid)


def _tell(view: View, process: Process) -> None:
    if process.state == "waiting":
        # Killed by a signal, it had no say.
        said = last_line(Path(process.log)) if (process.exit_code or 0) > 0 else ""
        then = "it looks again later" if process.exit_code == Fenced.exit_code else "it starts again"
        view.note(f"{process.name} ended with {process.exit_code}{f' ({said})' if said else ''}; {then}")
    elif process.state == "running" and process.restarts:
        view.note(f"{process.name} runs again (pid {process.pid})")
