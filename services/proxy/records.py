"""Entries of one attempt in RECORDS: written in order, read back for a new life, for another proxy, and for the seal.

    append, append, ...  each expects the last sequence that its writer has read of the attempt ──> closed (the fence)

An entry is published under its call's subject with an id of its content and its writer: publishing it again after an
unknown outcome stores it once. Whoever hasn't read all that others stored gets a Conflict, catches up and decides again,
so any number of proxies write one sequence. Where there are several, or an entry may still be on its way, who seals stores
`Closed` in the same way: whoever would append after it has to read it first, and is refused. The seal describes what lies in
the stream before it, whatever we believe that we have written.
"""

from __future__ import annotations

import hashlib

from schemas import streams
from schemas.errors import Conflict
from schemas.events import ExecutionSealed
from schemas.records import Closed, GivenUp, RecordEntry
from services.mesh.bus import Bus, Stored
from services.mesh.tree_codec import decode_record, digest_records, encode_record


class Ledger:
    """Not for concurrent use: its owner holds a lock over each call. `writer` tells it from all others."""

    def __init__(self, *, bus: Bus, run: str, execution: str, attempt: int, writer: str) -> None:
        self._bus, self._run, self._execution, self._attempt = bus, run, execution, attempt
        self._writer = writer
        self._stream = streams.records_stream(run)
        self._scope = streams.records_filter(run, execution, attempt)
        self.last = 0
        """Stream sequence up to which the owner knows the entries."""
        self.doubtful = False
        """Whether an entry may be on its way that nobody waits for any more: it is stored unless another comes before it."""

    def __repr__(self) -> str:
        return f"<Ledger {self._execution}.{self._attempt} [last {self.last}]>"

    async def catch_up(self) -> list[RecordEntry]:
        """Entries in the stream that the owner doesn't know yet."""
        found = await self._read(self.last)
        if found:
            self.last = found[-1].seq
        return [decode_record(stored.data) for stored in found]

    async def append(self, entry: RecordEntry) -> None:
        """Store one entry. Raises Conflict when there are entries that the owner doesn't know (then `catch_up`), and
        BusError when the outcome is unknown."""
        self.doubtful = True
        try:
            self.last = await self._publish(entry, self.last)
        except Conflict:
            self.doubtful = False
            raise
        self.doubtful = False

    async def sealed(self, *, fenced: bool) -> ExecutionSealed:
        """Number, last sequence and digest of all entries; `fenced` stores first that none follows."""
        entries = await self._read(0)
        while fenced and not (entries and isinstance(decode_record(entries[-1].data), Closed)):
            last = entries[-1].seq if entries else 0
            try:
                await self._publish(Closed(execution=self._execution, attempt=self._attempt), last)
                break
            except Conflict:
                entries += await self._read(last)
        if entries and isinstance(decode_record(entries[-1].data), Closed):
            entries.pop()
        return ExecutionSealed(
            attempt=self._attempt,
            records=len(entries),
            last_record=entries[-1].seq if entries else 0,
            digest=digest_records(stored.data for stored in entries),
        )

    async def _publish(self, entry: RecordEntry, expected: int) -> int:
        if isinstance(entry, Closed):
            subject = streams.closed_subject(self._run, self._execution, self._attempt)
        elif isinstance(entry, GivenUp):
            subject = streams.given_up_subject(self._run, self._execution, self._attempt)
        else:
            subject = streams.record_subject(self._run, self._execution, self._attempt, entry.call)
        data = encode_record(entry)
        # An id that others use too would pass off theirs as ours, and what lies before it as read.
        digest = hashlib.blake2b(data, digest_size=8).hexdigest()
        msg_id = f"{self._execution}.{self._attempt}.{digest}.{self._writer}"
        return await self._bus.publish(
            self._stream,
            subject,
            data,
            msg_id=msg_id,
            expect_last_subject=expected,
            expect_filter=self._scope,
        )

    async def _read(self, after: int) -> list[Stored]:
        newest = await self._bus.last_for(self._stream, self._scope)
        if newest is None or newest.seq <= after:
            return []
        return [s async for s in self._bus.read_range(self._stream, after, newest.seq, subject_filter=self._scope)]
