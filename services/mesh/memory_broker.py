"""Streams in memory that answer as JetStream with one replica does, on a clock of choice.

Order of the checks of a publish: stream, size, expected last sequence, then duplicates; a refused or duplicate publish
takes no sequence. Stored times never decrease. Finding the last message under a filter costs the depth of the subject
and the fan-out of its `*`, not the length of the stream.

What a server does to its clients as a whole, measured on nats-server 2.15:

- `stop` and `start`: connections break, what is on its way is lost, consumers are gone and readers make new ones. Streams
  and blobs are as they were; message ids are remembered still, by the stored times of their messages;
- `fill`, its disk is full: what is to be written is neither stored nor answered, reading goes on. Freeing space mends
  nothing before the server is started again.
"""

from __future__ import annotations

import contextvars
from collections import deque
from collections.abc import Callable
from typing import Protocol

from schemas.errors import BusError
from services.mesh import bus as face
from services.mesh.bus import Stored, Subjects, subject_matches
from services.mesh.clock import MICROSECONDS, Clock
from services.mesh.publishing import WrongSequence

MAX_PAYLOAD = 1024 * 1024
"""Bytes of headers and data, nats-server's default."""
_HEADERS_ROOM = 16 * 1024
"""Bytes that headers never take: messages smaller by that need no exact count."""


class Waiting(Protocol):
    """A reader that has read everything."""

    def wake(self) -> None: ...


class Client(Protocol):
    """A connection to the broker."""

    def disconnect(self) -> None: ...

    def reconnect(self) -> None: ...


class SubjectTree:
    """Last sequence of each subject, by token; a node also knows the highest sequence below it."""

    __slots__ = ("all", "below", "children", "here")

    def __init__(self) -> None:
        self.children: dict[str, SubjectTree] = {}
        self.all: list[int] = []
        """Sequences of all messages with the subject."""
        self.here = 0
        self.below = 0

    def add(self, subject: str, seq: int) -> None:
        node = self
        for token in subject.split("."):
            node.below = seq
            child = node.children.get(token)
            if child is None:
                child = node.children[token] = SubjectTree()
            node = child
        node.here = seq
        node.all.append(seq)

    def under(self, tokens: list[str]) -> list[int]:
        """Sequences of the messages under a filter given as its tokens, subject by subject."""
        if not tokens:
            return self.all
        token, rest = tokens[0], tokens[1:]
        if token == ">":
            deeper = [node.under([">"]) for node in self.children.values()]
            return [
                seq for node, more in zip(self.children.values(), deeper, strict=True) for seq in (*node.all, *more)
            ]
        if token == "*":
            return [seq for node in self.children.values() for seq in node.under(rest)]
        child = self.children.get(token)
        return child.under(rest) if child is not None else []

    def last(self, tokens: list[str], at: int = 0) -> int:
        """Highest sequence under a filter given as its tokens from `at` on, 0 when there is none."""
        node = self
        for place in range(at, len(tokens)):
            token = tokens[place]
            if token == ">":
                return node.below
            if token == "*":
                return max([child.last(tokens, place + 1) for child in node.children.values()], default=0)
            child = node.children.get(token)
            if child is None:
                return 0
            node = child
        return node.here


class View:
    """What of a stream falls under filters: for readers that follow it, so that they needn't look at the rest."""

    def __init__(self, subjects: Subjects) -> None:
        self.subjects = subjects
        self.seqs: list[int] = []
        """Sequences of its messages, in order."""
        self.waiting: dict[Waiting, None] = {}
        """In the order in which they began to wait."""

    def wake(self) -> None:
        if self.waiting:
            waiting, self.waiting = self.waiting, {}
            for reader in waiting:
                reader.wake()


