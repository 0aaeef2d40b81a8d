"""What every bus does, over JetStream and in memory alike."""

from __future__ import annotations

import asyncio
import hashlib
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import streams
from schemas.errors import BusError, Conflict
from services.mesh.bus import Bus, Reader, SequenceConflict, Stored, Subjects, subject_matches, time_us_of
from services.mesh.nats_link import nanoseconds_of, parse_headers
from tests.mesh.conftest import Connect


def log(bus: Bus) -> str:
    return streams.log_stream(bus.run)


async def say(bus: Bus, entity: str, msg_id: str, data: bytes = b"{}", owner: str = "scheduler", **options) -> int:
    subject = f"gyre.{bus.run}.{owner}.execution.{entity}.placed"
    return await bus.publish(log(bus), subject, data, msg_id=msg_id, **options)


async def take(reader: Reader, count: int) -> list[Stored]:
    return [await anext(reader) for _ in range(count)]


async def test_what_is_published_is_read_as_it_was(bus: Bus):
    before = time.time_ns() // 1000
    seq = await say(bus, "e-1", "id-1", b"\x00payload", headers={"ce-id": "id-1", "ce-time": "2026-01-01T00:00:00Z"})
    stored = await bus.get(log(bus), seq)
    assert seq == 1
    assert stored.subject == f"gyre.{bus.run}.scheduler.execution.e-1.placed"
    assert (stored.data, stored.msg_id) == (b"\x00payload", "id-1")
    assert stored.headers["ce-time"] == "2026-01-01T00:00:00Z"
    assert before - 1_000_000 < stored.time_us < time.time_ns() // 1000 + 1_000_000


async def test_every_read_path_gives_the_same_message(bus: Bus):
    """Sequence, headers and the time to the last microsecond, also for a message without content."""
    for i in range(20):
        await say(bus, f"e-{i}", f"id-{i}", b"" if i % 2 else b"x", headers={"ce-id": f"id-{i}"})
    async with bus.read(log(bus), 0) as reader:
        tail = await take(reader, 20)
    ranged = [stored async for stored in bus.read_range(log(bus), 0, 20)]
    got = [await bus.get(log(bus), seq) for seq in range(1, 21)]
    last = [await bus.last_for(log(bus), stored.subject) for stored in tail]
    following = [await bus.next_for(log(bus), streams.log_subjects(bus.run), seq) for seq in range(20)]
    assert tail == ranged == got == last == following


async def test_opening_a_run_again_changes_nothing(connected: Connect):
    first = await connected()
    await first.open_run()
    await say(first, "e-1", "id-1")
    second = await connected()
    await second.open_run()
    assert await second.last_seq(log(second)) == 1


async def test_the_same_id_again_gives_the_old_sequence(bus: Bus):
    assert [await say(bus, "e-1", "same"), await say(bus, "e-2", "other"), await say(bus, "e-1", "same")] == [1, 2, 1]
    assert await bus.last_seq(log(bus)) == 2


async def test_the_callers_headers_are_left_alone(bus: Bus):
    headers = {"ce-id": "1"}
    await say(bus, "e-1", "id-1", headers=headers)
    assert headers == {"ce-id": "1"}


async def test_an_expected_sequence_guards_a_subject(bus: Bus):
    first = await say(bus, "e-1", "a", expect_last_subject=0)
    second = await say(bus, "e-1", "b", expect_last_subject=first)
    with pytest.raises(SequenceConflict) as refused:
        await say(bus, "e-1", "c", expect_last_subject=first)
    assert (refused.value.last_seq, refused.value.expected) == (second, first)
    assert isinstance(refused.value, Conflict)
    assert await bus.last_seq(log(bus)) == 2


async def test_an_expected_sequence_guards_a_filter(bus: Bus):
    """Events of one aggregate use several subjects; the expectation is over all of them."""
    scope = streams.aggregate_filter(bus.run, "execution", "e-1")
    first = await say(bus, "e-1", "a", owner="scheduler", expect_last_subject=0, expect_filter=scope)
    await say(bus, "e-2", "elsewhere", expect_last_subject=0)
    second = await say(bus, "e-1", "b", owner="harness", expect_last_subject=first, expect_filter=scope)
    with pytest.raises(SequenceConflict, match=f"it is {second}"):
        await say(bus, "e-1", "c", owner="proxy", expect_last_subject=first, expect_filter=scope)


