"""Blobs of a run in a JetStream object store, in the store's own format: stock tools read it.

A blob is chunks under a subject of their own, then one meta message under its name that replaces the one before. The
client's object store isn't used for it: its publishes have no id, so that a lost answer doubles a chunk, and it reads
through a consumer that can lose messages.

Invariants: a blob is visible only when all its chunks are stored; a reader gets the content whose digest the meta
message states, whatever is written meanwhile.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

from schemas.errors import BlobDamaged, BusError
from services.mesh.bus import MSG_ID, Stored
from services.mesh.nats_link import ApiError, Link
from services.mesh.nats_reader import NatsReader

CHUNK_BYTES = 512 * 1024
_DIGEST = "SHA-256="
_TO_THE_END = 1 << 62
_READS = 5
"""Times that a reader starts again because the blob was replaced under its hands."""

Publish = Callable[[str, bytes, str, dict[str, str]], Awaitable[int]]
LastFor = Callable[[str, str], Awaitable[Stored | None]]


class NatsBlobs:
    """The object store `bucket` over the bus's own publish and read."""

    def __init__(self, link: Link, bucket: str, publish: Publish, last_for: LastFor) -> None:
        self._link, self.bucket, self.stream = link, bucket, f"OBJ_{bucket}"
        self._publish, self._last_for = publish, last_for

    def config(self) -> dict[str, Any]:
        """Stream configuration of an object store."""
        return {
            "subjects": [f"$O.{self.bucket}.C.>", f"$O.{self.bucket}.M.>"],
            "discard": "new",
            "allow_rollup_hdrs": True,
            "allow_direct": True,
        }

    async def put(self, name: str, data: bytes) -> str:
        digest = hashlib.sha256(data).digest()
        known = await self._meta(name)
        if known is not None and known["digest"] == encode_digest(digest) and known["size"] == len(data):
            return digest.hex()
        nuid = self._link.client.new_inbox().rpartition(".")[2]
        chunks = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
        for index, chunk in enumerate(chunks):
            # One after the other: the order in the stream is the order in the blob.
            await self._publish(self._chunks(nuid), chunk, f"{nuid}.{index}", {})
        meta = {
            "name": name,
            "options": {"max_chunk_size": CHUNK_BYTES},
            "bucket": self.bucket,
            "nuid": nuid,
            "size": len(data),
            "mtime": datetime.now(UTC).isoformat(),
            "chunks": len(chunks),
            "digest": encode_digest(digest),
        }
        await self._publish(self._name(name), json.dumps(meta).encode(), f"{nuid}.meta", {"Nats-Rollup": "sub"})
        if known is not None:
            await self._link.ask(f"STREAM.PURGE.{self.stream}", {"filter": self._chunks(known["nuid"])})
        return digest.hex()

    async def get(self, name: str) -> bytes:
        tried = ""
        for _ in range(_READS):
            meta = await self._meta(name)
            if meta is None:
                raise BusError(
                    f"there is no blob {name!r}",
                    where=self.bucket,
                    remedy="check the name and the run; a blob is there once its writer's put has returned",
                )
            if meta["nuid"] == tried:
                raise BlobDamaged(
                    f"the blob {name!r} is damaged: its content doesn't match its digest",
                    where=self.bucket,
                    remedy="restore the store from a copy, or delete the blob there and write it again",
                )
            tried = meta["nuid"]
            data = await self._content(meta)
            if encode_digest(hashlib.sha256(data).digest()) == meta["digest"]:
                return data
        raise BusError(f"the blob {name!r} was replaced {_READS} times while it was read", where=self.bucket)

    async def exists(self, name: str) -> bool:
        return await self._meta(name) is not None

    async def _meta(self, name: str) -> dict[str, Any] | None:
        if not name:
            raise BusError("a blob needs a name", where=self.bucket)
        stored = await self._last_for(self.stream, self._name(name))
        if stored is None:
            return None
        meta: dict[str, Any] = json.loads(stored.data)
        return None if meta.get("deleted") else meta

    async def _content(self, meta: dict[str, Any]) -> bytes:
        if meta["size"] == 0:
            return b""
        parts: dict[str, bytes] = {}
        async with NatsReader(
            self._link, self.stream, 0, until=_TO_THE_END, subject_filter=self._chunks(meta["nuid"])
        ) as reader:
            async for stored in reader:
                # By id, so that a chunk stored twice (the window for duplicates is finite) counts once.
                parts.setdefault(stored.headers.get(MSG_ID, str(stored.seq)), stored.data)
        return b"".join(parts.values())

    def _chunks(self, nuid: str) -> str:
        return f"$O.{self.bucket}.C.{nuid}"

    def _name(self, name: str) -> str:
        return f"$O.{self.bucket}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"


def encode_digest(digest: bytes) -> str:
    return _DIGEST + base64.urlsafe_b64encode(digest).decode()


def missing(bucket: str, error: ApiError) -> BusError:
    return BusError(f"cannot use the object store: {error}", where=bucket, remedy="open the run first")
