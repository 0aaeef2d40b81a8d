"""Reading a stream in order through bounded pulls.

An ephemeral consumer without acknowledgement starts after the last message that the caller got. One pull at a time
asks for a bounded batch and lingers: a new message arrives at once, and an idle reader costs a heartbeat every few
seconds. A finite reading asks for what is there.

    no consumer ── create at last + 1 ──> pulling ── batch full, expired, "no more" ──> pulls again
         ^                                   │
         └── reconnected, heartbeat missed, consumer gone, a delivery lost ──┘

Invariants
- the only position is the sequence of the last message handed out (`reading.Cursor` judges each delivery), so dropping
  the consumer at any moment is harmless;
- no state changes between an await and the return of a message: a cancelled `__anext__` takes nothing with it.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from types import TracebackType
from typing import Any, Self

import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from schemas.errors import BusError, LogBroken
from services.mesh.bus import Filter, Stored, time_us_of
from services.mesh.nats_link import RECONNECT_PAUSE_S, ApiError, Link, NoAnswer
from services.mesh.publishing import Unanswered
from services.mesh.reading import Cursor, Verdict

BATCH = 500
PULL_BYTES = 8 * 1024 * 1024
"""Bound of one pull, far below what the client buffers for a subscription before it throws messages away."""
PULL_S = 30.0
HEARTBEAT_S = 5.0
INACTIVE_S = 60.0
"""Seconds after which the server drops the consumer of a reader that stopped asking."""
DELETE_S = 1.0
_STREAM_NOT_FOUND = 10059


class NatsReader:
    """Implements `Reader`; ends by itself after `until` or, with `until` given, at the end of what is stored."""

    def __init__(
        self, link: Link, stream: str, after: int, *, until: int | None = None, subject_filter: Filter | None = None
    ) -> None:
        self._link, self._stream = link, stream
        self._filters = [subject_filter] if isinstance(subject_filter, str) else list(subject_filter or ())
        self._cursor = Cursor(stream, last=after, until=until, filtered=subject_filter is not None)
        self._inbox: deque[Msg] = deque()
        self._waker = asyncio.Event()
        self._subscription: Subscription | None = None
        self._making: asyncio.Future[None] | None = None
        self._consumer = ""
        self._epoch = -1
        self._wanted = 0
        self._heard = 0.0
        self._closed = False
        self._broken: LogBroken | None = None
        self.consumers_made = 0
        link.watch(self._waker)

    def __repr__(self) -> str:
        state = "ended" if self.ended else f"{len(self._inbox)} buffered, {self._wanted} wanted"
        return f"<NatsReader {self._stream} [last: {self._cursor.last}, {state}, consumers: {self.consumers_made}]>"

    @property
    def ended(self) -> bool:
        return self._closed or self._cursor.done

    def __aiter__(self) -> Self:
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def __anext__(self) -> Stored:
        while True:
            if self._broken is not None:
                raise self._broken
            if self.ended or self._link.closed:
                await self.aclose()
                raise StopAsyncIteration
            if self._consumer and self._epoch != self._link.epoch:
                await self._drop_consumer()
            while self._inbox and self._consumer:
                stored = await self._take(self._inbox.popleft())
                if stored is not None:
                    return stored
            if not self.ended:
                await self._ask_for_more()

    async def aclose(self) -> None:
        self._closed = True
        self._waker.set()
        self._link.unwatch(self._waker)
        if self._making is not None:
            self._making.cancel()
            await asyncio.wait([self._making])
        await self._drop_consumer()

    async def _take(self, message: Msg) -> Stored | None:
        """One raw delivery: the next message, or None when it was a status or made the reader start again."""
        self._wanted -= 1
        if not message.reply.startswith("$JS.ACK."):
            await self._take_status(message)
            return None
        # $JS.ACK.<stream>.<consumer>.<deliveries>.<stream seq>.<consumer seq>.<nanoseconds>.<pending>; a server with
        # domains puts two tokens more in front and may put one behind.
        tokens = message.reply.split(".")
        seq, delivery, nanoseconds, pending = (int(t) for t in (tokens[5:9] if len(tokens) == 9 else tokens[7:11]))
        try:
            verdict = self._cursor.take(seq=seq, delivery=delivery, pending=pending)
        except LogBroken as error:
            # At once: nothing behind a gap may be looked at.
            self._broken = error
            raise
        if verdict is Verdict.RESTART:
            await self._drop_consumer()
        if verdict is not Verdict.TAKE:
            return None
        return Stored(
            seq=seq,
            subject=message.subject,
            time_us=time_us_of(nanoseconds),
            headers=message.headers or {},
            data=message.data,
        )

    async def _take_status(self, message: Msg) -> None:
        headers = message.headers or {}
        status = headers.get("Status", "")
        if status == "100":
            self._wanted += 1
            if self._cursor.missed(int(headers.get("Nats-Last-Consumer", 0))):
                await self._drop_consumer()
        elif status in ("404", "408") or (status == "409" and "MaxBytes" in headers.get("Description", "")):
            unfilled, self._wanted = self._wanted + 1, 0
            if int(headers.get("Nats-Pending-Messages", unfilled)) != unfilled:
                await self._drop_consumer()
            elif status != "409" and self._cursor.until is not None:
                # Nothing is left, also when what was counted at the start has been purged since.
                self._cursor.done = True
        elif status in ("409", "503"):
            # The consumer was deleted, has expired, or lost its server.
            await self._drop_consumer()
        else:
            raise BusError(f"the server refused a pull: {headers}", where=self._stream)

    async def _ask_for_more(self) -> None:
        """Makes sure that a pull is outstanding, then waits for anything to happen."""
        self._waker.clear()
        if not self._link.up:
            await self._waker.wait()
            return
        try:
            if not self._consumer:
                await self._making_of_consumer()
                return
            if self._wanted <= 0:
                await self._pull()
        except NoAnswer:
            # An endless reader outlasts any outage; a finite one has a caller who wants to know.
            if self._cursor.until is not None:
                raise
            await self._drop_consumer()
            return
        except BusError:
            if not self._link.closed:
                raise
            return
        except nats.errors.Error:
            await self._drop_consumer()
            await asyncio.sleep(RECONNECT_PAUSE_S)
            return
        if self._inbox:
            return
        # Silence for longer than two heartbeats: the consumer is gone or the server hangs.
        try:
            async with asyncio.timeout_at(self._heard + 2 * HEARTBEAT_S + 1):
                await self._waker.wait()
        except TimeoutError:
            await self._drop_consumer()

    async def _making_of_consumer(self) -> None:
        # In a task of its own: a caller with a short time-out would otherwise cancel it again and again.
        making = self._making = self._making or asyncio.ensure_future(self._make_consumer())
        await asyncio.wait([making])
        self._making = None
        if not making.cancelled():
            making.result()

    async def _pull(self) -> None:
        assert self._subscription is not None, "a consumer has a subscription"
        request: dict[str, Any] = {
            "batch": BATCH,
            "max_bytes": max(PULL_BYTES, 2 * self._link.client.max_payload),
        }
        if self._cursor.until is None:
            request |= {"expires": int(PULL_S * 1e9), "idle_heartbeat": int(HEARTBEAT_S * 1e9)}
        else:
            request["no_wait"] = True
        self._wanted, self._heard = BATCH, asyncio.get_running_loop().time()
        await self._link.client.publish(
            f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._consumer}",
            json.dumps(request).encode(),
            reply=self._subscription.subject,
        )

    async def _make_consumer(self) -> None:
        self._epoch = self._link.epoch
        self._wanted = 0
        inbox: deque[Msg] = deque()
        self._inbox = inbox

        async def deliver(message: Msg) -> None:
            inbox.append(message)
            self._heard = asyncio.get_running_loop().time()
            self._waker.set()

        client = self._link.client
        name = client.new_inbox().rpartition(".")[2]
        config = {
            "name": name,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": self._cursor.last + 1,
            "ack_policy": "none",
            "replay_policy": "instant",
            "inactive_threshold": int(INACTIVE_S * 1e9),
            "mem_storage": True,
            "num_replicas": 1,
        }
        path = f"{self._stream}.{name}"
        if len(self._filters) == 1:
            config["filter_subject"] = self._filters[0]
            path = f"{path}.{self._filters[0]}"
        elif self._filters:
            config["filter_subjects"] = self._filters
        try:
            state = (await self._link.ask(f"STREAM.INFO.{self._stream}"))["state"]
            self._subscription = await client.subscribe(client.new_inbox(), cb=deliver)
            made = await self._link.ask(
                f"CONSUMER.CREATE.{path}", {"stream_name": self._stream, "config": config, "action": "create"}
            )
        except ApiError as error:
            raise BusError(
                f"cannot read: {error}",
                where=self._stream,
                remedy="open the run first" if error.err_code == _STREAM_NOT_FOUND else "check the filter",
            ) from error
        self._consumer = name
        self.consumers_made += 1
        try:
            self._cursor.restart(stream_end=state["last_seq"], pending=made["num_pending"])
        except LogBroken as error:
            self._broken = error

    async def _drop_consumer(self) -> None:
        """Forgets the consumer and what it delivered; the server removes it now or when it has been silent for long."""
        subscription, self._subscription = self._subscription, None
        name, self._consumer = self._consumer, ""
        self._inbox = deque()
        if subscription is None or self._link.closed:
            return
        try:
            await subscription.unsubscribe()
            if name and self._link.up and self._epoch == self._link.epoch:
                await self._link.request(f"$JS.API.CONSUMER.DELETE.{self._stream}.{name}", b"", DELETE_S)
        except (nats.errors.Error, Unanswered, BusError):
            # The connection goes away at this moment: so does the subscription, and the server drops the consumer.
            return
