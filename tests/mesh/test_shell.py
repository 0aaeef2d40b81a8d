"""The loop of a decider: recovery at every point, fencing, timers. On the in-memory bus with a clock by hand."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest

from schemas import events as e
from schemas import streams
from schemas.envelope import Decision, Event
from schemas.errors import BusError, Conflict, DeciderError, Fenced, SnapshotUnreadable
from services.mesh.bus import Bus
from services.mesh.codec import decode
from services.mesh.decider import Driver
from services.mesh.memory_broker import MemoryBroker
from services.mesh.memory_bus import MemoryBus
from services.mesh.publisher import Publisher
from services.mesh.shell import Shell, as_decision
from tests.mesh.virtual_clock import VirtualClock

RUN = "r-shell"
LOG = streams.log_stream(RUN)


class CountState(msgspec.Struct, kw_only=True):
    started: int = 0
    said: int = 0
    timer: str = ""
    due_us: int = 0
    fired: int = 0


class Counting:
    """Says two things for every execution that starts, the second depending on the first; wakes itself at the third."""

    name = "scheduler"
    state_type = CountState

    def initial(self) -> CountState:
        return CountState()

    def evolve(self, state: CountState, event: Event) -> None:
        if event.kind == "execution.started":
            state.started += 1
        elif event.kind == "execution.dispatched":
            state.said += 1
        elif event.kind == "timer.set":
            state.timer, state.due_us = event.entity, event.data.due_us
        elif event.kind == "timer.fired" and event.entity == state.timer:
            state.timer, state.fired = "", state.fired + 1

    def decide(self, state: CountState, event: Event) -> Iterator[Decision]:
        if event.kind != "execution.started":
            return
        for _ in range(2):
            entity = f"e-{state.said:06d}.00"
            data = e.ExecutionDispatched(group="g-000000", member=state.said, task="t")
            yield Decision(kind="execution.dispatched", entity=entity, data=data)
        if state.started == 3:
            due = event.time_us + 5_000_000
            yield Decision(kind="timer.set", entity="t-supply-000001", data=e.TimerSet(purpose="supply", due_us=due))

    def timers(self, state: CountState) -> dict[str, tuple[str, int]]:
        return {state.timer: ("supply", state.due_us)} if state.timer else {}


class Dead(Exception):
    """The process was killed."""


class Mortal:
    """A bus that dies at its n-th publish, before or after it was stored."""

    def __init__(self, bus: Bus, *, at: int, stored: bool) -> None:
        self._bus, self._left, self._stored = bus, at, stored

    def __getattr__(self, name: str) -> object:
        return getattr(self._bus, name)

    async def publish(self, *args: object, **kwargs: object) -> int:
        self._left -= 1
        if self._left == 0 and not self._stored:
            raise Dead
        seq: int = await self._bus.publish(*args, **kwargs)  # type: ignore[arg-type]
        if self._left == 0:
            raise Dead
        return seq


@pytest.fixture
async def clock() -> VirtualClock:
    return VirtualClock(start_us=1_000_000)


@pytest.fixture
async def bus(clock: VirtualClock) -> AsyncIterator[MemoryBus]:
    bus = MemoryBus(MemoryBroker(clock), RUN, name="test")
    await bus.open_run()
    yield bus
    await bus.close()


async def start_executions(bus: Bus, clock: VirtualClock, numbers: range) -> None:
    world = Publisher(bus=bus, clock=clock, run=RUN, owner="harness", instance="harness")
    for n in numbers:
        await world.say("execution.started", f"e-{n:06d}.00", e.ExecutionStarted(attempt=0), id=f"started.{n}")


def shell_on(bus: Bus, clock: VirtualClock, *, snapshot_every: int = 500) -> Shell[CountState]:
    publisher = Publisher(bus=bus, clock=clock, run=RUN, owner="scheduler", instance="scheduler")
    return Shell(decider=Counting(), bus=bus, clock=clock, publisher=publisher, snapshot_every=snapshot_every)


@contextlib.asynccontextmanager
async def running(shell: Shell[CountState]) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(shell.run())
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Dead, Fenced):
            await task


async def wait_for_log(bus: Bus, kind: str, count: int) -> list[Event]:
    """The first `count` events of a kind, as soon as they are there."""
    found: list[Event] = []
    async with bus.read(LOG, 0) as reader:
        async for stored in reader:
            event = decode(stored)
            if event.kind == kind:
                found.append(event)
            if len(found) == count:
                return found
    raise AssertionError("the log ended")


async def whole_log(bus: Bus) -> list[Event]:
    return [decode(s) async for s in bus.read_range(LOG, 0, await bus.last_seq(LOG))]


def assert_replays(events: list[Event]) -> None:
    """Every input's decisions are in the log once, in order, and are what the decider decides again."""
    driver: Driver[CountState] = Driver(Counting())
    recorded: dict[int, list[Decision]] = {}
    for event in events:
        if not driver.is_input(event):
            recorded.setdefault(event.causation, []).append(as_decision(event))
    for event in events:
        if driver.is_input(event):
            mismatch, _ = driver.compare(event, recorded.get(event.seq, []))
            assert mismatch is None
    assert len({event.id for event in events}) == len(events)


