"""The event bus over NATS JetStream.

Streams of a run keep everything; LOG refuses deletes and purges. Publishing is `publishing.publish` over one request,
reading is `NatsReader`, blobs are `NatsBlobs`. Every foreign error becomes one of ours here or in `nats_link`.
"""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any, Self

from schemas import streams
from schemas.errors import BusError
from services.mesh import bus as face
from services.mesh import publishing
from services.mesh.bus import PUBLISH_DEADLINE_S, Filter, Stored, time_us_of
from services.mesh.nats_blobs import NatsBlobs
from services.mesh.nats_link import ApiError, Link, NobodyListens, nanoseconds_of, parse_headers
from services.mesh.nats_reader import NatsReader
from services.mesh.publishing import Unanswered, WrongSequence

CONNECT_S = 10.0
ATTEMPT_S = 5.0
IN_FLIGHT = 64
"""Publishes of one connection that wait for an answer at a time. Without a bound, a burst larger than what the server
stores within ATTEMPT_S is sent again and again, and never gets through."""

_NO_MESSAGE = 10037
_NO_STREAM = 10059
_NAME_IN_USE = 10058
_WRONG_STREAM = 10060
_TOO_LARGE = 10054
_WRONG_LAST_SEQUENCE = (10071, 10164)

_BASE = {
    "retention": "limits",
    "storage": "file",
    "discard": "old",
    "num_replicas": 1,
    "max_msgs": -1,
    "max_bytes": -1,
    "max_msg_size": -1,
    "max_msgs_per_subject": -1,
    "max_age": 0,
    "max_consumers": -1,
    "duplicate_window": int(face.DUPLICATE_WINDOW_S * 1e9),
    "allow_direct": True,
    "deny_delete": False,
    "deny_purge": False,
    "allow_rollup_hdrs": False,
}


async def connect(url: str, run: str, *, name: str, timeout_s: float = CONNECT_S) -> NatsBus:
    """A bus for `run` at a nats-server, for example `nats://127.0.0.1:4222`; `name` is what the server calls us.

    Raises EnvironmentMissing when no server answers within `timeout_s`. Reconnects for ever afterwards."""
    face.check_run(run)
    link = Link(url, name)
    await link.open(url, timeout_s)
    return NatsBus(link, run)


