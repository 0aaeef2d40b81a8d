"""Traps of the wire, injected one by one into the in-memory bus, and its clock."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import streams
from schemas.errors import BlobDamaged, BusError, LogBroken
from services.mesh import publishing
from services.mesh.bus import DUPLICATE_WINDOW_S, SequenceConflict
from services.mesh.clock import MICROSECONDS, SystemClock
from services.mesh.memory_broker import MemoryBroker
from services.mesh.memory_bus import DeliveryFate, Line, MemoryBus, PublishFate
from services.mesh.reading import Cursor, Verdict
from tests.mesh.fates import in_turn
from tests.mesh.virtual_clock import VirtualClock

RUN = "r-1"
LOG = streams.log_stream(RUN)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(start_us=1_000_000)


@pytest.fixture
def broker(clock: VirtualClock) -> MemoryBroker:
    return MemoryBroker(clock)


@pytest.fixture
async def bus(broker: MemoryBroker) -> MemoryBus:
    bus = MemoryBus(broker, RUN, name="test")
    await bus.open_run()
    return bus


async def say(bus: MemoryBus, entity: str, msg_id: str, **options) -> int:
    subject = f"gyre.{RUN}.scheduler.execution.{entity}.placed"
    return await bus.publish(LOG, subject, b"{}", msg_id=msg_id, **options)


async def sequences(bus: MemoryBus, count: int) -> list[int]:
    async with bus.read(LOG, 0) as reader:
        return [(await anext(reader)).seq for _ in range(count)]


@pytest.mark.parametrize("expect", [None, 0])
async def test_a_lost_acknowledgement_doubles_nothing(bus: MemoryBus, expect: int | None):
    bus.publish_fate = in_turn(PublishFate.ACK_LOST, PublishFate.ACK_LOST)
    assert await say(bus, "e-1", "a", expect_last_subject=expect) == 1
    assert await bus.last_seq(LOG) == 1


async def test_a_lost_acknowledgement_doubles_nothing_where_ids_are_forgotten_meanwhile(
    bus: MemoryBus, clock: VirtualClock
):
    """As on a machine that slept between the two: the server's clock is past the window."""
    fates = in_turn(PublishFate.ACK_LOST)

    def asleep(subject: str, msg_id: str) -> PublishFate:
        clock.advance(2 * int(DUPLICATE_WINDOW_S * MICROSECONDS))
        return fates(subject, msg_id)

    await say(bus, "e-1", "before")
    bus.publish_fate = asleep
    assert await say(bus, "e-1", "a") == 2
    assert await bus.last_seq(LOG) == 2


async def test_a_lost_publish_is_made_again(bus: MemoryBus):
    bus.publish_fate = in_turn(PublishFate.LOST, PublishFate.LOST)
    assert await say(bus, "e-1", "a", expect_last_subject=0) == 1


async def test_a_lost_acknowledgement_is_found_below_what_followed(broker: MemoryBroker, bus: MemoryBus):
    """Between the first attempt and the retry, others publish under the same filter."""
    other = MemoryBus(broker, RUN, name="other")
    scope = streams.owner_filter(RUN, "scheduler")

    def lose_then_let_others_go_first(subject: str, msg_id: str) -> PublishFate:
        bus.publish_fate = others_go_first
        return PublishFate.ACK_LOST

    def others_go_first(subject: str, msg_id: str) -> PublishFate:
        for i in range(3):
            broker.stream(LOG).store(f"gyre.{RUN}.scheduler.x.{i}.y", b"", {"Nats-Msg-Id": f"other-{i}"})
        return PublishFate.ANSWERED

    bus.publish_fate = lose_then_let_others_go_first
    assert await say(bus, "e-1", "mine", expect_last_subject=0, expect_filter=scope) == 1
    assert await other.last_seq(LOG) == 4


async def test_a_claim_that_lost_while_its_answer_was_lost_is_a_conflict(broker: MemoryBroker, bus: MemoryBus):
    await say(MemoryBus(broker, RUN, name="other"), "m-1", "theirs")
    bus.publish_fate = in_turn(PublishFate.ACK_LOST)
    with pytest.raises(SequenceConflict) as refused:
        await say(bus, "m-1", "mine", expect_last_subject=0)
    assert refused.value.last_seq == 1


async def test_a_time_out_is_unknown_and_the_message_may_arrive_late(bus: MemoryBus):
    """The bytes wait in a buffer of the client and are stored after the publisher gave up."""
    bus.publish_fate = lambda subject, msg_id: PublishFate.LATE
    with pytest.raises(BusError, match="may be stored, now or later") as unknown:
        await say(bus, "e-1", "a", deadline_s=0.05)
    assert not isinstance(unknown.value, SequenceConflict)
    assert await bus.last_seq(LOG) == 0
    assert bus.release_late() == 1
    bus.publish_fate = in_turn()
    assert await say(bus, "e-1", "a") == 1
    assert await bus.last_seq(LOG) == 1