async def test_an_expectation_beyond_the_end_is_a_conflict(bus: Bus):
    await say(bus, "e-1", "a")
    with pytest.raises(SequenceConflict):
        await say(bus, "e-1", "b", expect_last_subject=7)


async def test_a_retry_of_a_stored_claim_succeeds(bus: Bus):
    """The expectation is checked before duplicates are looked for, so our own message refuses its retry."""
    seq = await say(bus, "e-1", "claim", expect_last_subject=0)
    assert await say(bus, "e-1", "claim", expect_last_subject=0) == seq


async def test_a_retry_succeeds_though_others_followed(bus: Bus):
    scope = streams.owner_filter(bus.run, "scheduler")
    seq = await say(bus, "e-1", "mine", expect_last_subject=0, expect_filter=scope)
    for i in range(5):
        await say(bus, f"e-{i}", f"later-{i}")
    assert await say(bus, "e-1", "mine", expect_last_subject=0, expect_filter=scope) == seq
    assert await bus.last_seq(log(bus)) == 6


async def test_eight_claimants_of_fifty_things_have_fifty_winners(connected: Connect):
    buses = [await connected(f"cell-{i}") for i in range(8)]
    await buses[0].open_run()

    async def claim(bus: Bus, thing: int) -> bool:
        try:
            await say(bus, f"m-{thing}", f"{id(bus)}.{thing}", owner="trainer", expect_last_subject=0)
        except Conflict:
            return False
        return True

    won = await asyncio.gather(*(claim(bus, thing) for thing in range(50) for bus in buses))
    assert sum(won) == 50
    assert await buses[0].last_seq(log(buses[0])) == 50
    subjects = {stored.subject async for stored in buses[1].read_range(log(buses[1]), 0, 50)}
    assert len(subjects) == 50


async def test_a_reader_starts_after_its_position_and_follows(bus: Bus):
    for i in range(5):
        await say(bus, f"e-{i}", f"id-{i}")
    async with bus.read(log(bus), 3) as reader:
        assert [stored.seq for stored in await take(reader, 2)] == [4, 5]
        waiting = asyncio.ensure_future(anext(reader))
        await say(bus, "e-9", "id-9")
        assert (await waiting).seq == 6


async def test_a_reader_follows_a_filter(bus: Bus):
    async with bus.read(log(bus), 0, subject_filter=streams.owner_filter(bus.run, "harness")) as reader:
        for i in range(6):
            await say(bus, f"e-{i}", f"id-{i}", owner="harness" if i % 3 == 0 else "scheduler")
        assert [stored.seq for stored in await take(reader, 2)] == [1, 4]


async def test_a_reader_follows_several_filters_in_the_order_of_the_stream(bus: Bus):
    filters = [streams.owner_filter(bus.run, owner) for owner in ("harness", "packer")]
    owners = ("packer", "scheduler", "harness", "proxy", "packer", "harness")
    async with bus.read(log(bus), 0, subject_filter=filters) as reader:
        for i, owner in enumerate(owners):
            await say(bus, f"e-{i}", f"id-{i}", owner=owner)
        assert [stored.seq for stored in await take(reader, 4)] == [1, 3, 5, 6]
        waiting = asyncio.ensure_future(anext(reader))
        await say(bus, "e-7", "id-7", owner="proxy")
        await say(bus, "e-8", "id-8", owner="packer")
        assert (await waiting).seq == 8
    ranged = [s.seq async for s in bus.read_range(log(bus), 1, 1_000, subject_filter=filters)]
    assert ranged == [3, 5, 6, 8]


@pytest.mark.parametrize(
    ("filters", "subject", "matches"),
    [
        (["a.*.b.>"], "a.1.b.2", True),
        (["a.*.b.>"], "a.1.b", False),
        (["a.*.b.>"], "a.1.c.2", False),
        (["a.*.b.>", "c.>"], "c.1", True),
        (["a.*.b.>", "c.>"], "c", False),
        (["a.*.b.>", "c.>"], "c.1.2.3.4", True),
        (["a.*.b.>", "a.b"], "a.b", True),
        (["a.*.b.>", "a.b"], "a.b.b.x", True),
        ("a.*", "a.1", True),
        ("a.*", "a.1.2", False),
    ],
)
def test_filters_made_ready_match_as_they_are_written(filters: str | list[str], subject: str, matches: bool) -> None:
    subjects = Subjects(filters)
    for _ in range(2):
        assert subjects.match(subject) is matches


