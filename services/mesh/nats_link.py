"""One connection to nats-server: who is up, requests with a bound, and the mapping of foreign errors to ours.

Invariants
- a request in flight ends at once with Unanswered when the connection is lost, it doesn't sit out its time-out;
- nothing is sent while disconnected: the client would keep the bytes and deliver them after the reconnection;
- reconnection never gives up, the first connection does.
"""

from __future__ import annotations

import asyncio
import json
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg

from schemas.errors import BusError, EnvironmentMissing
from services.mesh.publishing import Unanswered

RECONNECT_PAUSE_S = 0.1
PING_INTERVAL_S = 20
DRAIN_S = 5.0
"""Seconds that a closing link gives what is in flight."""
ASK_S = 5.0
"""Seconds for one answer of the JetStream API."""
ASK_DEADLINE_S = 15.0
"""Seconds after which a question that may be repeated gives up."""


class ApiError(Exception):
    """JetStream answered with an error."""

    def __init__(self, error: dict[str, Any]) -> None:
        self.code: int = error.get("code", 0)
        self.err_code: int = error.get("err_code", 0)
        self.description: str = error.get("description", "")
        super().__init__(f"{self.description} (JetStream error {self.err_code})")


class NobodyListens(Unanswered):
    """Certainly not stored: the stream is absent, or the server is still starting up."""


class NoAnswer(BusError):
    """JetStream did not answer a question, asked again and again, in time."""


