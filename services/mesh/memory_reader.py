"""An ordered reading of a stream in memory, with the position logic of any reading and losses on the way by choice."""

from __future__ import annotations

import asyncio
import contextvars
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from enum import Enum
from types import TracebackType
from typing import Any, Protocol, Self

import msgspec

from schemas.errors import LogBroken
from services.mesh.bus import Filter, Stored, Subjects
from services.mesh.memory_broker import MemoryBroker, MemoryStream, View, Waiting
from services.mesh.reading import Cursor, Verdict

_TURN = 64
"""Messages that a reader hands out before it lets others run."""


class DeliveryFate(Enum):
    """What becomes of one delivery to a reader."""

    ONCE = "once"
    TWICE = "twice"
    LOST = "lost"
    """The reader notices at the next delivery, after a reconnection, or by a heartbeat where the line has them."""


def always_once(stored: Stored) -> DeliveryFate:
    return DeliveryFate.ONCE


def by_timer(seconds: float, future: asyncio.Future[Any], result: Any) -> None:
    # Not in the context of whoever happened to store something: what waits is another's.
    asyncio.get_running_loop().call_later(seconds, _resolve, future, result, context=contextvars.Context())


def _resolve(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """What a connection to the broker takes, in seconds of the event loop. By default nothing takes time, and an answer
    that will not come is known at once, as is good for tests on a real clock."""

    way_s: float = 0.0
    """To the broker, and back where an answer is carried."""
    delivery_s: float = 0.0
    """From a message's storing to a reader that waits for it."""
    heartbeat_s: float = 0.0
    """After which a lost delivery is noticed though no other follows; 0 is never."""
    sits_out: bool = False
    """Who gets no answer waits for it until the time-out of the attempt."""
    carry: Callable[[float, asyncio.Future[Any], Any], None] = by_timer
    """Resolves a future, for which somebody waits, so many seconds later."""
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep
    """Takes so many seconds. A loop that can do better than a timer says how, here and above."""


class Connection(Protocol):
    """The bus, as its readers see it."""

    broker: MemoryBroker
    delivery_fate: Callable[[Stored], DeliveryFate]
    line: Line
    up: bool
    smooth: bool
    """Up, and nothing happens to deliveries."""


class MemoryReader:
    """Implements `Reader` over a stream in memory."""

    def __init__(
        self,
        bus: Connection,
        stream: str,
        after: int,
        *,
        until: int | None = None,
        subject_filter: Filter | None = None,
    ) -> None:
        self._bus, self._name = bus, stream
        self._subjects = Subjects(subject_filter) if subject_filter is not None else None
        self._view: View | None = None
        """Where an endless reading through filters finds what is for it."""
        self._found: tuple[int, list[int]] | None = None
        """What a finite one found, in a stream that was so long."""
        self._stream: MemoryStream | None = None
        self._cursor = Cursor(stream, last=after, until=until, filtered=subject_filter is not None)
        self._waiter: asyncio.Future[None] | None = None
        self._arrived: deque[tuple[int, Stored]] = deque()
        self._sent_to = 0
        self._deliveries = 0
        self._started = False
        self._closed = False
        self._broken: LogBroken | None = None
        self._turn = 0
        self._steady = False
        """Nothing is in the way of the next message: it follows the last one."""
        self._endless, self._until = until is None, until or 0

    def __repr__(self) -> str:
        return f"<MemoryReader {self._name} [last: {self._cursor.last}{', ended' if self.ended else ''}]>"

    @property
    def ended(self) -> bool:
        return self._closed or self._cursor.done

    def restart(self) -> None:
        """Goes on from the position, as after a reconnection."""
        self._started = self._steady = False
        self._notify()

    def wake(self) -> None:
        """Something was stored: it is here as soon as the line has carried it."""
        line, waiter = self._bus.line, self._waiter
        if waiter is not None and not waiter.done():
            if line.delivery_s:
                line.carry(line.delivery_s, waiter, None)
            else:
                waiter.set_result(None)

    def __aiter__(self) -> AsyncIterator[Stored]:
        return self._messages()

    async def _messages(self) -> AsyncIterator[Stored]:
        """What `__anext__` gives, one after the other; a generator is the quickest way to hand them out."""
        cursor, bus = self._cursor, self._bus
        while True:
            if self._steady and bus.smooth and self._stream is not None and self._subjects is None:
                messages = self._stream.messages
                end = len(messages) if self._endless else min(len(messages), self._until) - 1
                while cursor.last < end <= len(messages) and self._steady and bus.smooth:
                    self._turn += 1
                    if self._turn % _TURN == 0:
                        # Before the position moves: who is cancelled here has lost nothing.
                        await asyncio.sleep(0)
                        continue
                    stored = messages[cursor.last]
                    if stored is None:
                        break
                    cursor.follow()
                    self._sent_to += 1
                    self._deliveries += 1
                    yield stored
                if self._endless and self._steady and bus.smooth and cursor.last == len(messages):
                    await self._stored(self._stream.waiting)
                    continue
            elif self._steady and bus.smooth and self._stream is not None:
                messages, seqs = self._stream.messages, self._let_through(self._stream)
                end = len(seqs) if self._endless else bisect_left(seqs, min(len(messages), self._until))
                place = bisect_right(seqs, cursor.last)
                while place < end and self._steady and bus.smooth and seqs[place] <= len(messages):
                    self._turn += 1
                    if self._turn % _TURN == 0:
                        await asyncio.sleep(0)
                        continue
                    seq = seqs[place]
                    stored = messages[seq - 1]
                    if stored is None:
                        break
                    cursor.follow_to(seq)
                    self._sent_to = seq
                    self._deliveries += 1
                    place += 1
                    yield stored
                if self._view is not None and self._steady and bus.smooth and self._sent_to <= len(messages):
                    if not seqs or seqs[-1] <= cursor.last:
                        await self._stored(self._view.waiting)
                        continue
            try:
                stored = await self.__anext__()
            except StopAsyncIteration:
                return
            yield stored

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def __anext__(self) -> Stored:
        self._turn += 1
        if self._turn % _TURN == 0:
            await asyncio.sleep(0)
        while True:
            stored = self._following() if self._steady and self._bus.smooth else self._next()
            if stored is not None:
                return stored
            assert self._stream is not None, "where nothing follows, the stream was looked at"
            await self._stored(self._waiting())

    async def _stored(self, waiting: dict[Waiting, None]) -> None:
        """Until something was stored, or is different."""
        waiter = self._waiter = asyncio.get_running_loop().create_future()
        waiting[self] = None
        try:
            await waiter
        finally:
            self._waiter = None
            waiting.pop(self, None)

    async def aclose(self) -> None:
        self.end()

    def end(self) -> None:
        """`aclose`, for those who cannot wait."""
        self._closed, self._steady = True, False
        self._notify()
        if self._stream is not None:
            self._waiting().pop(self, None)

    def _notify(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _following(self) -> Stored | None:
        """The next message where nothing is in its way; None where there is none."""
        assert self._stream is not None
        if self._subjects is not None:
            return self._following_view(self._view, self._stream.messages) if self._view is not None else self._next()
        cursor, messages = self._cursor, self._stream.messages
        last = cursor.last
        if self._endless:
            if last == len(messages):
                return None
            near = last > len(messages)
        else:
            # A finite reading looks closer at its last message.
            near = last + 1 >= len(messages) or last + 1 >= self._until
        stored = None if near else messages[last]
        if stored is None:
            return self._next()
        cursor.follow()
        self._sent_to += 1
        self._deliveries += 1
        return stored

    def _following_view(self, view: View, messages: list[Stored | None]) -> Stored | None:
        seqs, last = view.seqs, self._cursor.last
        if len(messages) < self._sent_to:
            return self._next()
        if not seqs or seqs[-1] <= last:
            return None
        seq = seqs[bisect_right(seqs, last)]
        stored = messages[seq - 1]
        if stored is None:
            return self._next()
        self._cursor.follow_to(seq)
        self._sent_to = seq
        self._deliveries += 1
        return stored

    def _next(self) -> Stored | None:
        """The next message, whatever is in its way. Raises StopAsyncIteration at the end, LogBroken."""
        if self._broken is not None:
            raise self._broken
        stream = self._stream = self._stream or self._bus.broker.stream(self._name)
        stored = None
        if not self.ended and self._bus.up:
            try:
                stored = self._take(stream)
            except LogBroken as error:
                self._broken = error
                raise
        if self.ended and stored is None:
            self.end()
            raise StopAsyncIteration
        known = self._subjects is None or self._view is not None or not self._endless
        self._steady = known and not self.ended and not self._arrived and self._started
        return stored

    def _take(self, stream: MemoryStream) -> Stored | None:
        cursor = self._cursor
        while not self.ended:
            if not self._started or len(stream.messages) < self._sent_to:
                self._started = True
                self._arrived.clear()
                self._sent_to, self._deliveries = cursor.last, 0
                cursor.restart(stream_end=len(stream.messages), pending=len(stream.messages) - self._sent_to)
            elif self._arrived or self._send(stream):
                delivery, stored = self._arrived.popleft()
                pending = len(self._arrived) + len(stream.messages) - self._sent_to
                verdict = cursor.take(seq=stored.seq, delivery=delivery, pending=pending)
                if verdict is Verdict.TAKE:
                    return stored
                self._started = verdict is not Verdict.RESTART
            elif cursor.until is None:
                return None
            else:
                # A finite reading ends where the stream does; whether the rest matches the filter is known only now, and
                # so is how many deliveries there were.
                self._started = not cursor.missed(self._deliveries)
                cursor.done = self._started
        return None

    def _send(self, stream: MemoryStream) -> bool:
        """The broker's side: the next message that passes the filter travels to us, as its fate will have it."""
        while (stored := self._candidate(stream)) is not None:
            fate = self._bus.delivery_fate(stored)
            self._deliveries += 1
            if fate is not DeliveryFate.LOST:
                self._arrived.append((self._deliveries, stored))
            elif self._bus.line.heartbeat_s:
                # The sender's heartbeat names its last delivery.
                loop = asyncio.get_running_loop()
                loop.call_later(self._bus.line.heartbeat_s, self.restart, context=self._bus.broker.context)
            if fate is DeliveryFate.TWICE:
                self._deliveries += 1
                self._arrived.append((self._deliveries, stored))
            if self._arrived:
                return True
        return False

    def _candidate(self, stream: MemoryStream) -> Stored | None:
        """The next message that is for this reader; None when there is none yet."""
        if self._subjects is None:
            while self._sent_to < len(stream.messages):
                self._sent_to += 1
                stored = stream.at(self._sent_to)
                if stored is not None:
                    return stored
            return None
        seqs = self._let_through(stream)
        for place in range(bisect_right(seqs, self._sent_to), len(seqs)):
            stored = stream.at(seqs[place])
            if stored is not None:
                self._sent_to = seqs[place]
                return stored
        self._sent_to = len(stream.messages)
        return None

    def _let_through(self, stream: MemoryStream) -> list[int]:
        """Sequences of the messages that the filters let through, in order."""
        assert self._subjects is not None
        if self._endless:
            view = self._view = self._view or stream.view(self._subjects)
            return view.seqs
        known = stream.known_view(self._subjects)
        if known is not None:
            return known.seqs
        if self._found is None or self._found[0] != len(stream.messages):
            self._found = (len(stream.messages), stream.under(self._subjects))
        return self._found[1]

    def _waiting(self) -> dict[Waiting, None]:
        """Where this reader waits for the next message."""
        assert self._stream is not None
        return self._stream.waiting if self._view is None else self._view.waiting