async def test_a_range_ends_by_itself(bus: Bus):
    for i in range(9):
        await say(bus, f"e-{i}", f"id-{i}", owner="harness" if i % 3 == 0 else "scheduler")

    async def sequences(after: int, until: int, subject_filter: str | None = None) -> list[int]:
        return [s.seq async for s in bus.read_range(log(bus), after, until, subject_filter=subject_filter)]

    harness = streams.owner_filter(bus.run, "harness")
    assert await sequences(2, 5) == [3, 4, 5]
    assert await sequences(7, 1_000) == [8, 9]
    assert await sequences(5, 5) == []
    assert await sequences(9, 1_000) == []
    assert await sequences(0, 5, harness) == [1, 4]
    assert await sequences(0, 1_000, harness) == [1, 4, 7]
    assert await sequences(7, 1_000, harness) == []
    assert await sequences(0, 1_000, streams.owner_filter(bus.run, "proxy")) == []


async def test_a_slow_reader_gets_every_one_of_thousands(bus: Bus):
    """A push subscription throws away what its reader doesn't take in time, without a word; a pulled one doesn't."""
    count = 2000
    async with bus.read(log(bus), 0) as reader:
        publishing = asyncio.gather(*(say(bus, f"e-{i}", f"id-{i}", bytes(1000)) for i in range(count)))
        seqs = []
        async for stored in reader:
            seqs.append(stored.seq)
            if len(seqs) == 10:
                await publishing
            if len(seqs) == count:
                break
    assert seqs == list(range(1, count + 1))


async def test_giving_up_waiting_loses_nothing(bus: Bus):
    """Time-outs around the next message hit the reader at every moment; it goes on where it stood."""
    count, seqs = 200, []
    gave_up = asyncio.Semaphore(0)

    async def publish_some_whenever_it_gave_up() -> None:
        for i in range(count):
            if i % 5 == 0:
                await gave_up.acquire()
            await say(bus, f"e-{i}", f"id-{i}")

    async with bus.read(log(bus), 0) as reader:
        publishing = asyncio.ensure_future(publish_some_whenever_it_gave_up())
        while len(seqs) < count:
            try:
                seqs.append((await asyncio.wait_for(anext(reader), 0.0003)).seq)
            except TimeoutError:
                gave_up.release()
        await publishing
    assert seqs == list(range(1, count + 1))


async def test_closing_a_reader_ends_the_one_who_waits(bus: Bus):
    reader = bus.read(log(bus), 0)
    await say(bus, "e-1", "id-1")
    await anext(reader)
    waiting = asyncio.ensure_future(anext(reader, None))
    await asyncio.sleep(0)
    await reader.aclose()
    await reader.aclose()
    assert await waiting is None


async def test_closing_the_bus_ends_its_readers(bus: Bus):
    reader = bus.read(log(bus), 0)
    waiting = asyncio.ensure_future(anext(reader, None))
    await asyncio.sleep(0)
    await bus.close()
    await bus.close()
    assert await waiting is None
    with pytest.raises(BusError, match="closed"):
        await say(bus, "e-1", "id-1")


async def test_the_last_message_under_a_filter(bus: Bus):
    assert await bus.last_seq(log(bus)) == 0
    assert await bus.last_for(log(bus), streams.log_subjects(bus.run)) is None
    await say(bus, "e-1", "a", owner="harness")
    await say(bus, "e-1", "b", owner="scheduler")
    await say(bus, "e-2", "c", owner="scheduler")
    aggregate = await bus.last_for(log(bus), streams.aggregate_filter(bus.run, "execution", "e-1"))
    assert aggregate is not None and aggregate.msg_id == "b"
    following = await bus.next_for(log(bus), streams.owner_filter(bus.run, "scheduler"), 2)
    assert following is not None and following.seq == 3
    assert await bus.next_for(log(bus), streams.owner_filter(bus.run, "scheduler"), 3) is None


@pytest.mark.parametrize("seq", [0, 2])
async def test_a_message_that_is_not_there(bus: Bus, seq: int):
    await say(bus, "e-1", "a")
    with pytest.raises(BusError, match=f"no message {seq}"):
        await bus.get(log(bus), seq)


