"""Bytes of what lies in RECORDS and of frozen trees (MessagePack)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec

from schemas.records import FrozenTree, RecordEntry

_record = msgspec.msgpack.Decoder(RecordEntry)
_tree = msgspec.msgpack.Decoder(FrozenTree)


def encode_record(entry: RecordEntry) -> bytes:
    return msgspec.msgpack.encode(entry)


def decode_record(data: bytes) -> RecordEntry:
    entry: RecordEntry = _record.decode(data)
    return entry


def encode_tree(tree: FrozenTree) -> bytes:
    return msgspec.msgpack.encode(tree)


def decode_tree(data: bytes) -> FrozenTree:
    return _tree.decode(data)


def digest_records(entries: Iterable[bytes]) -> str:
    """Digest of the entries of one attempt as they lie in RECORDS, in stream order: what a seal promises.

    BLAKE2b of 16 bytes over the bytes of all entries, in hex. The number of entries is sealed beside it.
    """
    digest = hashlib.blake2b(digest_size=16)
    for entry in entries:
        digest.update(entry)
    return digest.hexdigest()
