"""The one thread that computes: it alternates between commands and steps of the batcher.

The event loop never touches the batcher; it sends functions. Commands run in the order sent, between two steps, and what
a command or a step finishes is handed back to the event loop at once. If the batcher itself fails the worker ends, every
open call fails with the same error, and `failed` is set: the process is of no use any more and its shell stops it.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import structlog

from schemas.errors import EngineError
from services.rollout.reference.batcher import Batcher
from services.rollout.reference.request import Request, RequestRefused

T = TypeVar("T")
Command = Callable[[Batcher], None]
_LOG = structlog.get_logger()


class Worker:
    """Start it inside a running event loop; all methods but the thread's own belong to that loop."""

    def __init__(self, batcher: Batcher) -> None:
        self._batcher = batcher
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._answers: dict[str, asyncio.Future[Request]] = {}
        self._calls: set[asyncio.Future[Any]] = set()
        self._thread = threading.Thread(target=self._work, name="decode", daemon=True)
        self.failed = asyncio.Event()
        self._over: EngineError | None = None

    def start(self) -> None:
        self._thread.start()

    async def stop(self) -> None:
        """Abort every request, then end the thread."""
        if self._over is None:
            await self.call(lambda batcher: batcher.abort(everything=True))
            self._over = EngineError("the engine is stopping", remedy="send the request to another engine")
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    async def generate(self, request: Request) -> Request:
        """The finished request. Raises RequestRefused; if the caller is cancelled, the request is aborted."""
        if request.rid in self._answers:
            raise RequestRefused(f"rid {request.rid!r} is in use by a request that has not finished")
        answer: asyncio.Future[Request] = self._loop.create_future()
        self._answers[request.rid] = answer
        try:
            await self.call(lambda batcher: batcher.submit(request))
            return await answer
        except asyncio.CancelledError:
            # The client went away: nobody will read the rest.
            if self._over is None:
                self._send(lambda batcher: self._deliver(batcher.abort(request.rid, exact=True)))
            raise
        finally:
            self._answers.pop(request.rid, None)

    async def call(self, command: Callable[[Batcher], T]) -> T:
        """Run `command` between two steps and return its result or raise its error. Ended requests are answered."""
        result: asyncio.Future[T] = self._loop.create_future()
        self._calls.add(result)
        result.add_done_callback(self._calls.discard)

        def run(batcher: Batcher) -> None:
            try:
                value = command(batcher)
            except EngineError as error:
                self._loop.call_soon_threadsafe(_settle, result, None, error)
                return
            if isinstance(value, list):
                self._deliver(item for item in value if isinstance(item, Request))
            self._loop.call_soon_threadsafe(_settle, result, value, None)

        self._send(run)
        return await result

    def _send(self, command: Command) -> None:
        if self._over is not None:
            raise self._over
        self._commands.put(command)

    # In the thread

    def _work(self) -> None:
        try:
            while True:
                try:
                    command = self._commands.get(block=not self._batcher.busy)
                except queue.Empty:
                    self._deliver(self._batcher.step())
                    continue
                if command is None:
                    return
                command(self._batcher)
        except Exception as error:
            _LOG.exception("the engine's worker has failed")
            self._loop.call_soon_threadsafe(self._fail, error)

    def _deliver(self, finished: Iterable[Request]) -> None:
        requests = list(finished)
        if requests:
            self._loop.call_soon_threadsafe(self._answer, requests)

    # In the event loop

    def _answer(self, requests: list[Request]) -> None:
        for request in requests:
            answer = self._answers.get(request.rid)
            if answer is not None and not answer.done():
                answer.set_result(request)

    def _fail(self, error: Exception) -> None:
        self._over = EngineError(f"the engine's worker has failed: {error!r}", remedy="start the engine again")
        for future in (*self._answers.values(), *self._calls):
            _settle(future, None, self._over)
        self.failed.set()


def _settle(future: asyncio.Future[Any], value: object, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)
