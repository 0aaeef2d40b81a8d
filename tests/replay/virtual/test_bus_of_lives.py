"""The in-memory bus under a virtual clock: what happens to a service that dies, and to all when the server does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from replay.virtual.clock import WallClock
from replay.virtual.life import Killed, Life
from replay.virtual.loop import VirtualLoop
from schemas import events as e
from schemas import streams
from schemas.errors import BusError
from services.mesh.bus import DUPLICATE_WINDOW_S
from services.mesh.codec import decode
from services.mesh.memory_broker import MemoryBroker
from services.mesh.memory_bus import ATTEMPT_S, DeliveryFate, Line, MemoryBus, PublishFate
from services.mesh.publisher import Publisher
from services.mesh.shell import Shell
from tests.mesh.fates import in_turn
from tests.mesh.test_shell import Counting

RUN = "r-virtual"
LOG = streams.log_stream(RUN)
LINE = Line(way_s=0.001, delivery_s=0.002, heartbeat_s=5.0, sits_out=True)


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    with VirtualLoop() as loop:
        yield loop


class Server:
    """A broker and the services that are connected to it."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.clock = WallClock(loop, start_us=1_000_000)
        self.broker = MemoryBroker(self.clock)
        self.bus = self.connect("test")
        self.lives: list[Life] = []

    def connect(self, name: str) -> MemoryBus:
        return MemoryBus(self.broker, RUN, name=name, line=LINE)

    def begin(self, name: str, program: Callable[[MemoryBus], Coroutine[Any, Any, None]]) -> Life:
        life, bus = Life(self.loop, name), self.connect(name)
        life.at_end(bus.drop)
        life.begin(program(bus))
        self.lives.append(life)
        return life

    def log(self) -> list[tuple[int, str, str, object]]:
        stored = self.broker.stream(LOG).messages
        return [(event.seq, event.kind, event.id, event.data) for event in map(decode, filter(None, stored))]

    def times(self) -> list[float]:
        return [stored.time_us / 1e6 - 1 for stored in self.broker.stream(LOG).messages if stored is not None]


def running(loop: VirtualLoop, scenario: Callable[[Server], Coroutine[Any, Any, None]]) -> Server:
    server = Server(loop)

    async def main() -> None:
        await server.bus.open_run()
        await scenario(server)

    loop.run_until_complete(main())
    return server


async def say(bus: MemoryBus, number: int, **options: Any) -> int:
    subject = f"gyre.{RUN}.scheduler.execution.e-{number}.placed"
    return await bus.publish(LOG, subject, b"{}", msg_id=f"id-{number}", **options)


# a decider, killed at every await

PAUSE_S = 60.0


def decided(kill_at: int) -> tuple[list[tuple[int, str, str, object]], int, bool]:
    """The log of a scheduler that counts, killed once before its step `kill_at` and started again ten seconds later;
    its steps; whether it was killed."""
    with VirtualLoop() as loop:

        async def scheduler(bus: MemoryBus) -> None:
            publisher = Publisher(bus=bus, clock=WallClock(loop), run=RUN, owner="scheduler", instance="scheduler")
            clock = WallClock(loop, start_us=1_000_000)
            await Shell(decider=Counting(), bus=bus, clock=clock, publisher=publisher, snapshot_every=2).run()

        async def world(bus: MemoryBus) -> None:
            harness = Publisher(bus=bus, clock=WallClock(loop), run=RUN, owner="harness", instance="harness")
            for n in range(5):
                await asyncio.sleep(PAUSE_S)
                started = e.ExecutionStarted(attempt=0)
                await harness.say("execution.started", f"e-{n:06d}.00", started, id=f"started.{n}")

        async def scenario(server: Server) -> None:
            life = server.begin("scheduler", scheduler)
            life.strike_at, life.strike = kill_at, life.kill
            server.begin("harness", world)
            await asyncio.wait([life.ended], timeout=6 * PAUSE_S)
            if life.dead:
                await asyncio.sleep(10)
                server.begin("scheduler", scheduler)
                await asyncio.sleep(6 * PAUSE_S)

        server = running(loop, scenario)
        return server.log(), server.lives[0].steps, server.lives[0].dead


def test_a_decider_that_is_killed_at_any_await_leaves_the_same_log() -> None:
    undisturbed, steps, _ = decided(10**9)
    kinds = [kind for _, kind, _, _ in undisturbed]
    assert kinds.count("execution.dispatched") == 10
    assert kinds.count("timer.set") == kinds.count("timer.fired") == 1
    assert steps > 30
    for step in range(1, steps + 1):
        log, _, killed = decided(step)
        assert killed
        assert log == undisturbed, f"killed before step {step}"


# publishes in doubt


def test_what_was_sent_arrives_though_the_sender_is_dead(loop: VirtualLoop) -> None:
    async def sender(bus: MemoryBus) -> None:
        await say(bus, 1)

    async def scenario(server: Server) -> None:
        life = server.begin("sender", sender)
        await asyncio.sleep(LINE.way_s / 2)
        life.kill()
        await asyncio.sleep(1)
        assert await server.bus.last_seq(LOG) == 1

    running(loop, scenario)


