"""The event bus in one process: the same face, the same publish and the same position logic as over JetStream.

It serves tests and simulation. What a network does to a service is injected: `publish_fate` and `delivery_fate` are
asked about every publish and every delivery, `disconnect` and `reconnect` cut the line, and the broker can lose a
message or its end. Whatever is injected, the invariants of `bus` must hold.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable
from enum import Enum
from types import TracebackType
from typing import Self

from schemas import streams
from schemas.errors import BusError, LogBroken
from services.mesh import bus as face
from services.mesh import publishing
from services.mesh.bus import PUBLISH_DEADLINE_S, Stored, subject_matches
from services.mesh.memory_broker import MemoryBroker, MemoryStream
from services.mesh.publishing import Unanswered, WrongSequence
from services.mesh.reading import Cursor, Verdict

ATTEMPT_S = 5.0
_TURN = 64
"""Messages that a reader hands out before it lets others run."""


class PublishFate(Enum):
    """What becomes of one attempt to publish."""

    ANSWERED = "answered"
    ACK_LOST = "ack lost"
    """Stored, yet the publisher hears nothing."""
    LOST = "lost"
    LATE = "late"
    """The publisher hears nothing; stored when `release_late` is called."""


class DeliveryFate(Enum):
    """What becomes of one delivery to a reader."""

    ONCE = "once"
    TWICE = "twice"
    LOST = "lost"
    """The reader notices at the next delivery or after a reconnection."""


def always_answered(subject: str, msg_id: str) -> PublishFate:
    return PublishFate.ANSWERED


def always_once(stored: Stored) -> DeliveryFate:
    return DeliveryFate.ONCE


class MemoryBus:
    """Implements `Bus` for one service over a broker that it shares with others."""

    def __init__(self, broker: MemoryBroker, run: str, *, name: str) -> None:
        self.broker, self.run, self.name = broker, face.check_run(run), name
        self.publish_fate: Callable[[str, str], PublishFate] = always_answered
        self.delivery_fate: Callable[[Stored], DeliveryFate] = always_once
        self.closed = False
        self._up = asyncio.Event()
        self._up.set()
        self._late: list[tuple[str, str, bytes, dict[str, str]]] = []
        self._readers: set[MemoryReader] = set()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "up" if self.up else "down"
        return f"<MemoryBus {self.run} {self.name} [{state}, {len(self._readers)} readers, {len(self._late)} late]>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def up(self) -> bool:
        return self._up.is_set()

    def disconnect(self) -> None:
        """Fault: cuts this bus off; publishes wait, readers fall silent."""
        self._up.clear()

    def reconnect(self) -> None:
        self._up.set()
        for reader in self._readers:
            reader.restart()

    def release_late(self) -> int:
        """Fault: publishes that were held back reach the broker now. Returns how many of them it stored."""
        late, self._late = self._late, []
        stored = 0
        for stream, subject, data, headers in late:
            known = self.broker.stream(stream)
            before = len(known.messages)
            try:
                known.store(subject, data, headers)
            except WrongSequence:
                continue
            stored += len(known.messages) - before
        return stored

    async def open_run(self) -> None:
        self._check_open()
        self.broker.ensure_stream(streams.log_stream(self.run), [streams.log_subjects(self.run)])
        self.broker.ensure_stream(streams.records_stream(self.run), [streams.records_subjects(self.run)])
        self.broker.blobs.setdefault(streams.blob_bucket(self.run), {})

    async def publish(
        self,
        stream: str,
        subject: str,
        data: bytes,
        *,
        msg_id: str,
        headers: dict[str, str] | None = None,
        expect_last_subject: int | None = None,
        expect_filter: str | None = None,
        deadline_s: float = PUBLISH_DEADLINE_S,
    ) -> int:
        return await publishing.publish(
            self,
            stream,
            subject,
            data,
            msg_id=msg_id,
            headers=face.check_headers(headers or {}),
            expect_last_subject=expect_last_subject,
            expect_filter=expect_filter,
            deadline_s=deadline_s,
            attempt_s=ATTEMPT_S,
        )

    async def attempt(self, stream: str, subject: str, data: bytes, headers: dict[str, str], timeout_s: float) -> int:
        """One publish for `publishing.publish`."""
        await self._connected(timeout_s)
        await asyncio.sleep(0)
        known = self.broker.stream(stream)
        if not any(subject_matches(pattern, subject) for pattern in known.subjects):
            raise BusError(f"{stream} doesn't take this subject", where=subject, remedy="see schemas.streams")
        fate = self.publish_fate(subject, headers[face.MSG_ID])
        if fate is PublishFate.LATE:
            self._late.append((stream, subject, data, headers))
        if fate in (PublishFate.LOST, PublishFate.LATE):
            raise Unanswered(f"publish {fate.value}")
        try:
            seq = known.store(subject, data, headers)
        except WrongSequence as error:
            if fate is PublishFate.ACK_LOST:
                raise Unanswered(fate.value) from error
            raise
        if fate is PublishFate.ACK_LOST:
            raise Unanswered(fate.value)
        return seq

    def read(self, stream: str, after: int, *, subject_filter: str | None = None) -> MemoryReader:
        return self._reader(MemoryReader(self, stream, after, subject_filter=subject_filter))

    def read_range(self, stream: str, after: int, until: int, *, subject_filter: str | None = None) -> MemoryReader:
        return self._reader(MemoryReader(self, stream, after, until=until, subject_filter=subject_filter))

    def _reader(self, reader: MemoryReader) -> MemoryReader:
        self._check_open()
        self._readers = {known for known in self._readers if not known.ended}
        self._readers.add(reader)
        return reader

    async def last_seq(self, stream: str) -> int:
        return len((await self._stream(stream)).messages)

    async def last_for(self, stream: str, subject_filter: str) -> Stored | None:
        known = await self._stream(stream)
        return known.at(known.last_under(subject_filter))

    async def next_for(self, stream: str, subject_filter: str, after: int) -> Stored | None:
        return (await self._stream(stream)).next_under(subject_filter, after)

    async def get(self, stream: str, seq: int) -> Stored:
        stored = (await self._stream(stream)).at(seq)
        if stored is None:
            raise BusError(f"there is no message {seq}", where=stream, remedy="ask for a sequence up to last_seq")
        return stored

    async def put_blob(self, name: str, data: bytes) -> str:
        if not name:
            raise BusError("a blob needs a name", where=streams.blob_bucket(self.run))
        digest = hashlib.sha256(data).hexdigest()
        (await self._bucket())[name] = (digest, bytes(data))
        return digest

    async def get_blob(self, name: str) -> bytes:
        known = (await self._bucket()).get(name)
        if known is None:
            raise BusError(
                f"there is no blob {name!r}",
                where=streams.blob_bucket(self.run),
                remedy="check the name and the run; a blob is there once its writer's put has returned",
            )
        digest, data = known
        if hashlib.sha256(data).hexdigest() != digest:
            raise BusError(
                f"the blob {name!r} is damaged: its content doesn't match its digest",
                where=streams.blob_bucket(self.run),
                remedy="write it again, or restore the store from a copy",
            )
        return data

    async def blob_exists(self, name: str) -> bool:
        return name in await self._bucket()

    async def list_blobs(self, prefix: str = "") -> list[str]:
        return sorted(name for name in await self._bucket() if name.startswith(prefix))

    async def close(self) -> None:
        self.closed = True
        for reader in self._readers:
            await reader.aclose()
        self._readers.clear()

    async def _connected(self, timeout_s: float) -> None:
        self._check_open()
        try:
            async with asyncio.timeout(timeout_s):
                await self._up.wait()
        except TimeoutError:
            raise Unanswered("disconnected") from None

    async def _stream(self, name: str) -> MemoryStream:
        self._check_open()
        await asyncio.sleep(0)
        await self._up.wait()
        return self.broker.stream(name)

    async def _bucket(self) -> dict[str, tuple[str, bytes]]:
        self._check_open()
        await asyncio.sleep(0)
        await self._up.wait()
        return self.broker.bucket(streams.blob_bucket(self.run))

    def _check_open(self) -> None:
        if self.closed:
            raise BusError(f"the bus of {self.name} is closed", where=self.run, remedy="connect again")


class MemoryReader:
    """Implements `Reader` over a stream in memory."""

    def __init__(
        self, bus: MemoryBus, stream: str, after: int, *, until: int | None = None, subject_filter: str | None = None
    ) -> None:
        self._bus, self._name, self._filter = bus, stream, subject_filter
        self._cursor = Cursor(stream, last=after, until=until, filtered=subject_filter is not None)
        self._waker = asyncio.Event()
        self._arrived: deque[tuple[int, Stored]] = deque()
        self._sent_to = 0
        self._deliveries = 0
        self._started = False
        self._closed = False
        self._broken: LogBroken | None = None
        self._turn = 0

    def __repr__(self) -> str:
        return f"<MemoryReader {self._name} [last: {self._cursor.last}{', ended' if self.ended else ''}]>"

    @property
    def ended(self) -> bool:
        return self._closed or self._cursor.done

    def restart(self) -> None:
        """Goes on from the position, as after a reconnection."""
        self._started = False
        self._waker.set()

    def __aiter__(self) -> Self:
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def __anext__(self) -> Stored:
        self._turn += 1
        if self._turn % _TURN == 0:
            await asyncio.sleep(0)
        while True:
            if self._broken is not None:
                raise self._broken
            if self.ended:
                await self.aclose()
                raise StopAsyncIteration
            stream = self._bus.broker.stream(self._name)
            stream.readers.add(self._waker)
            self._waker.clear()
            try:
                stored = self._next(stream)
            except LogBroken as error:
                self._broken = error
                continue
            if stored is not None:
                return stored
            if not self.ended and not self._arrived:
                await self._waker.wait()

    async def aclose(self) -> None:
        self._closed = True
        self._waker.set()
        known = self._bus.broker.streams.get(self._name)
        if known is not None:
            known.readers.discard(self._waker)

    def _next(self, stream: MemoryStream) -> Stored | None:
        if not self._bus.up:
            return None
        if not self._started or len(stream.messages) < self._sent_to:
            self._started = True
            self._arrived.clear()
            self._sent_to, self._deliveries = self._cursor.last, 0
            self._cursor.restart(stream_end=len(stream.messages), pending=len(stream.messages) - self._sent_to)
        while not self.ended:
            if not self._arrived and not self._send(stream):
                # A finite reading ends where the stream does; whether the rest matches the filter is known only now.
                self._cursor.done = self._cursor.until is not None
                return None
            delivery, stored = self._arrived.popleft()
            pending = len(self._arrived) + len(stream.messages) - self._sent_to
            verdict = self._cursor.take(seq=stored.seq, delivery=delivery, pending=pending)
            if verdict is Verdict.TAKE:
                return stored
            if verdict is Verdict.RESTART:
                self._started = False
                return self._next(stream)
        return None

    def _send(self, stream: MemoryStream) -> bool:
        """The broker's side: the next message that passes the filter travels to us, as its fate will have it."""
        while self._sent_to < len(stream.messages):
            self._sent_to += 1
            stored = stream.at(self._sent_to)
            if stored is None or (self._filter is not None and not subject_matches(self._filter, stored.subject)):
                continue
            fate = self._bus.delivery_fate(stored)
            self._deliveries += 1
            if fate is not DeliveryFate.LOST:
                self._arrived.append((self._deliveries, stored))
            if fate is DeliveryFate.TWICE:
                self._deliveries += 1
                self._arrived.append((self._deliveries, stored))
            if self._arrived:
                return True
        return False
