"""An operator's wishes: events in the log, or an error that says why not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from schemas import events as e
from schemas import streams
from schemas.config import Config
from schemas.errors import ConfigError, GyreError
from schemas.units import Value
from services.cli import operator_commands as operator
from services.cli.places import Places
from services.cli.plan import added_specs
from services.mesh.bus import Bus
from services.mesh.clock import SystemClock
from services.mesh.codec import decode
from services.mesh.nats_bus import connect
from services.mesh.publisher import Publisher
from services.mesh.server import NatsServer

RUN = "r-20260102-0304-5f3a"


@pytest.fixture
async def opened(tmp_path: Path, config: Config) -> AsyncIterator[Path]:
    """A state folder with one run whose mesh is not up."""
    places = Places(tmp_path / "state")
    places.run(RUN).mkdir(parents=True)
    with NatsServer(places.nats) as server:
        bus = await connect(server.url, RUN, name="test")
        await bus.open_run()
        await say(bus, "run.started", e.RunStarted(seed=0, config=config, tasks=[], code="test"))
        await join(bus, 2)
        await bus.close()
    yield places.root


async def say(bus: Bus, kind: str, data: Value) -> None:
    publisher = Publisher(bus=bus, clock=SystemClock(), run=RUN, owner="operator", instance="operator")
    await publisher.say(kind, RUN, data, id=f"{RUN}.{kind}")


async def join(bus: Bus, index: int) -> None:
    rollout = Publisher(bus=bus, clock=SystemClock(), run=RUN, owner="rollout", instance=f"rollout-cell-{index}")
    joined = e.CellJoined(index=index, capacity=4, url="", engine="scripted", version=0, capabilities=[])
    await rollout.say("cell.joined", f"cell-{index}", joined, id=f"{RUN}.cell-{index}.joined")


async def kinds(state: Path) -> list[tuple[str, str]]:
    with NatsServer(Places(state).nats) as server:
        bus = await connect(server.url, RUN, name="test")
        log = streams.log_stream(RUN)
        found = [decode(stored) async for stored in bus.read_range(log, 0, await bus.last_seq(log))]
        await bus.close()
    return [(event.kind, event.entity) for event in found]


async def test_every_wish_is_an_event(opened: Path) -> None:
    for command in (
        lambda: operator.pause_command(RUN, state=opened, json=True),
        lambda: operator.resume_command(RUN, state=opened, json=False),
        lambda: operator.drain_command("cell-2", RUN, state=opened, json=True),
        lambda: operator.add_command("cell-2", RUN, state=opened, json=False),
        lambda: operator.pause_command(RUN, state=opened, json=True),
        lambda: operator.add_command(None, RUN, state=opened, json=True),
        lambda: operator.add_command("cell-4", RUN, state=opened, json=True),
    ):
        assert await asyncio.to_thread(command) == 0
    assert (await kinds(opened))[2:] == [
        ("run.paused", RUN),
        ("run.resumed", RUN),
        ("cell.withdrawn", "cell-2"),
        ("cell.reinstated", "cell-2"),
        ("run.paused", RUN),
        ("cell.added", "cell-3"),
        ("cell.added", "cell-4"),
    ]


async def test_a_cell_that_was_added_can_be_drained_once_it_has_joined(opened: Path) -> None:
    for cell in ("cell-3", "cell-4"):
        await asyncio.to_thread(operator.add_command, cell, RUN, state=opened, json=True)
    with pytest.raises(GyreError, match="cell-4 has not joined"):
        await asyncio.to_thread(operator.drain_command, "cell-4", RUN, state=opened, json=True)
    with NatsServer(Places(opened).nats) as server:
        bus = await connect(server.url, RUN, name="test")
        await join(bus, 4)
        await bus.close()
    await asyncio.to_thread(operator.drain_command, "cell-4", RUN, state=opened, json=True)
    await asyncio.to_thread(operator.add_command, "cell-4", RUN, state=opened, json=True)
    assert (await kinds(opened))[-2:] == [("cell.withdrawn", "cell-4"), ("cell.reinstated", "cell-4")]


def test_an_added_cell_is_an_engine_and_a_trainer_where_all_cells_train(config: Config, tmp_path: Path) -> None:
    def added(trainable: int) -> list[str]:
        cells = msgspec.structs.replace(config.cells, count=3, trainable=trainable)
        grown = msgspec.structs.replace(config, cells=cells)
        return [spec.name for spec in added_specs(grown, "cell-4", run=RUN, url="", state=tmp_path, here=tmp_path)]

    assert added(3) == ["rollout-cell-4", "trainer-cell-4"]
    assert added(2) == ["rollout-cell-4"]


async def test_a_wish_that_nobody_can_follow_is_an_error(opened: Path) -> None:
    with pytest.raises(ConfigError, match="cell-0 is the core"):
        await asyncio.to_thread(operator.drain_command, "cell-0", RUN, state=opened, json=True)
    with pytest.raises(ConfigError, match="no cell 'cell-9'"):
        await asyncio.to_thread(operator.add_command, "cell-9", RUN, state=opened, json=True)
    with NatsServer(Places(opened).nats) as server:
        bus = await connect(server.url, RUN, name="test")
        await say(bus, "run.finished", e.RunFinished(steps=0, reason="stopped"))
        await bus.close()
    with pytest.raises(GyreError, match="is over"):
        await asyncio.to_thread(operator.pause_command, RUN, state=opened, json=True)