async def test_late_claims_are_refused_when_somebody_was_faster(broker: MemoryBroker, bus: MemoryBus):
    bus.publish_fate = in_turn(*[PublishFate.LATE] * 20)
    with pytest.raises(BusError):
        await say(bus, "m-1", "mine", expect_last_subject=0, deadline_s=0.05)
    assert await say(MemoryBus(broker, RUN, name="other"), "m-1", "theirs", expect_last_subject=0) == 1
    assert bus.release_late() == 0
    assert await bus.last_seq(LOG) == 1


async def test_an_id_is_forgotten_after_the_window_and_the_expectation_still_protects(
    bus: MemoryBus, clock: VirtualClock
):
    await say(bus, "e-1", "a", expect_last_subject=0)
    window = int(DUPLICATE_WINDOW_S * MICROSECONDS)
    clock.advance(window - 1)
    assert await say(bus, "e-1", "a") == 1
    clock.advance(1)
    assert await say(bus, "e-1", "a", expect_last_subject=0) == 1
    assert await bus.last_seq(LOG) == 1
    assert await say(bus, "e-1", "a") == 2


async def test_stored_times_are_the_clocks_and_never_decrease(bus: MemoryBus, clock: VirtualClock):
    await say(bus, "e-1", "a")
    clock.advance(250)
    await say(bus, "e-1", "b")
    assert [(await bus.get(LOG, seq)).time_us for seq in (1, 2)] == [1_000_000, 1_000_250]


async def test_doubled_and_lost_deliveries_are_mended(bus: MemoryBus):
    for i in range(10):
        await say(bus, f"e-{i}", f"id-{i}")
    fates = {2: DeliveryFate.TWICE, 4: DeliveryFate.LOST, 5: DeliveryFate.LOST, 8: DeliveryFate.TWICE}
    bus.delivery_fate = lambda stored: fates.pop(stored.seq, DeliveryFate.ONCE)
    assert await sequences(bus, 10) == list(range(1, 11))
    assert not fates


async def test_a_lost_delivery_under_a_filter_is_noticed_too(bus: MemoryBus):
    """Stream sequences have holes under a filter; the numbers of the deliveries haven't."""
    for i in range(9):
        await say(bus, f"e-{i % 3}", f"id-{i}")
    fates = {4: DeliveryFate.LOST}
    bus.delivery_fate = lambda stored: fates.pop(stored.seq, DeliveryFate.ONCE)
    wanted = streams.aggregate_filter(RUN, "execution", "e-0")
    assert [stored.seq async for stored in bus.read_range(LOG, 0, 9, subject_filter=wanted)] == [1, 4, 7]


async def test_a_finite_reading_notices_that_its_last_delivery_was_lost(bus: MemoryBus):
    for i in range(5):
        await say(bus, f"e-{i % 2}", f"id-{i}")
    for wanted, expected in ((None, [1, 2, 3, 4, 5]), (streams.aggregate_filter(RUN, "execution", "e-0"), [1, 3, 5])):
        fates = {5: DeliveryFate.LOST}
        bus.delivery_fate = lambda stored, fates=fates: fates.pop(stored.seq, DeliveryFate.ONCE)
        assert [stored.seq async for stored in bus.read_range(LOG, 0, 9, subject_filter=wanted)] == expected
        assert not fates


async def test_a_hole_in_the_log_is_named_and_stays(broker: MemoryBroker, bus: MemoryBus):
    for i in range(6):
        await say(bus, f"e-{i}", f"id-{i}")
    broker.stream(LOG).erase(3)
    broker.stream(LOG).erase(4)
    reader = bus.read(LOG, 0)
    assert [(await anext(reader)).seq for _ in range(2)] == [1, 2]
    for _ in range(2):
        with pytest.raises(LogBroken, match="sequences 3 to 4 are missing: 2 is followed by 5"):
            await anext(reader)


async def test_a_log_that_lost_its_end_is_noticed(broker: MemoryBroker, bus: MemoryBus):
    for i in range(6):
        await say(bus, f"e-{i}", f"id-{i}")
    reader = bus.read(LOG, 0)
    for _ in range(6):
        await anext(reader)
    broker.stream(LOG).truncate(4)
    with pytest.raises(LogBroken, match="ends at 4, yet 6"):
        await anext(reader)
    with pytest.raises(LogBroken, match="ends at 4, yet 5"):
        await anext(bus.read(LOG, 5))
    assert await say(bus, "e-4", "id-4") == 5


async def test_an_outage_delays_and_loses_nothing(bus: MemoryBus):
    reader = bus.read(LOG, 0)
    await say(bus, "e-1", "a")
    assert (await anext(reader)).seq == 1
    bus.disconnect()
    publishing = asyncio.ensure_future(say(bus, "e-2", "b"))
    reading = asyncio.ensure_future(anext(reader))
    done, _ = await asyncio.wait([publishing, reading], timeout=0.02)
    assert not done
    bus.reconnect()
    assert (await publishing, (await reading).seq) == (2, 2)


