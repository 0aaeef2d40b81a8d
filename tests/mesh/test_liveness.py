"""Who is probed, and when a process that doesn't answer is said to be lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from schemas import events as e
from services.mesh.clock import SystemClock
from services.mesh.codec import decode
from services.mesh.health import Health
from services.mesh.liveness import Tenancy, Watch
from services.mesh.memory_broker import MemoryBroker
from services.mesh.memory_bus import MemoryBus
from services.mesh.service import Context
from tests.facts import fact
from tests.mesh.contexts import context_of

RUN = "r-live"


def move(phase: Any, target: Any, epoch: int) -> e.CellRoleTransition:
    source = "rollout" if target == "train" else "train"
    return e.CellRoleTransition(phase=phase, source=source, target=target, epoch=epoch)


CELL_1 = e.CellJoined(index=1, capacity=8, url="", engine="scripted", version=0, capabilities=[])
WAY = [
    ("scheduler", move("decided", "train", 1), "rollout"),
    ("rollout", move("released", "train", 1), "trainer"),
    ("trainer", move("acquired", "train", 1), "trainer"),
    ("scheduler", move("completed", "train", 1), "trainer"),
    ("scheduler", move("decided", "rollout", 2), "trainer"),
    ("rollout", move("released", "train", 1), "trainer"),
    ("trainer", move("released", "rollout", 2), "rollout"),
    ("rollout", move("acquired", "rollout", 2), "rollout"),
    ("scheduler", move("completed", "rollout", 2), "rollout"),
    ("scheduler", move("decided", "train", 3), "rollout"),
    ("scheduler", move("failed", "train", 3), ""),
    ("scheduler", move("decided", "rollout", 4), "trainer"),
]


def test_of_two_processes_the_one_that_has_the_cell_is_awaited() -> None:
    looks: dict[str, Tenancy] = {"rollout": Tenancy(service="rollout"), "trainer": Tenancy(service="trainer")}

    def fold(seq: int, owner: str, kind: str, entity: str, data: Any) -> list[str]:
        for look in looks.values():
            look.fold(fact(seq, owner, kind, entity, data))
        return [service for service, look in looks.items() if look.awaited]

    fold(1, "rollout", "service.joined", "rollout-cell-1", e.ServiceJoined(url="http://r", pid=1))
    fold(2, "trainer", "service.joined", "trainer-cell-1", e.ServiceJoined(url="http://t", pid=2))
    assert fold(3, "rollout", "cell.joined", "cell-1", CELL_1) == ["rollout"]
    for seq, (owner, data, awaited) in enumerate(WAY, start=4):
        assert fold(seq, owner, "cell.role-transition", "cell-1", data) == ([awaited] if awaited else []), data
    lost = e.CellLost(service="trainer", process=2, reason="test")
    assert fold(90, "trainer", "cell.lost", "cell-1", lost) == []
    assert fold(91, "trainer", "service.joined", "trainer-cell-1", e.ServiceJoined(url="http://t", pid=3)) == [
        "trainer"
    ]
    over = e.RunFinished(steps=1, reason="steps_done")
    assert fold(99, "scheduler", "run.finished", RUN, over) == [], "who starts when a run is over does nothing"


class Answers(Health):
    """Health whose probes are answered by the test."""

    def __init__(self) -> None:
        super().__init__(service="scheduler", instance="scheduler")
        self.alive = True
        self.asked = asyncio.Event()

    async def answering(self, urls: Mapping[str, str], *, timeout_s: float) -> set[str]:
        assert urls == {"rollout-cell-1": "http://r"}
        self.asked.set()
        return {"rollout-cell-1"} if self.alive else set()


@pytest.fixture
async def context(tmp_path: Path) -> AsyncIterator[Context]:
    bus = MemoryBus(MemoryBroker(SystemClock()), RUN, name="test")
    await bus.open_run()
    yield context_of("scheduler", bus, tmp_path, health=Answers())
    await bus.close()


async def test_a_process_that_does_not_answer_is_lost_once(context: Context) -> None:
    health = context.health
    assert isinstance(health, Answers)
    watch = Watch(context, service="rollout", lost_s=0.05)
    watch.fold(fact(1, "rollout", "service.joined", "rollout-cell-1", e.ServiceJoined(url="http://r", pid=1)))
    watch.fold(fact(2, "rollout", "cell.joined", "cell-1", CELL_1))
    looking = asyncio.create_task(watch.run())
    await health.asked.wait()
    assert await context.bus.last_seq(f"LOG_{RUN}") == 0, "it answers"
    health.alive = False
    async with context.bus.read(f"LOG_{RUN}", 0) as reader:
        event = decode(await anext(reader))
    assert (event.kind, event.entity, event.owner) == ("cell.lost", "cell-1", "scheduler")
    assert (event.data.service, event.data.process) == ("rollout", 1)
    assert watch.tenancy.awaited == []
    # Another process of the cell is looked at anew.
    health.alive = True
    health.asked.clear()
    watch.fold(fact(3, "rollout", "service.joined", "rollout-cell-1", e.ServiceJoined(url="http://r", pid=2)))
    await health.asked.wait()
    looking.cancel()
    assert await context.bus.last_seq(f"LOG_{RUN}") == 1
