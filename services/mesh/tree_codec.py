"""Bytes of what lies in RECORDS and of frozen trees (MessagePack)."""

from __future__ import annotations

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
