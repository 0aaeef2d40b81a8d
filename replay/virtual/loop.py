"""An asyncio event loop whose time is virtual: it jumps to the next timer as soon as nothing is ready.

Everything of asyncio that doesn't touch the machine works on it: tasks, futures, timers, time-outs, queues, task groups.
Sockets, subprocesses and signals are absent; functions given to an executor run inline, at their turn.

Invariants
- the order of callbacks depends on the program alone: first come, first served; timers by time, then by arming. Tasks
  have hashes of their own, so sets of them have an order that repeats;
- a callback belongs to the `Life` of its context. What belongs to a dead life never runs, and holds no time up; what
  belongs to one that is held waits until it goes on;
- an exception that nobody handles ends the run. Nothing is swallowed;
- a program that spins without letting time pass is stopped, and the error names who spins.
"""

from __future__ import annotations

import asyncio
import itertools
from asyncio import events
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context, copy_context
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from replay.virtual.callbacks import LIFE, Handle, name_of
from replay.virtual.tasks import Pause, VirtualTask, Work

if TYPE_CHECKING:
    from replay.virtual.life import Life

T = TypeVar("T")

STILL_LIMIT = 200_000
"""Callbacks that may run without time passing."""
_NAMED = 2_000
"""Callbacks that are looked at to say who spins."""


class Livelock(RuntimeError):
    """The program spins: callbacks follow callbacks and virtual time stands still."""


class Standstill(RuntimeError):
    """Nothing is ready and no timer is armed, yet what is waited for has not come."""


class Unhandled(RuntimeError):
    """An exception that nobody handled; it is the cause of this one."""