class MemoryStream:
    """One stream. `messages[i]` has the sequence i + 1; None where a test erased it."""

    def __init__(self, name: str, subjects: list[str], clock: Clock) -> None:
        self.name, self.subjects = name, subjects
        self.messages: list[Stored | None] = []
        self.waiting: dict[Waiting, None] = {}
        """In the order in which they began to wait; those of a view wait there."""
        self._views: dict[tuple[str, ...], View] = {}
        self._depth = 0
        self._concerned: dict[tuple[str, ...], list[View]] = {}
        """By the first `_depth` tokens of a subject: the views that it falls under."""
        self.on_store: Callable[[Stored], None] | None = None
        """Called with each message that is stored, before any reader sees it."""
        self._clock = clock
        self._prefixes = tuple(each[:-1] for each in subjects if each.endswith(".>"))
        self._tree = SubjectTree()
        self._ids: dict[str, int] = {}
        """Message id to its sequence, for as long as it is remembered."""
        self._remembered: deque[tuple[int, str]] = deque()
        """Stored time and message id, the oldest first."""
        self._last_time = 0

    def __repr__(self) -> str:
        return f"<MemoryStream {self.name} [{len(self.messages)} messages, {len(self.waiting)} waiting]>"

    def takes(self, subject: str) -> bool:
        """Whether messages with the subject belong here."""
        return subject.startswith(self._prefixes) or any(subject_matches(each, subject) for each in self.subjects)

    def store(self, subject: str, data: bytes, headers: dict[str, str]) -> int:
        """The sequence of the message, the old one of a duplicate. Raises WrongSequence or BusError."""
        size = len(data)
        if size > MAX_PAYLOAD - _HEADERS_ROOM:
            size += sum(len(name) + len(value) + 4 for name, value in headers.items())
        if size > MAX_PAYLOAD:
            raise BusError(
                f"a message of {len(data)} bytes is larger than the server takes ({MAX_PAYLOAD})",
                where=subject,
                remedy="put the content into BLOBS and publish its name and digest",
            )
        if face.EXPECTED_LAST in headers:
            last = self.last_under(headers.get(face.EXPECTED_LAST_FILTER, subject))
            if last != int(headers[face.EXPECTED_LAST]):
                raise WrongSequence(f"wrong last sequence: {last}")
        now = self._last_time = max(self._last_time, self._clock.now_us())
        self._forget_ids(now)
        known = self._ids.get(headers[face.MSG_ID])
        if known is not None:
            return known
        seq = len(self.messages) + 1
        stored = Stored(seq=seq, subject=subject, time_us=now, headers=headers, data=data)
        self.messages.append(stored)
        self._tree.add(subject, seq)
        self._ids[headers[face.MSG_ID]] = seq
        self._remembered.append((now, headers[face.MSG_ID]))
        if self.on_store is not None:
            self.on_store(stored)
        for view in self._views_of(subject):
            view.seqs.append(seq)
            view.wake()
        self._wake()
        return seq

    def _views_of(self, subject: str) -> list[View]:
        tokens = tuple(subject.split(".", self._depth))
        if not self._depth or len(tokens) <= self._depth:
            return [view for view in self._views.values() if view.subjects.match(subject)]
        known = self._concerned.get(tokens[:-1])
        if known is None:
            known = self._concerned[tokens[:-1]] = [v for v in self._views.values() if v.subjects.match(subject)]
        return known

    def at(self, seq: int) -> Stored | None:
        return self.messages[seq - 1] if 0 < seq <= len(self.messages) else None

    def last_under(self, subject_filter: str) -> int:
        return self._tree.last(subject_filter.split("."))

    def under(self, subjects: Subjects) -> list[int]:
        """Sequences of the messages under the filters."""
        return sorted({seq for each in subjects.filters for seq in self._tree.under(each.split("."))})

    def next_under(self, subject_filter: str, after: int) -> Stored | None:
        if self.last_under(subject_filter) <= after:
            return None
        for stored in self.messages[after:]:
            if stored is not None and subject_matches(subject_filter, stored.subject):
                return stored
        return None

    def view(self, subjects: Subjects) -> View:
        """The one of these filters; kept from now on."""
        view = self._views.get(subjects.filters)
        if view is None:
            view = self._views[subjects.filters] = View(subjects)
            view.seqs = self.under(subjects)
            depths = [each.subjects.depth for each in self._views.values()]
            self._depth = max(depths) if all(depths) else 0
            self._concerned.clear()
        return view

    def known_view(self, subjects: Subjects) -> View | None:
        """The one of these filters, where somebody follows it."""
        return self._views.get(subjects.filters)

    def wake_readers(self) -> None:
        for view in self._views.values():
            view.wake()
        self._wake()

    def _wake(self) -> None:
        if self.waiting:
            waiting, self.waiting = self.waiting, {}
            for reader in waiting:
                reader.wake()

    def erase(self, seq: int) -> None:
        """Fault: makes a hole in the log."""
        self.messages[seq - 1] = None

    def truncate(self, end: int) -> None:
        """Fault: a power failure that takes every message after `end` with it."""
        del self.messages[end:]
        self._ids = {msg_id: seq for msg_id, seq in self._ids.items() if seq <= end}
        self._remembered = deque(each for each in self._remembered if each[1] in self._ids)
        self._tree = SubjectTree()
        for stored in self.messages:
            if stored is not None:
                self._tree.add(stored.subject, stored.seq)
        for view in self._views.values():
            view.seqs = self.under(view.subjects)
        self.wake_readers()

    def _forget_ids(self, now: int) -> None:
        oldest = now - int(face.DUPLICATE_WINDOW_S * MICROSECONDS)
        remembered = self._remembered
        while remembered and remembered[0][0] <= oldest:
            del self._ids[remembered.popleft()[1]]


class MemoryBroker:
    """What the buses of one process share: streams by name; blobs, as (SHA-256 in hex, content), by bucket and name."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.streams: dict[str, MemoryStream] = {}
        self.blobs: dict[str, dict[str, tuple[str, bytes]]] = {}
        self.up, self.full = True, False
        self.clients: dict[Client, None] = {}
        self.context = contextvars.copy_context()
        """In which the broker works: not in that of whoever asks."""

    def __repr__(self) -> str:
        state = "down" if not self.up else "full" if self.full else "up"
        return f"<MemoryBroker [{state}, {len(self.clients)} clients] {list(self.streams.values())}>"

    def stop(self) -> None:
        """Fault: the server is gone; its clients are disconnected."""
        self.up = False
        for client in list(self.clients):
            client.disconnect()

    def start(self) -> None:
        """The server is there again, with room on its disk."""
        self.up, self.full = True, False
        for client in list(self.clients):
            client.reconnect()

    def fill(self) -> None:
        """Fault: the disk is full, until `start`."""
        self.full = True

    def ensure_stream(self, name: str, subjects: list[str]) -> None:
        known = self.streams.setdefault(name, MemoryStream(name, subjects, self.clock))
        if known.subjects != subjects:
            raise BusError(
                f"the stream exists with another configuration: subjects is {known.subjects}, expected {subjects}",
                where=name,
                remedy="start a run with another name, or remove the stream if nobody needs what is in it",
            )

    def stream(self, name: str) -> MemoryStream:
        known = self.streams.get(name)
        if known is None:
            raise BusError("there is no such stream", where=name, remedy="open the run first, or check its name")
        return known

    def bucket(self, name: str) -> dict[str, tuple[str, bytes]]:
        known = self.blobs.get(name)
        if known is None:
            raise BusError("there is no such object store", where=name, remedy="open the run first")
        return known
