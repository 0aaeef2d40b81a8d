"""Buses for the tests of the mesh."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from services.mesh.bus import Bus
from services.mesh.clock import SystemClock
from services.mesh.memory_broker import MemoryBroker
from services.mesh.memory_bus import MemoryBus
from services.mesh.nats_bus import connect

Connect = Callable[..., Awaitable[Bus]]
_runs = itertools.count(1)


@pytest.fixture
def run() -> str:
    """A run that no other test uses."""
    return f"r-{next(_runs)}"


@pytest.fixture(params=["memory", "nats"])
async def connected(request: pytest.FixtureRequest, run: str) -> AsyncIterator[Connect]:
    """Makes buses of one run, as several services would be connected to one broker; all are closed at the end."""
    made: list[Bus] = []
    if request.param == "memory":
        broker = MemoryBroker(SystemClock())

        async def another(name: str = "test") -> Bus:
            made.append(MemoryBus(broker, run, name=name))
            return made[-1]
    else:
        server = request.getfixturevalue("nats_server")

        async def another(name: str = "test") -> Bus:
            made.append(await connect(server.url, run, name=name))
            return made[-1]

    yield another
    for bus in made:
        await bus.close()


@pytest.fixture
async def bus(connected: Connect) -> Bus:
    """One bus of an opened run."""
    opened = await connected()
    await opened.open_run()
    return opened