class VirtualLoop(asyncio.AbstractEventLoop):
    """
    >>> with VirtualLoop() as loop:
    ...     loop.run_until_complete(asyncio.sleep(86_400))
    ...     loop.time()
    86400.0
    """

    def __init__(self, *, still_limit: int = STILL_LIMIT) -> None:
        self._ready: deque[Handle] = deque()
        self._make_ready = self._ready.append
        self._timers: list[tuple[float, int, Handle]] = []
        self._order = itertools.count()
        self._numbers = itertools.count(1)
        self._now = self._delay = 0.0
        self._pausing = False
        self._still_limit = still_limit
        self._running = self._stopping = self._closed = False
        self._unhandled: BaseException | None = None
        self.steps = 0
        """Callbacks that ran."""
        self.lives: list[Life] = []
        """Every life that began on this loop."""

    def __repr__(self) -> str:
        return f"<VirtualLoop [time: {self._now:.6f}, {len(self._ready)} ready, {len(self._timers)} timers]>"

    def __enter__(self) -> VirtualLoop:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # running

    def run_until_complete(self, future: Any) -> Any:
        """The result of a coroutine or future. Raises Standstill, Livelock or Unhandled when the program fails."""
        main = asyncio.ensure_future(future, loop=self)
        main.add_done_callback(self._stop_at)
        try:
            self.run_forever()
        finally:
            main.remove_done_callback(self._stop_at)
        if not main.done():
            raise Standstill(f"nothing is left to run at {self._now:.6f} s, and {main!r} is not done")
        return main.result()

    def _stop_at(self, _: object) -> None:
        self._stopping = True

    def run_forever(self) -> None:
        """Until `stop`, or until there is nothing left to run."""
        if self._closed or self._running:
            raise RuntimeError("the loop is closed" if self._closed else "the loop runs already")
        self._running, self._stopping = True, False
        events._set_running_loop(self)
        try:
            self._run()
        finally:
            events._set_running_loop(None)
            self._running = False

    def _run(self) -> None:
        ready, limit = self._ready, self._still_limit
        still = 0
        while not self._stopping:
            if not ready:
                self.steps += still
                still = 0
                if not self._pass_time():
                    return
            handle = ready.popleft()
            if handle._cancelled:
                continue
            life = handle._life
            if life is not None:
                if life.halted:
                    life.bury(handle)
                    continue
                life.steps += 1
                if life.steps >= life.strike_at:
                    life.strike()
                    if life.halted:
                        life.bury(handle)
                        continue
            still += 1
            if still > limit:
                self._name_who_spins(handle)
            try:
                handle._context.run(handle._callback, *handle._args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                raise Unhandled(f"in {name_of(handle._callback)} at {self._now:.6f} s: {error!r}") from error
            if self._unhandled is not None:
                unhandled, self._unhandled = self._unhandled, None
                raise unhandled
        self.steps += still

    def _pass_time(self) -> bool:
        """Move to the next timer and make all that are due ready. False when no timer is left."""
        timers, ready, pop = self._timers, self._ready, heappop
        while timers:
            when, _, handle = pop(timers)
            life = handle._life
            if handle._cancelled:
                continue
            if life is not None and life.halted:
                life.bury(handle)
                continue
            if when > self._now:
                self._now = when
            ready.append(handle)
            while timers and timers[0][0] <= when:
                ready.append(pop(timers)[2])
            return True
        return False

    def _name_who_spins(self, handle: Handle) -> NoReturn:
        names: Counter[str] = Counter()
        self._ready.appendleft(handle)
        for _ in range(_NAMED):
            if not self._ready:
                break
            handle = self._ready.popleft()
            if not handle._cancelled and (handle._life is None or not handle._life.dead):
                where = f"{handle._life.name}: " if handle._life is not None else ""
                names[where + name_of(handle._callback)] += 1
                handle._context.run(handle._callback, *handle._args)
        most = ", ".join(f"{name} ({count})" for name, count in names.most_common(5))
        raise Livelock(f"{self._still_limit} callbacks at {self._now:.6f} s and time stands still; who runs: {most}")

    def stop(self) -> None:
        self._stopping = True

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Ends all lives and forgets what has not run. May be called again."""
        if self._running:
            raise RuntimeError("a loop is not closed while it runs")
        if self._closed:
            return
        self._closed = True
        for life in self.lives:
            life.forget()
        self._ready.clear()
        self._timers.clear()

    async def shutdown_asyncgens(self) -> None:
        """Generators end with the frames that hold them."""

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """There is none."""

    # scheduling

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> Handle:  # type: ignore[override]
        if context is None:
            context = copy_context()
        delay = self._delay
        if not delay:
            handle = Handle(callback, args, context, context.get(LIFE), self._now)
            self._make_ready(handle)
            return handle
        if self._pausing:
            self._pausing, self._delay = False, 0.0
        when = self._now + delay
        handle = Handle(callback, args, context, context.get(LIFE), when)
        heappush(self._timers, (when, next(self._order), handle))
        return handle

    def again(self, handle: Handle) -> None:
        """A callback that was kept from running: at its time, or now when that is over."""
        if handle._when > self._now:
            heappush(self._timers, (handle._when, next(self._order), handle))
        else:
            self._make_ready(handle)

    def resolve_later(self, delay: float, future: asyncio.Future[Any], result: object) -> None:
        """The future is done now, and whoever waits for it goes on `delay` seconds later."""
        self._delay = delay
        try:
            future.set_result(result)
        finally:
            self._delay = 0.0

    def pause(self, delay: float) -> Pause:
        """`asyncio.sleep` in one step. Who is cancelled meanwhile hears of it when it is over."""
        return Pause(self, delay)

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Handle:
        """There is one thread."""
        return self.call_soon(callback, *args, context=context)

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Handle:
        if context is None:
            context = copy_context()
        when = self._now + delay
        handle = Handle(callback, args, context, context.get(LIFE), when)
        heappush(self._timers, (when, next(self._order), handle))
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Handle:
        if context is None:
            context = copy_context()
        handle = Handle(callback, args, context, context.get(LIFE), when)
        heappush(self._timers, (when, next(self._order), handle))
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> VirtualTask[T]:
        number = next(self._numbers)
        task = VirtualTask(coro, number, self, name or f"task-{number}", context)
        life = LIFE.get() if context is None else context.get(LIFE)
        if life is not None:
            life.own(task)
        return task

    def run_in_executor(self, executor: object, func: Callable[..., T], *args: Any) -> Work[T]:  # type: ignore[override]
        """Whoever awaits it runs `func` at his next turn: a thread that is scheduled by the loop."""
        return Work(func, args)

    # errors

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """asyncio has an error that nobody takes: it ends the run, unless it is of a life that is over."""
        life = LIFE.get()
        if life is not None and life.dead:
            return
        error = context.get("exception")
        if self._unhandled is None:
            self._unhandled = Unhandled(f"{context.get('message', 'an error')} at {self._now:.6f} s: {error!r}")
            self._unhandled.__cause__ = error

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.call_exception_handler(context)

    def get_exception_handler(self) -> None:
        return None

    # Asked whenever a future is made: `bool()` is False, without a frame of ours.
    get_debug = staticmethod(bool)

    def set_debug(self, enabled: bool) -> None:
        """Debugging asyncio's way reads the machine's clock; there is none of it here."""
