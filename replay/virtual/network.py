"""HTTP between lives: an address belongs to the life that listens, a request is a call into it.

    ask ── latency ──> handler, as a task of the listening life ── latency ──> its result, or its exception
     │                    └── listener dies ──> Cut
     └── asker gives up or dies ──> the handler is cancelled, as a server does whose client left

Values travel by reference: neither side may change what it sent or got. What a network does to a request beyond the
usual is drawn by `fate`, one request at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextvars import Context, copy_context
from typing import Any

import msgspec

from replay.virtual.callbacks import LIFE
from replay.virtual.life import Life
from replay.virtual.loop import VirtualLoop
from services.mesh.http import Unreachable

Handler = Callable[..., Awaitable[Any]]
Latency = Callable[[], float]

LATENCY_S = 0.000_4


class Cut(ConnectionError):
    """The connection broke before the answer: the request may have been worked on or not."""


class Fate(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of one request."""

    slow_s: float = 0.0
    """Seconds more on the way to the listener."""
    late_s: float = 0.0
    """Seconds more on the way back."""
    twice: bool = False
    """It is worked on twice; the first answer counts."""
    cut: bool = False
    """It is worked on, and the connection breaks instead of the answer."""


USUAL = Fate()


def usual(url: str, path: str) -> Fate:
    return USUAL


class Network:
    """`latency` is drawn once for each way."""

    def __init__(self, loop: VirtualLoop, *, latency: Latency = lambda: LATENCY_S) -> None:
        self.loop = loop
        self.fate: Callable[[str, str], Fate] = usual
        self._latency = latency
        self._listeners: dict[str, _Listener] = {}
        self._asking: dict[Life, dict[_Call, None]] = {}
        self._ports = 20_000
        self._outside: Context = copy_context()
        self._outside.run(LIFE.set, None)

    def __repr__(self) -> str:
        asking = sum(len(calls) for calls in self._asking.values())
        return f"<Network [{len(self._listeners)} listen, {asking} requests]>"

    def listen(self, name: str, handlers: Mapping[str, Handler], *, port: int = 0) -> str:
        """The running life listens; returns its url. `handlers` is a table from path to coroutine function, looked at
        with each request. Raises OSError when the port is taken."""
        life = _life()
        if not port:
            self._ports += 1
            port = self._ports
        url = f"http://{name}.sim:{port}"
        if url in self._listeners:
            raise OSError(98, f"address in use: {url}")
        listener = self._listeners[url] = _Listener(life, handlers)
        life.at_end(lambda: self._silence(url, listener))
        return url

    def listens(self, url: str) -> bool:
        """Whether a life listens at the address now, and isn't held."""
        listener = self._listeners.get(url)
        return listener is not None and not listener.life.held

    async def ask(self, url: str, path: str, *args: Any) -> Any:
        """What the handler at `path` returns for `args`; its exceptions are raised here. Raises Unreachable or Cut."""
        life, fate = _life(), self.fate(url, path)
        call = _Call(path, args, self.loop.create_future(), fate)
        if life not in self._asking:
            self._asking[life] = {}
            life.at_end(lambda: self._left(life))
        mine = self._asking[life]
        mine[call] = None
        self._after(self._latency() + fate.slow_s, self._arrive, url, call)
        if fate.twice:
            self._after(2 * self._latency() + fate.slow_s, self._arrive, url, call)
        try:
            return await call.answer
        finally:
            mine.pop(call, None)
            if call.tasks:
                self._after(self._latency(), call.drop)

    def _arrive(self, url: str, call: _Call) -> None:
        if call.answer.done():
            return
        listener = self._listeners.get(url)
        if listener is None:
            self._after(self._latency(), call.fail, Unreachable(f"nobody listens at {url}"))
            return
        handler = listener.handlers.get(call.path)
        if handler is None:
            self._after(self._latency(), call.fail, Unreachable(f"{url} has no {call.path}"))
            return
        listener.calls[call] = None
        call.tasks.append(listener.life.spawn(self._work_on(call, handler, listener)))

    async def _work_on(self, call: _Call, handler: Handler, listener: _Listener) -> None:
        """What the listener does, in a task of its life."""
        result, error = None, None
        try:
            result = await handler(*call.args)
        except asyncio.CancelledError:
            self._done(call, listener)
            raise
        except Exception as raised:
            error = raised
        self._done(call, listener)
        if call.fate.cut:
            self._after(self._latency(), call.fail, Cut("the connection was lost"))
        elif error is not None:
            self._after(self._latency() + call.fate.late_s, call.fail, error)
        elif call.fate.late_s:
            self._after(self._latency() + call.fate.late_s, call.succeed, result)
        elif not call.answer.done():
            # Nothing can come between: whoever asks goes on when the answer is there.
            self.loop.resolve_later(self._latency(), call.answer, result)

    def _done(self, call: _Call, listener: _Listener) -> None:
        task = asyncio.current_task()
        call.tasks = [each for each in call.tasks if each is not task]
        if not call.tasks:
            listener.calls.pop(call, None)

    def _silence(self, url: str, listener: _Listener) -> None:
        """The listener is dead: so are the answers that it was working on."""
        if self._listeners.get(url) is listener:
            del self._listeners[url]
        for call in listener.calls:
            call.tasks.clear()
            self._after(self._latency(), call.fail, Cut(f"{listener.life.name} died"))
        listener.calls.clear()

    def _left(self, life: Life) -> None:
        """The asker is dead: the servers see its connections break."""
        for call in self._asking.pop(life):
            self._after(self._latency(), call.drop)

    def _after(self, seconds: float, function: Callable[..., None], *args: Any) -> None:
        self.loop.call_later(seconds, function, *args, context=self._outside)


class _Listener:
    __slots__ = ("calls", "handlers", "life")

    def __init__(self, life: Life, handlers: Mapping[str, Handler]) -> None:
        self.life, self.handlers = life, handlers
        self.calls: dict[_Call, None] = {}


class _Call:
    __slots__ = ("answer", "args", "fate", "path", "tasks")

    def __init__(self, path: str, args: tuple[Any, ...], answer: asyncio.Future[Any], fate: Fate) -> None:
        self.path, self.args, self.answer, self.fate = path, args, answer, fate
        self.tasks: list[asyncio.Task[Any]] = []

    def succeed(self, result: Any) -> None:
        if not self.answer.done():
            self.answer.set_result(result)

    def fail(self, error: BaseException) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)

    def drop(self) -> None:
        """Whoever asked has left."""
        self.answer.cancel()
        for task in self.tasks:
            task.cancel()


def _life() -> Life:
    life = LIFE.get()
    if life is None:
        raise RuntimeError("only a life listens and asks on the network")
    return life
