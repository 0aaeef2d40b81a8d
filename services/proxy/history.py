"""The messages of requests, read once: a harness sends its whole history with every call.

A history keeps its last request up to the end of the messages. A body that begins with the same bytes up to the end of
one of them begins with the same messages, however many: they are neither taken apart nor read again.

    {"model":"m","messages":[ {..} , {..} , {..} ],"tools":[..]}
    └──────── front ────────┘└────┘└─────┘└─────┘└── read with each request
                              pieces: each with what is before it

Invariants
- what is returned depends on the messages alone, never on what was read before: bytes are compared whole;
- messages that stay read stay the same objects, by which `services.proxy.tree` knows them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from services.proxy.transcript import START, Mark, Transcript

_DIGEST = 16
_BETWEEN = b" \t\n\r,"
_BLANKS = frozenset(bytes([each]) for each in _BETWEEN)
_REWRITTEN = 4
"""One less of the last messages may differ in a body that continues another: harnesses move their marks along."""

_RECENT = 32
"""Messages at the end that may be cut without copying those before."""

Fold = Callable[[Transcript, bytes, int], None]
"""Adds one message, by its bytes and index."""


class Known(NamedTuple):
    """The beginning of a body that a history has read."""

    history: History
    messages: int
    start: int
    """Where the list of messages begins, its bracket left out."""
    end: int
    """Where the last of these messages ends."""


class Told(NamedTuple):
    """The messages of one request."""

    pieces: Sequence[bytes]
    """Each as it came, with what is between it and the one before; those of `known` aside."""
    front: bytes | None = None
    """What came before them in the body; None for messages by themselves."""
    known: Known | None = None

    @property
    def first(self) -> bytes:
        return item(self.pieces[0]) if self.pieces else b""


def item(piece: bytes) -> bytes:
    """A JSON value without what is before it in its list."""
    return piece.lstrip(_BETWEEN)


def pieces(data: bytes, items: Sequence[bytes], at: int) -> list[bytes] | None:
    """JSON values with what is before each, where they follow each other from `at`; None where they don't."""
    found = []
    for value in items:
        start = at
        while data[start : start + 1] in _BLANKS:
            start += 1
        if not data.startswith(value, start):
            return None
        end = start + len(value)
        found.append(data[at:end])
        at = end
    return found


class History:
    """Messages that were read, in order."""

    def __init__(self, dialect: str, first: bytes) -> None:
        self.key = (dialect, first)
        """The first message is a history's own: no other of the dialect begins with it."""
        self.transcript = Transcript()
        self._start = -1
        """Where the list of messages begins in a body; -1 where that isn't known."""
        self._settled, self._recent = b"", bytearray()
        """What is kept, in two parts: only the second changes from one request to the next."""
        self._spans: list[tuple[int, int]] = []
        """Where each message lies in that."""
        self._marks: list[Mark] = []
        self._links: list[bytes] = []
        """Digest of the messages up to each."""

    def __repr__(self) -> str:
        return f"<History [{len(self._spans)} messages, {self.size} bytes]>"

    @property
    def size(self) -> int:
        """Bytes that are kept."""
        return len(self._settled) + len(self._recent)

    @property
    def digest(self) -> bytes:
        """Of all messages as they came."""
        return self._links[-1] if self._links else b""

    def known(self, data: bytes) -> Known | None:
        """What a body begins with, if it continues the last one."""
        if self._start < 0 or not self._spans or not data.startswith(self.key[1], self._spans[0][0]):
            return None
        at, count = len(self._settled), len(self._spans)
        for messages in range(count, max(0, count - _REWRITTEN), -1):
            start, end = self._spans[messages - 1]
            # The last one first, by itself, so that what is long is compared once, and copied never.
            if start >= at and data[start:end] == self._recent[start - at : end - at]:
                if data.startswith(self._settled) and data[at:end] == self._recent[: end - at]:
                    return Known(self, messages, self._start, end)
                return None
        return None

    def read(self, told: Told, fold: Fold) -> Transcript:
        """The transcript of these messages. What `fold` raises leaves those before it read."""
        more = told.pieces
        if told.known is not None:
            assert told.known.history is self
            same = told.known.messages
            self._cut(same)
        else:
            same = self._shared(more)
            self._cut(0)
            self._start = -1 if told.front is None else len(told.front)
            self._settled, self._recent = b"", bytearray(told.front or b"")
            for piece in more[:same]:
                self._add(piece)
            more = more[same:]
        del self._marks[same:], self._links[same:]
        self.transcript.rewind(self._marks[-1] if self._marks else START)
        for index, piece in enumerate(more, same):
            value = item(piece)
            fold(self.transcript, value, index)
            self._links.append(hashlib.blake2b(self.digest + value, digest_size=_DIGEST).digest())
            self._marks.append(self.transcript.mark())
            self._add(piece)
        self._settle()
        return self.transcript

    def _shared(self, pieces: Sequence[bytes]) -> int:
        """How many messages begin both these and those here."""
        kept = self._settled + self._recent
        for count, (piece, (start, end)) in enumerate(zip(pieces, self._spans, strict=False)):
            if item(piece) != kept[start:end]:
                return count
        return min(len(pieces), len(self._spans))

    def _add(self, piece: bytes) -> None:
        self._recent += piece
        self._spans.append((self.size - len(item(piece)), self.size))

    def _cut(self, count: int) -> None:
        if count < len(self._spans):
            end = self._spans[count - 1][1] if count else 0
            del self._spans[count:]
            del self._recent[max(0, end - len(self._settled)) :]
            self._settled = self._settled[:end]

    def _settle(self) -> None:
        """All but the last messages are in the first part, as far as they were not there before."""
        if len(self._spans) > 2 * _RECENT and self._spans[-2 * _RECENT][0] >= len(self._settled):
            end = self._spans[-_RECENT][0] - len(self._settled)
            self._settled += self._recent[:end]
            del self._recent[:end]