class Link:
    """A connected client. `epoch` rises with each reconnection: consumers made before may be gone."""

    def __init__(self, url: str, name: str) -> None:
        self.url = without_password(url)
        self.name = name
        self.client = Client()
        self.epoch = 0
        self.closed = False
        self._up = asyncio.Event()
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asking: set[asyncio.Future[Msg]] = set()
        self._wakers: set[asyncio.Event] = set()
        self._last_error = ""
        self._log = structlog.get_logger("bus").bind(client=name, url=self.url)

    def __repr__(self) -> str:
        state = "closed" if self.closed else "up" if self._up.is_set() else "down"
        return f"<Link {self.name} to {self.url} [{state}, epoch {self.epoch}]>"

    async def open(self, url: str, timeout_s: float) -> None:
        """Raises EnvironmentMissing when no nats-server answers in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.client.connect(
                    url,
                    name=self.name,
                    error_cb=self._on_error,
                    disconnected_cb=self._on_disconnect,
                    reconnected_cb=self._on_reconnect,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=RECONNECT_PAUSE_S,  # type: ignore[arg-type]
                    ping_interval=PING_INTERVAL_S,
                )
        except (TimeoutError, OSError, nats.errors.Error) as error:
            why = self.client.last_error or error
            await self.client.close()
            raise EnvironmentMissing(
                f"no nats-server answered within {timeout_s:g} s ({why or type(why).__name__})",
                where=self.url,
                remedy="start nats-server with JetStream there, or correct the url of the event bus",
            ) from error
        self._up.set()

    async def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._wake_all()
        # What is in flight gets its answer, unless the connection goes away. The client's own drain would sit out its
        # whole time-out on a dead connection, and has nothing else to do: readers acknowledge nothing.
        if self._asking and self._up.is_set():
            answered = asyncio.ensure_future(asyncio.wait(list(self._asking)))
            either: list[asyncio.Future[Any]] = [answered, self._lost]
            await asyncio.wait(either, timeout=DRAIN_S, return_when=asyncio.FIRST_COMPLETED)
            answered.cancel()
        await self.client.close()
        if not self._lost.done():
            self._lost.set_result(None)
        # Whoever waits for the connection learns that it is closed.
        self._up.set()

    def watch(self, waker: asyncio.Event) -> None:
        """`waker` is set on every reconnection and on close."""
        self._wakers.add(waker)

    def unwatch(self, waker: asyncio.Event) -> None:
        self._wakers.discard(waker)

    @property
    def up(self) -> bool:
        return self._up.is_set() and not self.closed

    async def request(self, subject: str, data: bytes, timeout_s: float, headers: dict[str, str] | None = None) -> Msg:
        """One request. Raises Unanswered whenever the outcome is unknown, BusError when it was certainly not sent and
        never will be."""
        self.check_open()
        if not self._up.is_set():
            try:
                async with asyncio.timeout(timeout_s):
                    await self._up.wait()
            except TimeoutError:
                raise Unanswered(f"disconnected from {self.url}") from None
            self.check_open()
        asking = asyncio.ensure_future(self.client.request(subject, data, timeout=timeout_s, headers=headers))
        # Its error is looked at even when we are cancelled or the connection is lost at the same moment.
        asking.add_done_callback(lambda task: task.cancelled() or task.exception())
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        try:
            either: list[asyncio.Future[Any]] = [asking, self._lost]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise Unanswered(f"connection to {self.url} lost")
            return asking.result()
        except nats.errors.MaxPayloadError as error:
            raise BusError(
                f"a message of {len(data)} bytes is larger than the server takes ({self.client.max_payload})",
                where=subject,
                remedy="put the content into BLOBS and publish its name and digest",
            ) from error
        except (nats.errors.ConnectionClosedError, nats.errors.ConnectionDrainingError) as error:
            raise BusError("the connection is closed", where=self.url, remedy="connect again") from error
        except (nats.errors.BadSubjectError, nats.errors.BadHeaderError) as error:
            raise BusError(str(error), where=subject, remedy="correct the subject or the headers") from error
        except nats.errors.NoRespondersError as error:
            raise NobodyListens(str(error)) from error
        except (nats.errors.Error, OSError) as error:
            raise Unanswered(str(error) or type(error).__name__) from error
        finally:
            if not asking.done():
                asking.cancel()

    async def ask(self, subject: str, question: dict[str, Any] | None = None) -> dict[str, Any]:
        """A question to the JetStream API that may be repeated, with its answer. Raises ApiError, or NoAnswer when
        there is no answer within ASK_DEADLINE_S."""
        body = json.dumps(question).encode() if question is not None else b""
        reply = await self.repeat(f"$JS.API.{subject}", body)
        answer: dict[str, Any] = json.loads(reply.data)
        if "error" in answer:
            raise ApiError(answer["error"])
        return answer

    async def repeat(self, subject: str, data: bytes) -> Msg:
        """A request that may be repeated until it is answered."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + ASK_DEADLINE_S
        why = "no answer"
        while (left := deadline - loop.time()) > 0:
            try:
                return await self.request(subject, data, min(ASK_S, left))
            except Unanswered as error:
                why = str(error)
            await asyncio.sleep(RECONNECT_PAUSE_S)
        raise NoAnswer(
            f"JetStream did not answer {subject} within {ASK_DEADLINE_S:g} s ({why})",
            where=self.url,
            remedy="check that nats-server is up and that its configuration has a jetstream block",
        )

    def check_open(self) -> None:
        if self.closed:
            raise BusError(f"the bus of {self.name} is closed", where=self.url, remedy="connect again")

    async def _on_error(self, error: Exception) -> None:
        # One line a kind of trouble: during an outage the same one comes back with every attempt. That we are cut off
        # is the warning, what the client says of it is a detail.
        text = f"{type(error).__name__}: {error}"
        if text != self._last_error:
            self._last_error = text
            self._log.info("connection trouble", error=text)

    async def _on_disconnect(self) -> None:
        self._up.clear()
        if not self._lost.done():
            self._lost.set_result(None)
        if not self.closed:
            self._log.warning("disconnected")

    async def _on_reconnect(self) -> None:
        self.epoch += 1
        self._lost = asyncio.get_running_loop().create_future()
        self._last_error = ""
        self._up.set()
        self._wake_all()
        self._log.info("reconnected", epoch=self.epoch)

    def _wake_all(self) -> None:
        for waker in self._wakers:
            waker.set()


def without_password(url: str) -> str:
    """The url as it may be shown and logged."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def parse_headers(block: bytes) -> dict[str, str]:
    """Headers of a stored message from its raw `NATS/1.0` block."""
    pairs = (line.partition(b":") for line in block.split(b"\r\n")[1:] if line)
    return {name.strip().decode("ascii"): value.strip().decode() for name, _, value in pairs}


def nanoseconds_of(timestamp: str) -> int:
    """Nanoseconds since the epoch of an RFC 3339 time with up to nine digits, as JetStream writes it; exact."""
    head, _, fraction = timestamp.removesuffix("Z").partition(".")
    try:
        whole = datetime.fromisoformat(f"{head}+00:00")
        return int(whole.timestamp()) * 1_000_000_000 + int(fraction.ljust(9, "0"))
    except ValueError as error:
        raise BusError(f"the server gave the time {timestamp!r}", remedy="run nats-server with times in UTC") from error
