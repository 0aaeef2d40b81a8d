"""What a service says is stored once, however late an attempt arrives and whatever the server's clock did meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from schemas import events as e
from schemas import streams
from schemas.units import Value
from services.mesh.bus import DUPLICATE_WINDOW_S
from services.mesh.clock import MICROSECONDS
from services.mesh.memory_broker import MemoryBroker
from services.mesh.memory_bus import MemoryBus, PublishFate
from services.mesh.publisher import Publisher
from tests.mesh.fates import in_turn
from tests.mesh.virtual_clock import VirtualClock

RUN = "r-1"
LATE, ANSWERED = PublishFate.LATE, PublishFate.ANSWERED

REPEATED = ("rollout", "weights.published", "cell-1", e.WeightsPublished(version=1, bytes=1, seconds=1.0, transport="tcp"))
"""A fact that a service without a fence may say again and again."""
ONCE = ("proxy", "execution.sealed", "e-000000.00", e.ExecutionSealed(attempt=0, records=0, last_record=0, digest=""))
ACQUIRED = e.CellRoleTransition(
    phase="acquired", source="train", target="rollout", epoch=2, seconds=1.0, version=1
)
Said = tuple[str, str, str, Value]


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(start_us=1_000_000)


@pytest.fixture
async def bus(clock: VirtualClock) -> MemoryBus:
    bus = MemoryBus(MemoryBroker(clock), RUN, name="test")
    await bus.open_run()
    return bus


async def ids(bus: MemoryBus) -> list[str]:
    log = streams.log_stream(RUN)
    return [stored.msg_id async for stored in bus.read_range(log, 0, await bus.last_seq(log))]


def publisher(bus: MemoryBus, clock: VirtualClock, owner: str) -> Publisher:
    return Publisher(bus=bus, clock=clock, run=RUN, owner=owner, instance=owner)


@pytest.mark.parametrize("said", [REPEATED, ONCE], ids=["repeated", "once"])
@pytest.mark.parametrize("fenced", [False, True])
async def test_an_attempt_that_arrives_after_the_window_is_refused(
    bus: MemoryBus, clock: VirtualClock, said: Said, fenced: bool
) -> None:
    owner, kind, entity, data = said
    service = publisher(bus, clock, owner)
    if fenced:
        await service.take_fence()
    bus.publish_fate = in_turn(LATE, LATE)
    await service.say(kind, entity, data, id="a")
    clock.advance(2 * int(DUPLICATE_WINDOW_S * MICROSECONDS))
    bus.release_late()
    assert await ids(bus) == ["a"]


@pytest.mark.parametrize("kind", ["weights.published", "cell.role-transition"])
async def test_what_an_earlier_process_said_is_refused_once_the_next_one_has_joined(
    bus: MemoryBus, clock: VirtualClock, kind: str
) -> None:
    owner, _, entity, data = REPEATED
    last_words = data if kind == "weights.published" else ACQUIRED
    dead = MemoryBus(bus.broker, RUN, name="dead")
    dead.publish_fate = lambda subject, msg_id: LATE
    words = asyncio.create_task(publisher(dead, clock, owner).say(kind, entity, last_words, id="dead"))
    while "1 late" not in repr(dead):
        await asyncio.sleep(0)
    words.cancel()
    joined = e.ServiceJoined(url="http://next", pid=2)
    await publisher(bus, clock, owner).say("service.joined", "rollout-cell-1", joined, id="living")
    dead.release_late()
    assert await ids(bus) == ["living"]


async def test_an_earlier_process_that_is_heard_in_between_keeps_nobody_from_speaking(
    bus: MemoryBus, clock: VirtualClock
) -> None:
    owner, kind, entity, data = REPEATED
    other = publisher(MemoryBus(bus.broker, RUN, name="other"), clock, owner)
    asked = bus.last_for

    async def interrupted(stream: str, subject: str):
        found = await asked(stream, subject)
        if len(await ids(bus)) < 3:
            await other.say(kind, entity, data, id=f"other-{len(await ids(bus))}")
        return found

    bus.last_for = interrupted  # type: ignore[method-assign]
    assert await publisher(bus, clock, owner).say(kind, entity, data, id="a") == 4
    assert await ids(bus) == ["other-0", "other-1", "other-2", "a"]


async def test_the_same_id_again_is_the_same_event(bus: MemoryBus, clock: VirtualClock) -> None:
    owner, kind, entity, data = REPEATED
    service = publisher(bus, clock, owner)
    first = await service.say(kind, entity, data, id="a")
    clock.advance(2 * int(DUPLICATE_WINDOW_S * MICROSECONDS))
    assert await service.say(kind, entity, data, id="a") == first
    assert await service.say(kind, entity, data, id="b") == first + 1
    assert await ids(bus) == ["a", "b"]