async def test_a_run_that_was_not_opened(connected: Connect):
    bus = await connected()
    with pytest.raises(BusError, match="open the run first"):
        await say(bus, "e-1", "a")
    with pytest.raises(BusError, match="open the run first"):
        await bus.last_seq(log(bus))
    with pytest.raises(BusError, match="open the run first"):
        await anext(bus.read(log(bus), 0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"subject": "gyre.*.x"}, "not a subject"),
        ({"subject": "gyre..x"}, "not a subject"),
        ({"msg_id": ""}, "message id"),
        ({"headers": {"ce-id": "two\nlines"}}, "ce-id"),
        ({"headers": {"Nats-Msg-Id": "mine"}}, "Nats-Msg-Id"),
        ({"expect_last_subject": 0, "expect_filter": "elsewhere.>"}, "doesn't cover"),
        ({"expect_filter": "gyre.>"}, "without an expected"),
        ({"data": bytes(2 * 1024 * 1024)}, "larger than the server takes"),
    ],
)
async def test_what_cannot_be_published_is_refused_with_a_remedy(bus: Bus, change: dict, message: str):
    good = {"subject": f"gyre.{bus.run}.a.b.c.d", "data": b"", "msg_id": "id"} | change
    with pytest.raises(BusError, match=message) as refused:
        await bus.publish(log(bus), **good)
    assert refused.value.remedy
    assert await bus.last_seq(log(bus)) == 0


async def test_a_subject_of_another_stream_is_refused(bus: Bus):
    with pytest.raises(BusError, match=r"rec\."):
        await bus.publish(log(bus), streams.record_subject(bus.run, "e-1", 0, "c-1"), b"", msg_id="id")


async def test_blobs_come_back(bus: Bus):
    large = bytes(range(256)) * (3 * 4096)
    assert await bus.put_blob("micro-step/m-1", large) == hashlib.sha256(large).hexdigest()
    await bus.put_blob("snapshot/empty", b"")
    assert await bus.get_blob("micro-step/m-1") == large
    assert await bus.get_blob("snapshot/empty") == b""
    assert await bus.blob_exists("micro-step/m-1")
    assert not await bus.blob_exists("micro-step/m-2")
    with pytest.raises(BusError, match="no blob 'micro-step/m-2'") as absent:
        await bus.get_blob("micro-step/m-2")
    assert absent.value.remedy


async def test_a_blob_is_replaced_whole(connected: Connect, bus: Bus):
    """Readers that run beside the writer see the old content or the new one."""
    other = await connected("reader")
    contents = [bytes([i]) * 700_000 for i in range(6)]
    await bus.put_blob("snapshot/s", contents[0])

    async def write() -> None:
        for content in contents[1:]:
            await bus.put_blob("snapshot/s", content)

    writing = asyncio.ensure_future(write())
    while not writing.done():
        assert await other.get_blob("snapshot/s") in contents
    await writing
    assert await other.get_blob("snapshot/s") == contents[-1]


async def test_repr_shows_the_state(bus: Bus):
    reader = bus.read(log(bus), 0)
    await say(bus, "e-1", "a")
    await anext(reader)
    assert "1 readers" in repr(bus) and bus.run in repr(bus)
    assert "last: 1" in repr(reader)


tokens = st.lists(st.sampled_from(["a", "b", "e-1"]), min_size=1, max_size=4)


@given(tokens, st.data())
def test_a_filter_made_from_a_subject_matches_it(subject: list[str], data: st.DataObject):
    wanted = [data.draw(st.sampled_from([token, "*"])) for token in subject]
    cut = data.draw(st.integers(0, len(subject) - 1))
    assert subject_matches(".".join(wanted), ".".join(subject))
    assert subject_matches(".".join([*wanted[:cut], ">"]), ".".join(subject))
    assert not subject_matches(".".join([*wanted, ">"]), ".".join(subject))
    assert not subject_matches(".".join([*wanted, "*"]), ".".join(subject))
    assert not subject_matches(".".join([*wanted[:-1], "z"]), ".".join(subject))


@given(st.integers(0, 4_000_000_000_000_000_000))
def test_times_are_exact_however_they_are_written(nanoseconds: int):
    seconds, fraction = divmod(nanoseconds, 1_000_000_000)
    head = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    written = f"{head}.{fraction:09d}".rstrip("0").rstrip(".") + "Z"
    assert nanoseconds_of(written) == nanoseconds
    assert time_us_of(nanoseconds_of(written)) == nanoseconds // 1000


def test_headers_are_parsed_from_their_block():
    assert parse_headers(b"NATS/1.0\r\nce-id: a:b\r\nX:  y\r\n\r\n") == {"ce-id": "a:b", "X": "y"}
    assert parse_headers(b"") == {}
