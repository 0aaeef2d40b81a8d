"""The event bus in one process: the same face, the same publish and the same position logic as over JetStream.

It serves tests and simulation. What a network does to a service is injected: `publish_fate` and `delivery_fate` are
asked about every publish and every delivery, `disconnect` and `reconnect` cut the line, and the broker can lose a
message or its end. Whatever is injected, the invariants of `bus` must hold.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from enum import Enum
from typing import Any, NoReturn, Self, TypeVar

from schemas import streams
from schemas.errors import BlobDamaged, BusError, EnvironmentMissing
from services.mesh import bus as face
from services.mesh import publishing
from services.mesh.bus import PUBLISH_DEADLINE_S, Filter, Stored
from services.mesh.memory_broker import MemoryBroker
from services.mesh.memory_reader import DeliveryFate, Line, MemoryReader, always_once
from services.mesh.publishing import Unanswered, WrongSequence

__all__ = ["ATTEMPT_S", "DeliveryFate", "Line", "MemoryBus", "MemoryReader", "PublishFate"]

ATTEMPT_S = 5.0
ASK_DEADLINE_S = 15.0
"""Seconds after which a question without an answer gives up."""

T = TypeVar("T")


class PublishFate(Enum):
    """What becomes of one attempt to publish."""

    ANSWERED = "answered"
    ACK_LOST = "ack lost"
    """Stored, yet the publisher hears nothing."""
    LOST = "lost"
    LATE = "late"
    """The publisher hears nothing; stored when `release_late` is called."""


def always_answered(subject: str, msg_id: str) -> PublishFate:
    return PublishFate.ANSWERED


class MemoryBus:
    """Implements `Bus` for one service over a broker that it shares with others."""

    def __init__(self, broker: MemoryBroker, run: str, *, name: str, line: Line | None = None) -> None:
        self.broker, self.run, self.name = broker, face.check_run(run), name
        self.line = line or Line()
        self.publish_fate: Callable[[str, str], PublishFate] = always_answered
        self._delivery_fate: Callable[[Stored], DeliveryFate] = always_once
        self.closed = False
        self.up = self.smooth = broker.up
        self._up = asyncio.Event()
        self._cuts = 0
        """How often the connection was lost: what was on its way then has no answer, though there is a new one."""
        if broker.up:
            self._up.set()
        broker.clients[self] = None
        self._late: list[Callable[[], object]] = []
        self._asking: dict[asyncio.Future[Any], None] = {}
        self._readers: list[MemoryReader] = []

    def __repr__(self) -> str:
        state = "closed" if self.closed else "up" if self.up else "down"
        return f"<MemoryBus {self.run} {self.name} [{state}, {len(self._readers)} readers, {len(self._late)} late]>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def delivery_fate(self) -> Callable[[Stored], DeliveryFate]:
        return self._delivery_fate

    @delivery_fate.setter
    def delivery_fate(self, fate: Callable[[Stored], DeliveryFate]) -> None:
        self._delivery_fate = fate
        self.smooth = self.up and fate is always_once

    def disconnect(self) -> None:
        """Fault: cuts this bus off; what is asked has no answer, publishes wait, readers fall silent."""
        self.up = self.smooth = False
        self._cuts += 1
        self._up.clear()
        for answer in list(self._asking):
            _fail(answer, Unanswered("the connection was lost"))

    def reconnect(self) -> None:
        self.up = True
        self.smooth = self._delivery_fate is always_once
        self._up.set()
        for reader in self._readers:
            reader.restart()

    def release_late(self) -> int:
        """Fault: writes that were held back reach the broker now. Returns how many different ones it has now."""
        late, self._late = self._late, []
        stored: set[object] = set()
        if not self.broker.up or self.broker.full:
            late.clear()
        for write in late:
            try:
                stored.add(write())
            except WrongSequence:
                continue
        return len(stored)

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
        if self.closed or not self.up:
            await self._connected(timeout_s)
        known = self.broker.stream(stream)
        if not known.takes(subject):
            raise BusError(f"{stream} doesn't take this subject", where=subject, remedy="see schemas.streams")
        fate = self.publish_fate(subject, headers[face.MSG_ID])
        return await self._write(lambda: known.store(subject, data, headers), fate, timeout_s)

    async def _write(self, write: Callable[[], T], fate: PublishFate, timeout_s: float) -> T:
        """One request that changes something. `write` happens though we may be gone before we hear of it."""
        line, broker, cuts = self.line, self.broker, self._cuts
        if not line.way_s:
            await asyncio.sleep(0)
        if fate is PublishFate.LATE:
            self._late.append(write)
        elif not broker.full and fate is not PublishFate.LOST:
            # It is sent, so it arrives. The answer takes both ways.
            error: Exception | None = None
            try:
                result = write()
            except Exception as refused:
                error = refused
            if fate is PublishFate.ANSWERED:
                if line.way_s:
                    await line.pause(2 * line.way_s)
                if self._cuts != cuts:
                    raise Unanswered("the connection was lost")
                if error is not None:
                    raise error
                return result
        return await self._unanswered("no answer" if fate is PublishFate.ANSWERED else f"publish {fate.value}", timeout_s)

    async def _unanswered(self, why: str, timeout_s: float) -> NoReturn:
        """Waits for what will not come, or for the end of the connection."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[NoReturn] = loop.create_future()
        self._asking[answer] = None
        loop.call_later(timeout_s if self.line.sits_out else 0.0, _fail, answer, Unanswered(why))
        try:
            await answer
        finally:
            del self._asking[answer]
        raise AssertionError("there was no answer to come")

    def read(self, stream: str, after: int, *, subject_filter: Filter | None = None) -> MemoryReader:
        return self._reader(MemoryReader(self, stream, after, subject_filter=subject_filter))

    def read_range(self, stream: str, after: int, until: int, *, subject_filter: Filter | None = None) -> MemoryReader:
        return self._reader(MemoryReader(self, stream, after, until=until, subject_filter=subject_filter))

    def _reader(self, reader: MemoryReader) -> MemoryReader:
        self._check_open()
        self._readers = [known for known in self._readers if not known.ended]
        self._readers.append(reader)
        return reader

    async def last_seq(self, stream: str) -> int:
        return await self._ask(lambda: len(self.broker.stream(stream).messages))

    async def last_for(self, stream: str, subject_filter: str) -> Stored | None:
        def find() -> Stored | None:
            known = self.broker.stream(stream)
            return known.at(known.last_under(subject_filter))

        return await self._ask(find)

    async def next_for(self, stream: str, subject_filter: str, after: int) -> Stored | None:
        return await self._ask(lambda: self.broker.stream(stream).next_under(subject_filter, after))

    async def get(self, stream: str, seq: int) -> Stored:
        stored = await self._ask(lambda: self.broker.stream(stream).at(seq))
        if stored is None:
            raise BusError(f"there is no message {seq}", where=stream, remedy="ask for a sequence up to last_seq")
        return stored

    async def put_blob(self, name: str, data: bytes) -> str:
        if not name:
            raise BusError("a blob needs a name", where=streams.blob_bucket(self.run))
        digest = hashlib.sha256(data).hexdigest()
        bucket = await self._ask(self._bucket)
        if bucket.get(name, ("", b""))[0] == digest:
            return digest
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PUBLISH_DEADLINE_S
        while (left := deadline - loop.time()) > 0:
            try:
                await self._connected(left)
                fate = self.publish_fate(f"$O.{streams.blob_bucket(self.run)}.M.{name}", digest)
                await self._write(lambda: bucket.__setitem__(name, (digest, data)), fate, min(ATTEMPT_S, left))
            except Unanswered:
                await asyncio.sleep(publishing.FIRST_PAUSE_S)
            else:
                return digest
        raise BusError(
            f"the blob {name!r} was not stored within {PUBLISH_DEADLINE_S:g} s",
            where=streams.blob_bucket(self.run),
            remedy="check that the event bus is up and has room, then write it again",
        )

    async def get_blob(self, name: str) -> bytes:
        known = await self._ask(lambda: self._bucket().get(name))
        if known is None:
            raise BusError(
                f"there is no blob {name!r}",
                where=streams.blob_bucket(self.run),
                remedy="check the name and the run; a blob is there once its writer's put has returned",
            )
        digest, data = known
        if hashlib.sha256(data).hexdigest() != digest:
            raise BlobDamaged(
                f"the blob {name!r} is damaged: its content doesn't match its digest",
                where=streams.blob_bucket(self.run),
                remedy="restore the store from a copy, or delete the blob there and write it again",
            )
        return data

    async def blob_exists(self, name: str) -> bool:
        return await self._ask(lambda: name in self._bucket())

    async def close(self) -> None:
        self.drop()

    def drop(self) -> None:
        """`close`, for those who cannot wait: the process is gone. What was sent still arrives."""
        self.closed = True
        self.broker.clients.pop(self, None)
        for reader in self._readers:
            reader.end()
        self._readers.clear()

    async def connected(self, timeout_s: float) -> None:
        """Waits for the broker, as a service does that starts. Raises EnvironmentMissing."""
        try:
            await self._connected(timeout_s)
        except Unanswered:
            raise EnvironmentMissing(f"no event bus answered within {timeout_s:g} s", where=self.name) from None

    async def _connected(self, timeout_s: float) -> None:
        self._check_open()
        if self.up:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._up.wait()
        except TimeoutError:
            raise Unanswered("disconnected") from None

    async def _ask(self, question: Callable[[], T]) -> T:
        """One question that changes nothing, asked again until there is an answer."""
        loop, way_s = asyncio.get_running_loop(), self.line.way_s
        deadline = loop.time() + ASK_DEADLINE_S
        self._check_open()
        while (left := deadline - loop.time()) > 0:
            if self.up:
                answer, cuts = question(), self._cuts
                if way_s:
                    await self.line.pause(2 * way_s)
                else:
                    await asyncio.sleep(0)
                if self._cuts == cuts:
                    return answer
            try:
                await self._connected(left)
            except Unanswered:
                break
        raise BusError(
            f"no answer within {ASK_DEADLINE_S:g} s", where=self.name, remedy="check that the event bus is up"
        )

    def _bucket(self) -> dict[str, tuple[str, bytes]]:
        return self.broker.bucket(streams.blob_bucket(self.run))

    def _check_open(self) -> None:
        if self.closed:
            raise BusError(f"the bus of {self.name} is closed", where=self.run, remedy="connect again")


def _fail(answer: asyncio.Future[Any], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