async def test_an_outage_shorter_than_the_way_of_an_answer_loses_it(broker: MemoryBroker) -> None:
    """The message is stored, and whoever said it has a new connection when the answer would come."""
    bus = MemoryBus(broker, RUN, name="test", line=Line(way_s=0.001))
    await bus.open_run()
    asked: list[str] = []

    def cut(subject: str, msg_id: str) -> PublishFate:
        asked.append(msg_id)
        if len(asked) == 1:
            asyncio.get_running_loop().call_soon(bus.disconnect)
            asyncio.get_running_loop().call_soon(bus.reconnect)
        return PublishFate.ANSWERED

    bus.publish_fate = cut
    assert await say(bus, "a", "1", expect_last_subject=0) == 1
    assert asked == ["1", "1"], "what has no answer is tried again"
    assert await sequences(bus, 1) == [1]


async def test_an_outage_longer_than_the_deadline_is_unknown(bus: MemoryBus):
    bus.disconnect()
    with pytest.raises(BusError, match=r"disconnected.*may be stored"):
        await say(bus, "e-1", "a", deadline_s=0.02)


async def test_another_configuration_is_a_clear_error(broker: MemoryBroker):
    broker.ensure_stream(LOG, ["elsewhere.>"])
    with pytest.raises(BusError, match="another configuration: subjects"):
        await MemoryBus(broker, RUN, name="test").open_run()


async def test_a_damaged_blob_is_refused(broker: MemoryBroker, bus: MemoryBus):
    digest = await bus.put_blob("b", b"content")
    broker.bucket(streams.blob_bucket(RUN))["b"] = (digest, b"contemt")
    with pytest.raises(BlobDamaged, match="damaged"):
        await bus.get_blob("b")


fates = st.lists(st.sampled_from(PublishFate), max_size=6)


@given(st.lists(st.tuples(st.integers(0, 2), fates), max_size=12), st.data())
def test_whatever_is_lost_each_message_is_stored_once_and_read_once(
    messages: list[tuple[int, list[PublishFate]]], data: st.DataObject
):
    """Any losses on the way out and any on the way in: every acknowledged message lies in the log once, at the
    sequence that was returned, and readers see each sequence once."""

    async def scenario() -> None:
        bus = MemoryBus(MemoryBroker(SystemClock()), RUN, name="test")
        await bus.open_run()
        acknowledged = {}
        for number, (entity, lost) in enumerate(messages):
            bus.publish_fate = in_turn(*lost)
            subject = f"gyre.{RUN}.scheduler.execution.e-{entity}.placed"
            last = await bus.last_for(LOG, subject)
            acknowledged[f"id-{number}"] = await say(
                bus, f"e-{entity}", f"id-{number}", expect_last_subject=last.seq if last else 0
            )
            bus.release_late()
        count = await bus.last_seq(LOG)
        assert sorted(acknowledged.values()) == list(range(1, count + 1))
        incoming = {
            seq: data.draw(st.sampled_from(DeliveryFate))
            for seq in range(1, count)  # The last one is noticed only when another follows.
        }
        bus.delivery_fate = lambda stored: incoming.pop(stored.seq, DeliveryFate.ONCE)
        async with bus.read(LOG, 0) as reader:
            read = [await anext(reader) for _ in range(count)]
        assert {stored.msg_id: stored.seq for stored in read} == acknowledged

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publishing, "FIRST_PAUSE_S", 0.0)
        asyncio.run(scenario())


@given(st.lists(st.integers(1, 8), max_size=30))
def test_a_cursor_takes_each_sequence_once_in_order(arrivals: list[int]):
    """Deliveries in any order and number: what is taken is 1, 2, 3, ..., and a gap is never passed over."""
    cursor = Cursor("S", last=0, until=None, filtered=False)
    taken, delivery = [], 0
    for seq in arrivals:
        delivery += 1
        try:
            if cursor.take(seq=seq, delivery=delivery, pending=1) is Verdict.TAKE:
                taken.append(seq)
        except LogBroken:
            break
    assert taken == list(range(1, len(taken) + 1))


async def test_a_virtual_clock_wakes_its_sleepers_in_order(clock: VirtualClock):
    woken: list[tuple[str, int]] = []

    async def sleeper(name: str, us: int) -> None:
        await clock.sleep_until(us)
        woken.append((name, clock.now_us()))

    tasks = [asyncio.ensure_future(sleeper(*args)) for args in [("c", 1_000_300), ("a", 1_000_100), ("b", 1_000_100)]]
    await sleeper("past", 999)
    await asyncio.sleep(0)
    assert clock.next_deadline() == 1_000_100
    tasks[2].cancel()
    await asyncio.sleep(0)
    while (deadline := clock.next_deadline()) is not None:
        clock.advance_to(deadline)
        await asyncio.sleep(0)
    assert woken == [("past", 1_000_000), ("a", 1_000_100), ("c", 1_000_300)]
    with pytest.raises(ValueError, match="cannot go back"):
        clock.advance_to(5)
    assert repr(clock) == "<VirtualClock [now: 1000300 us, 0 asleep]>"


async def test_the_system_clock_sleeps_until_its_time():
    clock = SystemClock()
    due = clock.now_us() + 2_000
    await clock.sleep_until(due)
    assert clock.now_us() >= due
