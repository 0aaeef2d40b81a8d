"""The position of an ordered reading, apart from how messages travel: what to do with each delivery.

Deliveries carry two numbers: the stream sequence of the message, and the number of the delivery since the reading was
(re)started at its position, from 1. They tell apart what the broker must not do from what a network may:

1. a delivery number is missing: something was lost on the way, start again at the position;
2. a sequence that was handed out already: a redelivery, skip it;
3. a sequence is missing though no delivery is, in an unfiltered reading: the log itself has a gap, LogBroken.
"""

from __future__ import annotations

from enum import Enum

from schemas.errors import LogBroken


class Verdict(Enum):
    TAKE = "take"
    SKIP = "skip"
    RESTART = "restart"


class Cursor:
    """Position `last` of one reading of `stream`; `done` once a finite reading has reached its end.

    >>> cursor = Cursor("LOG_r", last=7, until=None, filtered=False)
    >>> cursor.take(seq=8, delivery=1, pending=0)
    <Verdict.TAKE: 'take'>
    """

    def __init__(self, stream: str, *, last: int, until: int | None, filtered: bool) -> None:
        self.stream, self.last, self.until, self.filtered = stream, last, until, filtered
        self.done = until is not None and last >= until
        self._delivered = 0

    def missed(self, last_delivery: int) -> bool:
        """Whether the sender's last delivery, as its heartbeat states it, never arrived."""
        return last_delivery > self._delivered

    def restart(self, *, stream_end: int, pending: int) -> None:
        """Deliveries begin again with number 1; `pending` messages wait behind the position now. LogBroken when the
        stream ends before it."""
        self._delivered = 0
        if stream_end < self.last:
            raise LogBroken(
                f"the stream ends at {stream_end}, yet {self.last} had been read from it",
                where=self.stream,
                remedy="restore the stream from a copy, or start a new run; messages that were stored are lost",
            )
        self._end_at(self.last, pending)

    def follow(self) -> None:
        """Like `take` of the next delivery with the next sequence, short of the end: the usual case."""
        self._delivered += 1
        self.last += 1

    def follow_to(self, seq: int) -> None:
        """The same in an endless filtered reading, where the next message may have any later sequence."""
        self._delivered += 1
        self.last = seq

    def take(self, *, seq: int, delivery: int, pending: int) -> Verdict:
        """The verdict on one delivery with `pending` messages behind it. Moves the position when it is taken."""
        if delivery != self._delivered + 1:
            return Verdict.RESTART
        self._delivered = delivery
        if seq <= self.last:
            self._end_at(self.last, pending)
            return Verdict.SKIP
        if not self.filtered and seq != self.last + 1:
            raise LogBroken(
                f"sequences {self.last + 1} to {seq - 1} are missing: {self.last} is followed by {seq}",
                where=self.stream,
                remedy="restore the stream from a copy; nothing may be decided on a log with a gap",
            )
        self._end_at(seq, pending)
        if self.until is not None and seq > self.until:
            return Verdict.SKIP
        self.last = seq
        return Verdict.TAKE

    def _end_at(self, seq: int, pending: int) -> None:
        if self.until is not None and (seq >= self.until or pending == 0):
            self.done = True
