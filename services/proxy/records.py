"""Entries of one attempt in RECORDS: written in order, read back for a new life and for the seal.

An entry is published under its call's subject and an id of its content: publishing it again after an unknown outcome
stores it once, and a different record of the same call is a Conflict. The seal describes what lies in the stream,
whatever we believe that we have written.
"""

from __future__ import annotations

import hashlib

from schemas import streams
from schemas.events import ExecutionSealed
from schemas.records import CallRecord, RecordEntry
from services.mesh.bus import Bus, Stored
from services.mesh.tree_codec import decode_record, digest_records, encode_record


class Ledger:
    """Not for concurrent use: its owner holds a lock over each call."""

    def __init__(self, *, bus: Bus, run: str, execution: str, attempt: int) -> None:
        self._bus, self._run, self._execution, self._attempt = bus, run, execution, attempt
        self._stream = streams.records_stream(run)
        self.last = 0
        """Stream sequence up to which the owner knows the entries."""

    def __repr__(self) -> str:
        return f"<Ledger {self._execution}.{self._attempt} [last {self.last}]>"

    async def catch_up(self) -> list[RecordEntry]:
        """Entries in the stream that the owner doesn't know yet."""
        found = await self._read(self.last)
        if found:
            self.last = found[-1].seq
        return [decode_record(stored.data) for stored in found]

    async def append(self, entry: RecordEntry) -> None:
        """Store one entry. Raises Conflict when the call is recorded already by somebody else (then `catch_up`), and
        BusError when the outcome is unknown."""
        subject = streams.record_subject(self._run, self._execution, self._attempt, entry.call)
        data = encode_record(entry)
        # The id says what is stored: with the call's alone, another's record of this number would pass for ours.
        msg_id = f"{entry.call}.{hashlib.blake2b(data, digest_size=8).hexdigest()}"
        expected = 0 if isinstance(entry, CallRecord) else None
        seq = await self._bus.publish(self._stream, subject, data, msg_id=msg_id, expect_last_subject=expected)
        self.last = max(self.last, seq)

    async def sealed(self) -> ExecutionSealed:
        """Number, last sequence and digest of all entries."""
        entries = await self._read(0)
        return ExecutionSealed(
            attempt=self._attempt,
            records=len(entries),
            last_record=entries[-1].seq if entries else 0,
            digest=digest_records(stored.data for stored in entries),
        )

    async def _read(self, after: int) -> list[Stored]:
        scope = streams.records_filter(self._run, self._execution, self._attempt)
        newest = await self._bus.last_for(self._stream, scope)
        if newest is None or newest.seq <= after:
            return []
        return [s async for s in self._bus.read_range(self._stream, after, newest.seq, subject_filter=scope)]
