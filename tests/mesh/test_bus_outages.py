"""The bus against a real nats-server that crashes, hangs, loses its store, or was set up differently."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import nats
import pytest
from nats.aio.msg import Msg
from nats.js.errors import APIError

from schemas import streams
from schemas.errors import BlobDamaged, BusError, EnvironmentMissing, LogBroken
from services.mesh import nats_reader
from services.mesh.nats_bus import IN_FLIGHT, NatsBus, connect
from services.mesh.server import NatsServer

RUN = "r-1"
LOG = streams.log_stream(RUN)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    """A server that the test may mistreat."""
    with NatsServer(tmp_path / "nats") as server:
        yield server


@pytest.fixture
async def bus(server: NatsServer) -> AsyncIterator[NatsBus]:
    bus = await connect(server.url, RUN, name="test")
    await bus.open_run()
    yield bus
    await bus.close()


async def say(bus: NatsBus, entity: str, msg_id: str, data: bytes = b"{}", **options) -> int:
    return await bus.publish(
        streams.log_stream(bus.run),
        f"gyre.{bus.run}.scheduler.execution.{entity}.placed",
        data,
        msg_id=msg_id,
        **options,
    )


async def test_kill_9_in_mid_read_and_mid_publish_loses_and_doubles_nothing(
    server: NatsServer, bus: NatsBus, monkeypatch: pytest.MonkeyPatch
):
    """Three crashes while one task publishes in a chain of expectations and another reads."""
    # The reader must go on because of the reconnection, not because it missed heartbeats for long.
    monkeypatch.setattr(nats_reader, "HEARTBEAT_S", 14.0)
    count = 300
    crash_at = {60, 140, 220}
    reached = asyncio.Queue[int]()
    returned: list[int] = []

    async def publish_all() -> None:
        for i in range(count):
            if i in crash_at:
                reached.put_nowait(i)
            expected = returned[-1] if returned else 0
            returned.append(
                await say(
                    bus, f"e-{i}", f"id-{i}", expect_last_subject=expected, expect_filter=f"gyre.{RUN}.scheduler.>"
                )
            )

    reader = bus.read(LOG, 0)
    publishing = asyncio.ensure_future(publish_all())

    async def read_all() -> list[tuple[int, str]]:
        return [(stored.seq, stored.msg_id) for stored in [await anext(reader) for _ in range(count)]]

    reading = asyncio.ensure_future(read_all())
    for _ in crash_at:
        await reached.get()
        server.kill()
        await server.start_async()
    async with asyncio.timeout(20):
        await publishing
        read = await reading
    assert returned == list(range(1, count + 1))
    assert read == [(i + 1, f"id-{i}") for i in range(count)]
    assert bus.link.epoch == len(crash_at)


async def test_a_time_out_is_unknown_and_the_message_is_stored_later(server: NatsServer, bus: NatsBus):
    """A server that hangs answers nothing, yet it gets the bytes; the retry after the outage finds them."""
    os.kill(server.pid, signal.SIGSTOP)
    try:
        with pytest.raises(BusError, match="id-1 may be stored, now or later"):
            await say(bus, "e-1", "id-1", deadline_s=0.3)
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert await say(bus, "e-1", "id-1") == 1
    assert await say(bus, "e-2", "id-2") == 2


async def test_a_publish_waits_for_a_server_that_is_away(server: NatsServer, bus: NatsBus):
    server.kill()
    publishing = asyncio.ensure_future(say(bus, "e-1", "id-1", expect_last_subject=0))
    done, _ = await asyncio.wait([publishing], timeout=0.2)
    assert not done
    await server.start_async()
    assert await publishing == 1


async def test_a_reader_outlives_its_consumer(bus: NatsBus):
    """Somebody deletes it, as the server does with one that was silent for long."""
    reader = bus.read(LOG, 0)
    await say(bus, "e-1", "id-1")
    assert (await anext(reader)).seq == 1
    names = (await bus.link.ask(f"CONSUMER.NAMES.{LOG}", {"offset": 0}))["consumers"]
    assert len(names) == 1
    await bus.link.ask(f"CONSUMER.DELETE.{LOG}.{names[0]}")
    await say(bus, "e-2", "id-2")
    assert (await anext(reader)).seq == 2
    assert reader.consumers_made == 2
    await reader.aclose()
    assert (await bus.link.ask(f"CONSUMER.NAMES.{LOG}", {"offset": 0}))["total"] == 0


async def test_a_lost_last_delivery_is_noticed_by_the_heartbeat(bus: NatsBus, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nats_reader, "HEARTBEAT_S", 0.1)
    reader = bus.read(LOG, 0)
    await say(bus, "e-1", "id-1")
    assert (await anext(reader)).seq == 1
    lost = asyncio.Event()
    deliver = reader._subscription._cb

    async def lossy(message: Msg) -> None:
        # Heartbeats still arrive: the line is good, only one message went missing on it.
        if message.reply.startswith("$JS.ACK.") and not lost.is_set():
            lost.set()
        else:
            await deliver(message)

    reader._subscription._cb = lossy
    await say(bus, "e-2", "id-2")
    await lost.wait()
    async with asyncio.timeout(10):
        assert (await anext(reader)).seq == 2
    assert reader.consumers_made == 2


async def test_a_silent_server_makes_the_reader_start_again(
    server: NatsServer, bus: NatsBus, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(nats_reader, "HEARTBEAT_S", 0.05)
    reader = bus.read(LOG, 0)
    await say(bus, "e-1", "id-1")
    assert (await anext(reader)).seq == 1
    os.kill(server.pid, signal.SIGSTOP)
    waiting = asyncio.ensure_future(anext(reader))
    try:
        await asyncio.wait([waiting], timeout=1.5)
    finally:
        os.kill(server.pid, signal.SIGCONT)
    await say(bus, "e-2", "id-2")
    assert (await waiting).seq == 2


async def test_the_bound_of_a_pull_is_in_bytes_too(bus: NatsBus, monkeypatch: pytest.MonkeyPatch):
    """Large messages: more of them than the client would buffer."""
    monkeypatch.setattr(nats_reader, "PULL_BYTES", 1)
    large = bytes(600_000)
    for i in range(12):
        await say(bus, f"e-{i}", f"id-{i}", large)
    async with bus.read(LOG, 0) as reader:
        assert [(await anext(reader)).seq for _ in range(12)] == list(range(1, 13))
    assert [stored.seq async for stored in bus.read_range(LOG, 0, 12)] == list(range(1, 13))
    assert reader.consumers_made == 1


async def test_a_burst_is_sent_in_bounded_portions(bus: NatsBus, monkeypatch: pytest.MonkeyPatch):
    """All at once would queue up at the server until attempts time out and are sent again and again."""
    under_way, most, attempt = 0, 0, bus.attempt

    async def counted(*args, **options) -> int:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        try:
            return await attempt(*args, **options)
        finally:
            under_way -= 1

    monkeypatch.setattr(bus, "attempt", counted)
    seqs = await asyncio.gather(*(say(bus, f"e-{i}", f"id-{i}") for i in range(3 * IN_FLIGHT)))
    assert sorted(seqs) == list(range(1, 3 * IN_FLIGHT + 1))
    assert most == IN_FLIGHT


async def test_an_idle_reader_keeps_its_consumer(bus: NatsBus, monkeypatch: pytest.MonkeyPatch):
    """Pulls that expire with and without messages are followed by others on the same consumer."""
    monkeypatch.setattr(nats_reader, "PULL_S", 0.2)
    monkeypatch.setattr(nats_reader, "HEARTBEAT_S", 0.1)
    reader = bus.read(LOG, 0)
    pulls, enough, pull = 0, asyncio.Event(), reader._pull

    async def counted() -> None:
        nonlocal pulls
        pulls += 1
        await pull()
        if pulls == 4:
            enough.set()

    monkeypatch.setattr(reader, "_pull", counted)
    await say(bus, "e-1", "id-1")
    assert (await anext(reader)).seq == 1
    waiting = asyncio.ensure_future(anext(reader))
    await enough.wait()
    await say(bus, "e-2", "id-2")
    assert (await waiting).seq == 2
    assert reader.consumers_made == 1


async def test_the_log_refuses_purge_and_delete(bus: NatsBus):
    await say(bus, "e-1", "id-1")
    js = bus.link.client.jetstream()
    with pytest.raises(APIError) as purge:
        await js.purge_stream(LOG)
    assert purge.value.err_code == 10110
    with pytest.raises(APIError):
        await js.delete_msg(LOG, 1)
    assert await bus.last_seq(LOG) == 1


async def test_another_configuration_is_a_clear_error(server: NatsServer):
    client = await nats.connect(server.url)
    await client.jetstream().add_stream(name=LOG, subjects=[streams.log_subjects(RUN)], duplicate_window=60)
    await client.close()
    bus = await connect(server.url, RUN, name="test")
    with pytest.raises(BusError) as drift:
        await bus.open_run()
    await bus.close()
    for said in ("duplicate_window is 60000000000, expected 120000000000", "deny_delete", "deny_purge", LOG):
        assert said in str(drift.value)
    assert "subjects" not in str(drift.value)


async def test_a_hole_in_the_log_is_named(bus: NatsBus):
    js = bus.link.client.jetstream()
    await js.add_stream(name="HOLE", subjects=["hole.*"])
    for i in range(5):
        await bus.publish("HOLE", f"hole.{i}", b"", msg_id=f"id-{i}")
    await js.delete_msg("HOLE", 3)
    reader = bus.read("HOLE", 0)
    assert [(await anext(reader)).seq for _ in range(2)] == [1, 2]
    for _ in range(2):
        with pytest.raises(LogBroken, match="sequences 3 to 3 are missing: 2 is followed by 4"):
            await anext(reader)


async def test_a_store_that_lost_its_end_is_noticed(server: NatsServer, bus: NatsBus):
    """The store is put back to an older state under a reader."""
    for i in range(3):
        await say(bus, f"e-{i}", f"id-{i}")
    await server.stop_async()
    shutil.copytree(server.folder / "store", server.folder / "old")
    await server.start_async()
    reader = bus.read(LOG, 0)
    await say(bus, "e-3", "id-3")
    for _ in range(4):
        await anext(reader)
    await server.stop_async()
    shutil.rmtree(server.folder / "store")
    shutil.move(server.folder / "old", server.folder / "store")
    await server.start_async()
    with pytest.raises(LogBroken, match="ends at 3, yet 4"):
        await anext(reader)


async def test_stock_clients_read_our_blobs_and_we_read_theirs(bus: NatsBus):
    store = await bus.link.client.jetstream().object_store(streams.blob_bucket(RUN))
    content = bytes(range(256)) * 6000
    await bus.put_blob("ours", content)
    assert (await store.get("ours")).data == content
    await store.put("theirs", content)
    assert await bus.get_blob("theirs") == content
    await store.delete("theirs")
    assert not await bus.blob_exists("theirs")


async def test_the_same_blob_again_writes_nothing(bus: NatsBus):
    content = bytes(3_000_000)
    await bus.put_blob("b", content)
    before = await bus.last_seq("OBJ_" + streams.blob_bucket(RUN))
    await bus.put_blob("b", content)
    assert await bus.last_seq("OBJ_" + streams.blob_bucket(RUN)) == before
    await bus.put_blob("b", b"new")
    info = await bus.link.ask(f"STREAM.INFO.OBJ_{streams.blob_bucket(RUN)}")
    assert info["state"]["messages"] == 2, "the chunks of the old content are gone"


async def test_a_damaged_blob_is_refused(bus: NatsBus):
    await bus.put_blob("b", b"content")
    stream = "OBJ_" + streams.blob_bucket(RUN)
    meta = await bus.last_for(stream, f"$O.{streams.blob_bucket(RUN)}.M.>")
    assert meta is not None
    nuid = json.loads(meta.data)["nuid"]
    await bus.link.client.jetstream().purge_stream(stream, subject=f"$O.{streams.blob_bucket(RUN)}.C.{nuid}")
    with pytest.raises(BlobDamaged, match="damaged"):
        await bus.get_blob("b")


async def test_no_server_is_a_clear_error():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"nats://user:secret@127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(EnvironmentMissing, match=r"no nats-server answered within 0\.3 s") as missing:
            await connect(url, RUN, name="test", timeout_s=0.3)
    assert "secret" not in str(missing.value) and "127.0.0.1" in str(missing.value)
    assert missing.value.remedy


async def test_something_else_at_the_url_is_a_clear_error():
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as other:
        port = other.sockets[0].getsockname()[1]
        with pytest.raises(EnvironmentMissing, match="no nats-server answered"):
            await connect(f"nats://127.0.0.1:{port}", RUN, name="test", timeout_s=0.3)


async def test_closing_while_the_server_is_away(server: NatsServer, bus: NatsBus):
    reader = bus.read(LOG, 0)
    await say(bus, "e-1", "id-1")
    await anext(reader)
    server.kill()
    waiting = asyncio.ensure_future(anext(reader, None))
    await asyncio.sleep(0)
    async with asyncio.timeout(2):
        await bus.close()
    assert await waiting is None


async def test_closing_lets_what_is_in_flight_finish(bus: NatsBus):
    publishing = [asyncio.ensure_future(say(bus, f"e-{i}", f"id-{i}")) for i in range(20)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await bus.close()
    assert sorted(await asyncio.gather(*publishing)) == list(range(1, 21))


async def test_closing_ends_a_publish_that_waits_for_the_server(server: NatsServer, bus: NatsBus):
    server.kill()
    publishing = asyncio.ensure_future(say(bus, "e-1", "id-1"))
    await asyncio.wait([publishing], timeout=0.2)
    async with asyncio.timeout(2):
        await bus.close()
        with pytest.raises(BusError, match="closed"):
            await publishing