async def test_decisions_follow_their_input_with_derived_ids(bus: MemoryBus, clock: VirtualClock) -> None:
    async with running(shell_on(bus, clock)):
        await start_executions(bus, clock, range(2))
        said = await wait_for_log(bus, "execution.dispatched", 4)
    starts = {event.seq for event in await whole_log(bus) if event.kind == "execution.started"}
    assert {event.causation for event in said} == starts
    ids = [f"{RUN}.scheduler.{event.causation}.{i}" for event, i in zip(said, [0, 1, 0, 1], strict=True)]
    assert [event.id for event in said] == ids
    assert [event.entity for event in said] == [f"e-{n:06d}.00" for n in range(4)]


@pytest.mark.parametrize("stored", [False, True], ids=["before it is stored", "after it is stored"])
@pytest.mark.parametrize("at", range(1, 8))
@pytest.mark.parametrize("snapshot_every", [1, 500])
async def test_killed_at_any_publish_it_goes_on_and_doubles_nothing(
    bus: MemoryBus, clock: VirtualClock, at: int, stored: bool, snapshot_every: int
) -> None:
    mortal = Mortal(bus, at=at, stored=stored)
    async with running(shell_on(mortal, clock, snapshot_every=snapshot_every)) as first:  # type: ignore[arg-type]
        await start_executions(bus, clock, range(3))
        with pytest.raises(Dead):
            await first
    async with running(shell_on(bus, clock, snapshot_every=snapshot_every)):
        await start_executions(bus, clock, range(3, 4))
        await wait_for_log(bus, "execution.dispatched", 8)
        await wait_for_log(bus, "timer.set", 1)
    events = await whole_log(bus)
    assert sum(event.kind == "execution.dispatched" for event in events) == 8
    assert_replays(events)


@pytest.mark.parametrize("kept", ["garbled", "unreadable"])
async def test_a_snapshot_that_cannot_be_used_costs_time_and_nothing_else(
    bus: MemoryBus, clock: VirtualClock, kept: str
) -> None:
    async with running(shell_on(bus, clock)):
        await start_executions(bus, clock, range(3))
        await wait_for_log(bus, "timer.set", 1)
    blobs, name, snapshot = bus.broker.bucket(streams.blob_bucket(RUN)), streams.snapshot_blob("scheduler"), b"of old"
    digest = await bus.put_blob(name, snapshot)
    blobs[name] = (hashlib.sha256(b"x").hexdigest(), b"x") if kept == "unreadable" else (digest, snapshot[::-1])
    shell = shell_on(bus, clock)
    async with running(shell):
        await start_executions(bus, clock, range(3, 4))
        await wait_for_log(bus, "execution.dispatched", 8)
    assert shell.driver.state.started == 4
    assert_replays(await whole_log(bus))


def test_what_is_no_snapshot_changes_nothing() -> None:
    driver: Driver[CountState] = Driver(Counting())
    driver.state.started, driver.position = 3, 7
    whole = driver.snapshot()
    for broken in (b"", b"x", whole[:-1], Driver(Circling()).snapshot().replace(b"started", b"startet")[:-2]):
        with pytest.raises(SnapshotUnreadable, match="no snapshot of the scheduler"):
            driver.restore(broken)
    assert (driver.state.started, driver.position) == (3, 7)