@pytest.mark.parametrize("fate", [PublishFate.ACK_LOST, PublishFate.LOST, PublishFate.LATE])
def test_a_lost_answer_takes_its_time(loop: VirtualLoop, fate: PublishFate) -> None:
    async def scenario(server: Server) -> None:
        server.bus.publish_fate = in_turn(fate, fate)
        assert await say(server.bus, 1, expect_last_subject=0) == 1
        assert loop.time() > 2 * ATTEMPT_S
        server.bus.release_late()
        assert await server.bus.last_seq(LOG) == 1

    running(loop, scenario)


def test_a_blob_in_doubt_is_written_again(loop: VirtualLoop) -> None:
    async def scenario(server: Server) -> None:
        server.bus.publish_fate = in_turn(PublishFate.LOST, PublishFate.ACK_LOST)
        await server.bus.put_blob("b", b"content")
        assert await server.bus.get_blob("b") == b"content"

    running(loop, scenario)


def test_a_lost_last_delivery_is_noticed_by_the_heartbeat(loop: VirtualLoop) -> None:
    async def scenario(server: Server) -> None:
        fates = [DeliveryFate.LOST]
        server.bus.delivery_fate = lambda stored: fates.pop() if fates else DeliveryFate.ONCE
        reader = server.bus.read(LOG, 0)
        reading = asyncio.ensure_future(anext(reader))
        await say(server.connect("other"), 1)
        assert (await reading).seq == 1
        assert not fates
        assert loop.time() >= LINE.heartbeat_s

    running(loop, scenario)


# the server


def test_a_restart_loses_nothing_and_the_ids_are_remembered(loop: VirtualLoop) -> None:
    async def scenario(server: Server) -> None:
        reader = server.bus.read(LOG, 0)
        await say(server.bus, 1)
        assert (await anext(reader)).seq == 1
        reading = asyncio.ensure_future(anext(reader))
        saying = asyncio.ensure_future(say(server.bus, 2))
        await asyncio.sleep(LINE.way_s / 2)
        server.broker.stop()
        started = loop.time()
        await asyncio.sleep(3)
        assert not saying.done()
        server.broker.start()
        assert await saying == 2
        assert loop.time() - started < 4, "a broken connection is known at once"
        assert (await reading).seq == 2
        assert await say(server.connect("other"), 1) == 1

    running(loop, scenario)


def test_an_outage_beyond_the_deadline_is_unknown(loop: VirtualLoop) -> None:
    async def scenario(server: Server) -> None:
        server.broker.stop()
        with pytest.raises(BusError, match="may be stored"):
            await say(server.connect("late"), 1)
        with pytest.raises(BusError, match="no answer within"):
            await server.bus.last_seq(LOG)

    running(loop, scenario)


def test_a_full_disk_answers_no_write_and_every_question(loop: VirtualLoop) -> None:
    async def scenario(server: Server) -> None:
        await say(server.bus, 1)
        server.broker.fill()
        with pytest.raises(BusError, match="no answer"):
            await say(server.bus, 2)
        with pytest.raises(BusError, match="was not stored"):
            await server.bus.put_blob("b", b"content")
        assert await server.bus.last_seq(LOG) == 1
        assert (await anext(server.bus.read(LOG, 0))).seq == 1
        waiting = asyncio.ensure_future(say(server.bus, 2))
        await asyncio.sleep(1)
        server.broker.stop()
        server.broker.start()
        assert await waiting == 2

    running(loop, scenario)


def test_a_clock_that_is_set_forward_forgets_ids_and_stored_times_never_fall(loop: VirtualLoop) -> None:
    async def scenario(server: Server) -> None:
        await say(server.bus, 1)
        server.clock.off_us += int(DUPLICATE_WINDOW_S * 1e6)
        await say(server.bus, 2)
        server.clock.off_us = 0
        assert await say(server.bus, 1) == 3
        assert await say(server.bus, 2, expect_last_subject=0) == 2

    times = running(loop, scenario).times()
    assert times == sorted(times)


def test_a_dead_reader_is_not_woken(loop: VirtualLoop) -> None:
    async def reader(bus: MemoryBus) -> None:
        async for _ in bus.read(LOG, 0):
            pass

    async def scenario(server: Server) -> None:
        life = server.begin("reader", reader)
        await asyncio.sleep(1)
        assert len(server.broker.stream(LOG).waiting) == 1
        life.kill()
        assert not server.broker.stream(LOG).waiting
        with pytest.raises(Killed):
            await life.ended

    running(loop, scenario)


def test_a_reader_is_woken_though_the_one_who_published_is_dead(loop: VirtualLoop) -> None:
    read: list[int] = []

    async def reader(bus: MemoryBus) -> None:
        async for stored in bus.read(LOG, 0):
            read.append(stored.seq)  # noqa: PERF401  without end

    async def sender(bus: MemoryBus) -> None:
        await say(bus, 1)

    async def scenario(server: Server) -> None:
        server.begin("reader", reader)
        await asyncio.sleep(1)
        life = server.begin("sender", sender)
        await asyncio.sleep(LINE.way_s)
        life.kill()
        await asyncio.sleep(1)
        assert read == [1]

    running(loop, scenario)
