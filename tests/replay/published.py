"""A recorded log on a real nats-server: published again, event by event, as if the run went on.

Stored times are new, so a log fits whose decisions say no time: one without timers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from replay.logfile import read
from schemas import streams
from services.cli.places import Places
from services.mesh.bus import Stored
from services.mesh.nats_bus import IN_FLIGHT, NatsBus, connect
from services.mesh.processes import Mesh
from services.mesh.server import NatsServer
from tests.golden.simulated import SIMULATED

LOG = SIMULATED / "A3.gyre"
"""Without timers."""


@asynccontextmanager
async def opened(server: NatsServer, run: str, state: Path) -> AsyncIterator[NatsBus]:
    """The run's streams, and its folder as `gyre open` leaves it."""
    _folder(state, Mesh(run=run, supervisor=0, supervisor_created=0.0, nats=server.url))
    async with await connect(server.url, run, name="publisher") as bus:
        await bus.open_run()
        yield bus


async def publish(bus: NatsBus, messages: Sequence[Stored]) -> None:
    """One connection's publishes are stored in the order in which they were begun; so some are on their way together."""
    log = streams.log_stream(bus.run)
    for some in batched(messages, IN_FLIGHT):
        stored = [bus.publish(log, each.subject, each.data, msg_id=each.msg_id) for each in some]
        assert await asyncio.gather(*stored) == [each.seq for each in some]


def batched(messages: Sequence[Stored], size: int) -> list[Sequence[Stored]]:
    return [messages[begin : begin + size] for begin in range(0, len(messages), size)]


async def stopped(state: Path, *, events: int = 0, path: Path = LOG) -> None:
    """The state folder of a run whose mesh was stopped: after so many events, or at its end."""
    log = read(path)
    server = NatsServer(Places(state).nats)
    await server.start_async()
    async with opened(server, log.manifest.run, state) as bus:
        await publish(bus, list(log.messages())[: events or None])
    await server.stop_async()
    _folder(state, Mesh(run=log.manifest.run, supervisor=1, supervisor_created=0.0, nats="", nats_pid=1, ended=True))


def _folder(state: Path, mesh: Mesh) -> None:
    folder = Places(state).run(mesh.run)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "secret").touch()
    (folder / "mesh.json").write_bytes(msgspec.json.encode(mesh))
