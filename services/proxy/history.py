"""The messages of requests, read once: a harness sends its whole history with every call.

A history keeps the body of its last request and where each message lies in it. A body that begins with the same bytes up
to the end of one of them begins with the same messages, however many: they are neither taken apart nor read again.

    {"model":"m","messages":[ {..} , {..} , {..} ],"tools":[..]}
                             │  kept   │  new  │
                           start    its end    what follows is read with each request

Invariants
- what is returned depends on the messages alone, never on what was read before: bytes are compared whole;
- messages that stay read stay the same objects, by which `services.proxy.tree` knows them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from services.proxy.transcript import START, Mark, Transcript

_DIGEST = 16
_BETWEEN = b" \t\n\r,"
_REWRITTEN = 4
"""So many of the last messages may differ in a body that continues another: harnesses move their marks along."""

Fold = Callable[[Transcript, bytes, int], None]
"""Adds one message, by its bytes and index."""


class Span(NamedTuple):
    """Where a message lies in a body."""

    start: int
    end: int


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

    items: Sequence[bytes]
    """As they came, those of `known` aside."""
    data: bytes
    """In which they lie."""
    spans: Sequence[Span]
    """Of the items."""
    start: int = -1
    """Where the list of messages begins in `data`, if that is a body."""
    known: Known | None = None


def loose(items: Sequence[bytes]) -> Told:
    """Messages by themselves."""
    return Told(items, b"".join(items), [Span(*each) for each in pairwise(accumulate(map(len, items), initial=0))])


def spans(data: bytes, items: Sequence[bytes], at: int) -> list[Span] | None:
    """Where JSON values lie that follow each other from `at`; None where they don't."""
    found = []
    for item in items:
        while data[at : at + 1] in _BETWEEN:
            at += 1
        if not data.startswith(item, at):
            return None
        found.append(Span(at, at + len(item)))
        at += len(item)
    return found


class History:
    """Messages that were read, in order."""

    def __init__(self, dialect: str, first: bytes) -> None:
        self.key = (dialect, first)
        """The first message is a history's own: no other of the dialect begins with it."""
        self.transcript = Transcript()
        self._data = b""
        self._start = -1
        self._spans: list[Span] = []
        self._marks: list[Mark] = []
        self._links: list[bytes] = []
        """Digest of the messages up to each."""

    def __repr__(self) -> str:
        return f"<History [{len(self._spans)} messages, {self.size} bytes]>"

    @property
    def size(self) -> int:
        """Bytes that it keeps."""
        return len(self._data)

    @property
    def digest(self) -> bytes:
        """Of all messages as they came."""
        return self._links[-1] if self._links else b""

    def known(self, data: bytes) -> Known | None:
        """What a body begins with, if it continues the last one."""
        if self._start < 0 or not self._spans or not data.startswith(self.key[1], self._spans[0].start):
            return None
        count = len(self._spans)
        for messages in range(count, max(0, count - _REWRITTEN), -1):
            start, end = self._spans[messages - 1]
            # By itself first, so that all before it is compared once.
            if data[start:end] == self._data[start:end]:
                return Known(self, messages, self._start, end) if data.startswith(self._data[:end]) else None
        return None

    def read(self, told: Told, fold: Fold) -> Transcript:
        """The transcript of these messages. What `fold` raises leaves those before it read."""
        same, items, places = 0, told.items, told.spans
        if told.known is not None:
            assert told.known.history is self
            same = told.known.messages
            del self._spans[same:]
        else:
            for item, (start, end) in zip(items, self._spans, strict=False):
                if item != self._data[start:end]:
                    break
                same += 1
            items, self._spans, places = items[same:], list(places[:same]), places[same:]
        self._data, self._start = told.data, told.start
        del self._marks[same:], self._links[same:]
        self.transcript.rewind(self._marks[-1] if self._marks else START)
        for index, (item, place) in enumerate(zip(items, places, strict=True), same):
            fold(self.transcript, item, index)
            self._links.append(hashlib.blake2b(self.digest + item, digest_size=_DIGEST).digest())
            self._marks.append(self.transcript.mark())
            self._spans.append(place)
        return self.transcript
