"""A run of its own for each test."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.mesh.bus import Bus
from services.mesh.clock import SystemClock
from services.mesh.memory_broker import MemoryBroker
from services.mesh.memory_bus import MemoryBus
from services.mesh.nats_bus import connect
from tests.trajectories.mesh import Mesh
from tests.trajectories.trees import config

_runs = itertools.count(1)


@pytest.fixture
async def mesh(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Mesh]:
    """On a memory bus, or on the real server where the test is parametrized with "nats"."""
    run = f"r-trajectories-{next(_runs)}"
    broker = MemoryBroker(SystemClock())

    async def another() -> Bus:
        if getattr(request, "param", "memory") == "nats":
            return await connect(request.getfixturevalue("nats_server").url, run, name="test")
        return MemoryBus(broker, run, name="test")

    made = Mesh(another, run, tmp_path, config())
    await made.begin()
    yield made
    await made.bus.close()
