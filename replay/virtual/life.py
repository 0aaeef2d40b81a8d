"""One life of a simulated process, from its start to its end or to kill -9.

    begin ── steps ── main returns or raises ──> ended
                └──── kill ────────────────────> ended, and nothing of it ever runs again

Everything that is spawned inside a life belongs to it: tasks, callbacks and timers carry it in their context. A step is
one callback of the life: what lies between two of its awaits. `strike` is called before a chosen step, so a life can be
killed at any await, and at the same one in every repetition. A life can also be held, as by SIGSTOP: it has all that it had,
and does nothing until it goes on.

Invariant: a dead life has no effect. Its coroutines are kept as they stood and closed when the loop is closed, so that no
`finally` and no `except` of theirs runs while the world goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from typing import Any, TypeVar

from replay.virtual.callbacks import LIFE, Handle
from replay.virtual.loop import VirtualLoop

T = TypeVar("T")

NEVER = sys.maxsize
_PRUNE = 64


class Killed(Exception):
    """How a life ended that was killed."""


class Life:
    """`name` says whose life it is, `number` which one, from 0."""

    def __init__(self, loop: VirtualLoop, name: str, *, number: int = 0) -> None:
        self.loop, self.name, self.number = loop, name, number
        self.dead = self.silent = False
        """`silent`: it ended with its host, so nobody closes its connections for it."""
        self.held = False
        """Alive, and does nothing."""
        self.halted = False
        """Dead or held."""
        self.steps = 0
        """Callbacks of this life that ran."""
        self.strike_at = NEVER
        """The step before which `strike` is called."""
        self.strike: Callable[[], None] = _never
        self.ended: asyncio.Future[None] = loop.create_future()
        """Done when the life is over: the error of its main coroutine, `Killed`, or None."""
        self.context: Context = copy_context()
        self.context.run(LIFE.set, self)
        self._endings: list[Callable[[], None]] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self._prune_at = _PRUNE
        self._buried: list[Handle] = []
        self._missed: list[Handle] = []
        """Callbacks that wait for it to go on."""
        loop.lives.append(self)

    def __repr__(self) -> str:
        state = "dead" if self.dead else "held" if self.held else "alive"
        return f"<Life {self.name} #{self.number} [{state}, {self.steps} steps]>"

    def begin(self, main: Coroutine[Any, Any, None]) -> None:
        """Run `main` as this life's program; when it ends, everything else of the life is gone too."""
        task = self.spawn(main)
        # In the context of whoever begins it: the end is seen from outside.
        task.add_done_callback(self._main_ended, context=self._outside())

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task of this life, made from outside or inside."""
        return self.loop.create_task(work, context=self.context.copy())

    def at_end(self, ending: Callable[[], None]) -> None:
        """`ending` is called, outside, once the life is over: connections break, locks of the machine are freed."""
        self._endings.append(ending)

    def kill(self, *, silent: bool = False) -> None:
        """kill -9, or with `silent` the end of its host. Nothing happens to a life that is over. May not be called by one
        of its own steps."""
        if self.dead:
            return
        if LIFE.get() is self:
            raise RuntimeError(f"{self!r} cannot kill itself in the middle of a step")
        self.silent = silent
        self._end(Killed(self.name))

    def hold(self) -> bool:
        """Nothing of it runs from now on, until `go_on`. False when it is dead or held."""
        if self.halted:
            return False
        self.held = self.halted = True
        return True

    def go_on(self) -> None:
        """What it missed comes at once, in order; a time-out that is over is over."""
        if not self.held:
            return
        self.held, self.halted = False, self.dead
        missed, self._missed = self._missed, []
        for handle in missed:
            self.loop.again(handle)

    def own(self, task: asyncio.Task[Any]) -> None:
        """A task was made inside."""
        self._tasks.append(task)
        if len(self._tasks) >= self._prune_at:
            self._tasks = [task for task in self._tasks if not task.done()]
            self._prune_at = 2 * len(self._tasks) + _PRUNE

    def bury(self, handle: Handle) -> None:
        """A callback of a life that is dead or held. It is kept: dropping it could close a coroutine."""
        (self._buried if self.dead else self._missed).append(handle)

    def forget(self) -> None:
        """The world is over: close the coroutines, whatever they make of it."""
        self.dead = self.halted = True
        hook, sys.unraisablehook = sys.unraisablehook, _silent
        try:
            for task in self._tasks:
                if not task.done():
                    task._log_destroy_pending = False  # type: ignore[attr-defined]  # asyncio's own switch
                    with contextlib.suppress(BaseException):
                        self.context.copy().run(task.get_coro().close)
            self._tasks.clear()
            self._buried.clear()
            self._missed.clear()
            self._endings.clear()
        finally:
            sys.unraisablehook = hook

    def _main_ended(self, task: asyncio.Task[None]) -> None:
        if not self.dead:
            self._end(asyncio.CancelledError() if task.cancelled() else task.exception())

    def _end(self, error: BaseException | None) -> None:
        self.dead = self.halted = True
        for ending in self._endings:
            ending()
        self._endings.clear()
        if self.ended.done():
            # Somebody who waited for it was cancelled, and the future with him.
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)
            # Whoever looks gets it; nobody has to.
            self.ended.exception()

    def _outside(self) -> Context:
        context = copy_context()
        context.run(LIFE.set, None)
        return context


def _never() -> None:
    raise AssertionError("a strike without a striker")


def _silent(_: object) -> None:
    """What coroutines of the dead complain about when they are closed is nobody's concern."""
