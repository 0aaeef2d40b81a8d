"""The event bus: the face that services see, whatever carries it.

Two implementations pass one test suite: `nats_bus` over JetStream and `memory_bus` in one process on a clock of choice.

Invariants of the face
- a publish either returns the sequence at which its message is stored, exactly once whatever was lost on the way, or
  raises: `SequenceConflict` means that nothing was stored, any other `BusError` after a deadline means unknown;
- an unfiltered reader yields each sequence once, in order, without a gap, across reconnects and server restarts;
- what a message looks like (headers, time) doesn't depend on the path on which it was read.
"""

from __future__ import annotations

import functools
import re
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Protocol, Self

import msgspec

from schemas.errors import BusError, Conflict

MSG_ID = "Nats-Msg-Id"
EXPECTED_STREAM = "Nats-Expected-Stream"
EXPECTED_LAST = "Nats-Expected-Last-Subject-Sequence"
EXPECTED_LAST_FILTER = "Nats-Expected-Last-Subject-Sequence-Subject"

DUPLICATE_WINDOW_S = 120.0
"""Seconds for which a stream remembers a Msg-Id."""
PUBLISH_DEADLINE_S = 30.0
"""Seconds after which a publish without an answer gives up; well inside the duplicate window."""

Filter = str | Sequence[str]
"""One filter of subjects, or several of which no two can match the same subject: a reader gets what any of them
matches."""

_RUN_NAME = re.compile(r"[A-Za-z0-9_-]+")
_SUBJECT = re.compile(r"[^\s.*>]+(?:\.[^\s.*>]+)*")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """A message as it lies in a stream."""

    seq: int
    """Stream sequence, from 1, without gaps."""
    subject: str
    time_us: int
    """Stored time in whole microseconds since the epoch, truncated by `time_us_of`."""
    headers: dict[str, str]
    data: bytes

    @property
    def msg_id(self) -> str:
        """The id with which it was published, empty for a message published without one."""
        return self.headers.get(MSG_ID, "")


class SequenceConflict(Conflict):
    """Somebody else published first under the same filter. Nothing of ours was stored."""

    def __init__(self, *, subject: str, expect_filter: str, expected: int, last_seq: int) -> None:
        self.subject = subject
        self.expect_filter = expect_filter
        self.expected = expected
        self.last_seq = last_seq
        """Sequence of the last message under `expect_filter`, 0 when there is none."""
        super().__init__(
            f"expected {expected} as the last sequence under {expect_filter}, it is {last_seq}",
            where=subject,
            remedy=f"read {expect_filter} up to {last_seq} and decide again",
        )


class Reader(Protocol):
    """An ordered reading of a stream.

    Cancelling a pending `__anext__` (a time-out around it) loses nothing: the next call goes on where it stood.
    """

    def __aiter__(self) -> AsyncIterator[Stored]: ...

    async def __anext__(self) -> Stored: ...

    async def aclose(self) -> None:
        """Ends the reading; a pending `__anext__` raises StopAsyncIteration. May be called again."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Bus(Protocol):
    """The streams and blobs of one run, as one service is connected to them."""

    @property
    def run(self) -> str: ...

    async def open_run(self) -> None:
        """Creates LOG, RECORDS and BLOBS of the run where they are absent. Idempotent.

        Raises BusError that names the field when one exists with another configuration."""

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
        """Stores `data` once and returns its sequence; the old sequence when `msg_id` is stored already.

        With `expect_last_subject` it is stored only while that is the last sequence under `expect_filter` (default: the
        subject itself; 0 means nothing yet), else `SequenceConflict`. A lost answer is resolved by publishing again
        with the same id and reading back; BusError after `deadline_s` means that the outcome is unknown."""

    def read(self, stream: str, after: int, *, subject_filter: Filter | None = None) -> Reader:
        """Every message with a sequence above `after`, then those to come, without end.

        Raises LogBroken, while reading, when a sequence is missing or the stream ends before `after`."""

    def read_range(self, stream: str, after: int, until: int, *, subject_filter: Filter | None = None) -> Reader:
        """The messages with `after < seq <= until` that are stored by now; ends by itself."""

    async def last_seq(self, stream: str) -> int:
        """Sequence of the last message, 0 in an empty stream."""

    async def last_for(self, stream: str, subject_filter: str) -> Stored | None:
        """The last message under the filter."""

    async def next_for(self, stream: str, subject_filter: str, after: int) -> Stored | None:
        """The first message under the filter with a sequence above `after`."""

    async def get(self, stream: str, seq: int) -> Stored:
        """The message at a sequence; BusError when there is none."""

    async def put_blob(self, name: str, data: bytes) -> str:
        """Stores `data` under `name`, replacing what was there, and returns its SHA-256 in hex.

        The same content again writes nothing. Readers see the old content or the new one, never a mixture."""

    async def get_blob(self, name: str) -> bytes:
        """Raises BusError when it is absent or its digest doesn't match."""

    async def blob_exists(self, name: str) -> bool: ...

    async def close(self) -> None:
        """Ends all readers, sends what is pending, disconnects. May be called again."""