async def test_a_second_instance_loses_and_says_so(bus: MemoryBus, clock: VirtualClock) -> None:
    async with running(shell_on(bus, clock)) as first:
        await start_executions(bus, clock, range(1))
        await wait_for_log(bus, "execution.dispatched", 2)
        usurper = Publisher(bus=bus, clock=clock, run=RUN, owner="scheduler", instance="other")
        await usurper.take_fence()
        await usurper.say("timer.fired", "t-x-000001", e.TimerFired(purpose="x"), id="usurped")
        await start_executions(bus, clock, range(1, 2))
        with pytest.raises(Fenced, match="another instance of the scheduler"):
            await first


async def test_a_timer_fires_once_when_due_and_not_before(bus: MemoryBus, clock: VirtualClock) -> None:
    shell = shell_on(bus, clock)
    async with running(shell):
        await start_executions(bus, clock, range(3))
        timer = (await wait_for_log(bus, "timer.set", 1))[0]
        clock.advance(timer.data.due_us - clock.now_us() - 1)
        assert not any(event.kind == "timer.fired" for event in await whole_log(bus))
        clock.advance(1)
        fired = (await wait_for_log(bus, "timer.fired", 1))[0]
        assert fired.entity == timer.entity
        await start_executions(bus, clock, range(3, 4))
        await wait_for_log(bus, "execution.dispatched", 8)
        assert shell._timers == {}, "what has fired is forgotten"
        await start_executions(bus, clock, range(3, 4))
        await wait_for_log(bus, "execution.dispatched", 8)
    assert shell.driver.state.fired == 1


@pytest.mark.parametrize("snapshot_every", [1, 500])
async def test_a_timer_is_armed_again_after_a_restart(bus: MemoryBus, clock: VirtualClock, snapshot_every: int) -> None:
    async with running(shell_on(bus, clock, snapshot_every=snapshot_every)):
        await start_executions(bus, clock, range(3))
        await wait_for_log(bus, "timer.set", 1)
    clock.advance(60_000_000)
    async with running(shell_on(bus, clock, snapshot_every=snapshot_every)):
        await wait_for_log(bus, "timer.fired", 1)
    assert sum(event.kind == "timer.fired" for event in await whole_log(bus)) == 1


async def test_what_a_service_may_not_say_is_refused(bus: MemoryBus, clock: VirtualClock) -> None:
    packer = Publisher(bus=bus, clock=clock, run=RUN, owner="packer", instance="packer")
    with pytest.raises(BusError, match=r"packer may not say execution\.started"):
        await packer.say("execution.started", "e-000000.00", e.ExecutionStarted(attempt=0), id="x")
    harness = Publisher(bus=bus, clock=clock, run=RUN, owner="harness", instance="harness")
    with pytest.raises(BusError, match="carries ExecutionStarted"):
        await harness.say("execution.started", "e-000000.00", e.TimerFired(purpose="x"), id="x")


async def test_a_write_once_fact_is_said_once(bus: MemoryBus, clock: VirtualClock) -> None:
    harness = Publisher(bus=bus, clock=clock, run=RUN, owner="proxy", instance="proxy")
    sealed = e.ExecutionSealed(attempt=0, records=0, last_record=0, digest="")
    first = await harness.say("execution.sealed", "e-000000.00", sealed, id="a")
    assert await harness.say("execution.sealed", "e-000000.00", sealed, id="a") == first
    with pytest.raises(Conflict):
        await harness.say("execution.sealed", "e-000000.00", sealed, id="b")


class Circling(Counting):
    """Decides as long as nothing is started, and starts nothing."""

    def decide(self, state: CountState, event: Event) -> Iterator[Decision]:
        while state.said >= 0:
            yield Decision(kind="timer.set", entity="t-1", data=e.TimerSet(purpose="supply", due_us=1))


@pytest.mark.parametrize("compare", [False, True])
def test_a_decider_that_goes_in_a_circle_is_told(compare: bool) -> None:
    driver: Driver[CountState] = Driver(Circling(), decision_limit=100)
    event = Event(
        seq=7,
        time_us=1,
        kind="execution.started",
        entity="e-000001.00",
        owner="harness",
        instance="harness",
        causation=0,
        id="x",
        data=e.ExecutionStarted(attempt=0),
    )
    with pytest.raises(DeciderError, match=r"scheduler takes more than 100 decisions .* timer.set of t-1") as told:
        if compare:
            driver.compare(event, [], apply_unrecorded=True)
        else:
            driver.feed(event)
    assert told.value.where == "sequence 7"