class NatsBus:
    """Implements `Bus`."""

    def __init__(self, link: Link, run: str) -> None:
        self.link = link
        self.run = run
        self._blobs = NatsBlobs(link, streams.blob_bucket(run), self._publish_chunk, self.last_for)
        self._readers: set[NatsReader] = set()
        self._slots = asyncio.Semaphore(IN_FLIGHT)

    def __repr__(self) -> str:
        return f"<NatsBus {self.run} [{self.link!r}, {len(self._readers)} readers]>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open_run(self) -> None:
        keep = {"deny_delete": True, "deny_purge": True}
        await self._ensure_stream(streams.log_stream(self.run), {"subjects": [streams.log_subjects(self.run)], **keep})
        await self._ensure_stream(streams.records_stream(self.run), {"subjects": [streams.records_subjects(self.run)]})
        await self._ensure_stream(self._blobs.stream, self._blobs.config())

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
        face.check_headers(headers or {})
        return await self._publish(
            stream,
            subject,
            data,
            msg_id=msg_id,
            headers=headers or {},
            expect_last_subject=expect_last_subject,
            expect_filter=expect_filter,
            deadline_s=deadline_s,
        )

    async def _publish(
        self,
        stream: str,
        subject: str,
        data: bytes,
        *,
        msg_id: str,
        headers: dict[str, str],
        expect_last_subject: int | None = None,
        expect_filter: str | None = None,
        deadline_s: float = PUBLISH_DEADLINE_S,
    ) -> int:
        async with self._slots:
            return await publishing.publish(
                self,
                stream,
                subject,
                data,
                msg_id=msg_id,
                headers=headers,
                expect_last_subject=expect_last_subject,
                expect_filter=expect_filter,
                deadline_s=deadline_s,
                attempt_s=ATTEMPT_S,
            )

    async def attempt(self, stream: str, subject: str, data: bytes, headers: dict[str, str], timeout_s: float) -> int:
        """One publish for `publishing.publish`."""
        try:
            reply = await self.link.request(subject, data, timeout_s, headers)
        except NobodyListens:
            await self._must_exist(stream)
            raise
        ack: dict[str, Any] = json.loads(reply.data)
        if "error" not in ack:
            return int(ack["seq"])
        error = ApiError(ack["error"])
        if error.err_code in _WRONG_LAST_SEQUENCE:
            raise WrongSequence(str(error))
        if error.code == 503:
            raise Unanswered(str(error))
        remedies = {
            _WRONG_STREAM: f"the subject belongs to another stream than {stream}",
            _TOO_LARGE: "put the content into BLOBS and publish its name and digest",
        }
        raise BusError(f"refused: {error}", where=subject, remedy=remedies.get(error.err_code, "see the server's log"))

    def read(self, stream: str, after: int, *, subject_filter: Filter | None = None) -> NatsReader:
        return self._reader(NatsReader(self.link, stream, after, subject_filter=subject_filter))

    def read_range(self, stream: str, after: int, until: int, *, subject_filter: Filter | None = None) -> NatsReader:
        return self._reader(NatsReader(self.link, stream, after, until=until, subject_filter=subject_filter))

    def _reader(self, reader: NatsReader) -> NatsReader:
        self.link.check_open()
        self._readers = {known for known in self._readers if not known.ended}
        self._readers.add(reader)
        return reader

    async def last_seq(self, stream: str) -> int:
        return int((await self._ask(stream, f"STREAM.INFO.{stream}"))["state"]["last_seq"])

    async def last_for(self, stream: str, subject_filter: str) -> Stored | None:
        return await self._find(stream, {"last_by_subj": subject_filter})

    async def next_for(self, stream: str, subject_filter: str, after: int) -> Stored | None:
        return await self._find(stream, {"seq": after + 1, "next_by_subj": subject_filter})

    async def get(self, stream: str, seq: int) -> Stored:
        stored = await self._find(stream, {"seq": seq}) if seq > 0 else None
        if stored is None:
            raise BusError(f"there is no message {seq}", where=stream, remedy="ask for a sequence up to last_seq")
        return stored

    async def put_blob(self, name: str, data: bytes) -> str:
        return await self._blobs.put(name, data)

    async def get_blob(self, name: str) -> bytes:
        return await self._blobs.get(name)

    async def blob_exists(self, name: str) -> bool:
        return await self._blobs.exists(name)

    async def close(self) -> None:
        for reader in self._readers:
            await reader.aclose()
        self._readers.clear()
        await self.link.close()

    async def _publish_chunk(self, subject: str, data: bytes, msg_id: str, headers: dict[str, str]) -> int:
        return await self._publish(self._blobs.stream, subject, data, msg_id=msg_id, headers=headers)

    async def _find(self, stream: str, question: dict[str, Any]) -> Stored | None:
        """One stored message, from the stream's leader: a replica may lag behind what a refusal was based on."""
        try:
            message = (await self.link.ask(f"STREAM.MSG.GET.{stream}", question))["message"]
        except ApiError as error:
            if error.err_code == _NO_MESSAGE:
                return None
            raise unusable(stream, error) from error
        return Stored(
            seq=message["seq"],
            subject=message["subject"],
            time_us=time_us_of(nanoseconds_of(message["time"])),
            headers=parse_headers(base64.b64decode(message.get("hdrs", ""))),
            data=base64.b64decode(message.get("data", "")),
        )

    async def _ask(self, stream: str, subject: str) -> dict[str, Any]:
        try:
            return await self.link.ask(subject)
        except ApiError as error:
            raise unusable(stream, error) from error

    async def _must_exist(self, stream: str) -> None:
        reply = await self.link.request(f"$JS.API.STREAM.INFO.{stream}", b"", ATTEMPT_S)
        error = json.loads(reply.data).get("error")
        if error is not None and error["err_code"] == _NO_STREAM:
            raise unusable(stream, ApiError(error))

    async def _ensure_stream(self, name: str, config: dict[str, Any]) -> None:
        wanted = {"name": name, **_BASE, **config}
        try:
            await self.link.ask(f"STREAM.CREATE.{name}", wanted)
        except ApiError as error:
            if error.err_code != _NAME_IN_USE:
                raise BusError(
                    f"cannot create the stream: {error}",
                    where=name,
                    remedy="give the server's account JetStream storage, and the run a name of its own",
                ) from error
            found = (await self._ask(name, f"STREAM.INFO.{name}"))["config"]
            drift = [
                f"{key} is {json.dumps(found.get(key))}, expected {json.dumps(value)}"
                for key, value in wanted.items()
                if (found.get(key) or None) != (value or None)
            ]
            raise BusError(
                f"the stream exists with another configuration: {'; '.join(drift) or error}",
                where=name,
                remedy="start a run with another name, or remove the stream if nobody needs what is in it",
            ) from error


def unusable(stream: str, error: ApiError) -> BusError:
    """A question about a stream that was refused."""
    if error.err_code == _NO_STREAM:
        return BusError("there is no such stream", where=stream, remedy="open the run first, or check its name")
    return BusError(f"cannot use the stream: {error}", where=stream, remedy="see the server's log")
