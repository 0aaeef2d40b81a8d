"""Chaos holds a run back and lets it go: by itself, beside an operator, and whatever order the log shows it in."""

from __future__ import annotations

from typing import Any

import pytest

from schemas import events as e
from schemas import streams
from services.cli.chaos_hold import CHAOS, Hold
from services.mesh.codec import decode
from services.mesh.memory_broker import MemoryBroker
from services.mesh.memory_bus import MemoryBus
from services.mesh.publisher import Publisher
from tests.mesh.virtual_clock import VirtualClock

RUN = "r-hold"


class Log:
    """A run's log: what the hold says to it, and what others say."""

    def __init__(self) -> None:
        clock = VirtualClock()
        self.bus = MemoryBus(MemoryBroker(clock), RUN, name="test")
        self.operator = Publisher(bus=self.bus, clock=clock, run=RUN, owner="operator", instance="operator")
        self.hold = Hold()
        self.shown = 0

    async def say(self, kind: str, data: Any) -> None:
        end = await self.bus.last_seq(streams.log_stream(RUN))
        await self.operator.say(kind, RUN, data, id=f"{kind}.{end}")

    async def show(self) -> None:
        """The hold reads up to the end."""
        log = streams.log_stream(RUN)
        end = await self.bus.last_seq(log)
        async for stored in self.bus.read_range(log, self.shown, end):
            self.hold.observe(decode(stored))
        self.shown = end

    async def wishes(self) -> list[tuple[str, str]]:
        log = streams.log_stream(RUN)
        said = [decode(stored) async for stored in self.bus.read_range(log, 0, await self.bus.last_seq(log))]
        return [(event.kind.removeprefix("run."), getattr(event.data, "by", "")) for event in said]


@pytest.fixture
async def log() -> Log:
    log = Log()
    await log.bus.open_run()
    return log


@pytest.mark.parametrize("seen", [True, False], ids=["reads its own", "is behind"])
async def test_each_pause_is_followed_by_one_resume(log: Log, seen: bool) -> None:
    for _ in range(3):
        assert await log.hold.take(log.operator)
        assert not await log.hold.take(log.operator), "held already"
        if seen:
            await log.show()
        await log.hold.release(log.operator)
        await log.hold.release(log.operator)
        await log.show()
    assert await log.wishes() == [("paused", CHAOS), ("resumed", CHAOS)] * 3


async def test_another_ones_pause_is_left_alone(log: Log) -> None:
    await log.say("run.paused", e.RunPaused(by="command line"))
    await log.show()
    assert not await log.hold.take(log.operator)
    await log.hold.release(log.operator)
    assert await log.wishes() == [("paused", "command line")]
    await log.say("run.resumed", e.RunResumed(by="command line"))
    await log.show()
    assert await log.hold.take(log.operator)
    await log.say("run.paused", e.RunPaused(by="command line"))
    await log.show()
    await log.hold.release(log.operator)
    assert (await log.wishes())[-1] == ("paused", "command line"), "it was asked for while we held it too"


async def test_a_run_that_is_over_is_told_nothing_more(log: Log) -> None:
    assert await log.hold.take(log.operator)
    await log.say("run.finished", e.RunFinished(steps=1, reason="stopped"))
    await log.show()
    await log.hold.release(log.operator)
    assert not await log.hold.take(log.operator)
    assert [kind for kind, _ in await log.wishes()] == ["paused", "finished"]