def time_us_of(nanoseconds: int) -> int:
    """Stored time of a message in whole microseconds, truncated: the one place where digits are dropped.

    Every read path gets whole nanoseconds first, as an integer, and never goes through a float."""
    return nanoseconds // 1000


def check_run(run: str) -> str:
    """A run's name becomes part of stream names. Raises BusError for one that cannot."""
    if not _RUN_NAME.fullmatch(run):
        raise BusError(
            f"the run name {run!r} cannot be part of a stream name", remedy="use letters, digits, '-' and '_' only"
        )
    return run


def check_subject(subject: str) -> str:
    """Raises BusError unless `subject` is a literal subject: non-empty tokens, no wildcard, no space."""
    if _is_plain(subject) and ".." not in subject and subject[:1] not in "." and subject[-1] != ".":
        return subject
    if not _SUBJECT.fullmatch(subject):
        raise BusError(
            f"{subject!r} is not a subject to publish to", remedy="use non-empty tokens without spaces, '*' and '>'"
        )
    return subject


def _is_plain(text: str) -> bool:
    """Whether nothing in it needs a closer look. Of what is printable only the space is white."""
    return text.isprintable() and " " not in text and "*" not in text and ">" not in text


@functools.lru_cache(maxsize=256)
def _check_names(names: tuple[str, ...]) -> None:
    for name in names:
        if _HEADER_NAME.fullmatch(name) is None or name.startswith("Nats-"):
            raise BusError(f"{name!r} cannot be the name of a header", remedy="use a token that isn't one of Nats-*")


def check_headers(headers: dict[str, str]) -> dict[str, str]:
    """Raises BusError for headers that would not come back as they were given."""
    _check_names(tuple(headers))
    if _is_plain("".join(headers.values())):
        return headers
    for name, value in headers.items():
        if value != value.strip() or not value.isprintable():
            raise BusError(f"the header {name} cannot hold {value!r}", remedy="percent-encode the value")
    return headers


def subject_matches(subject_filter: str, subject: str) -> bool:
    """Whether a subject falls under a filter: `*` is one token, `>` at the end is one or more."""
    if "*" not in subject_filter:
        open_ended = subject_filter.endswith(">")
        return subject.startswith(subject_filter[:-1]) if open_ended else subject == subject_filter
    wanted, tokens = subject_filter.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted.pop()
        if len(tokens) <= len(wanted):
            return False
    elif len(tokens) != len(wanted):
        return False
    return all(want == "*" or want == token for want, token in zip(wanted, tokens, strict=False))


class Subjects:
    """Filters made ready for many subjects.

    >>> Subjects(["a.*.b.>", "c.>"]).match("a.1.b.2")
    True
    """

    def __init__(self, subject_filter: Filter) -> None:
        self.filters = (subject_filter,) if isinstance(subject_filter, str) else tuple(subject_filter)

    @property
    def depth(self) -> int:
        """Whether a subject matches depends on its first so many tokens, and on whether more follow; 0: on all of it."""
        open_ended = all(each.endswith(".>") for each in self.filters)
        return max((each.count(".") for each in self.filters), default=0) if open_ended else 0

    def match(self, subject: str) -> bool:
        return any(subject_matches(each, subject) for each in self.filters)
