"""Callbacks in the queue of a virtual loop, and the life that each belongs to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context, ContextVar
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from replay.virtual.life import Life

LIFE: ContextVar[Life | None] = ContextVar("life", default=None)
"""The life that the running code belongs to; None for the world around all lives."""


class Handle(msgspec.Struct, eq=False):
    """A callback in the queue. Cheaper than asyncio's own; the face that its users see is the same."""

    _callback: Callable[..., object]
    _args: tuple[Any, ...]
    _context: Context
    _life: Any
    """The `Life` of the context; None for the world around all lives."""
    _when: float
    _cancelled: bool = False

    def __repr__(self) -> str:
        return f"<Handle {name_of(self._callback)} at {self._when:.6f}>"

    def cancel(self) -> None:
        self._cancelled = True
        self._callback, self._args = _nothing, ()

    def cancelled(self) -> bool:
        return self._cancelled

    def when(self) -> float:
        return self._when


def name_of(callback: Callable[..., object]) -> str:
    """What a callback is called: the coroutine of a task's step, else the function."""
    task = getattr(callback, "__self__", None)
    if isinstance(task, asyncio.Task):
        coroutine = task.get_coro()
        return f"{task.get_name()} {getattr(coroutine, '__qualname__', repr(coroutine))}"
    return getattr(callback, "__qualname__", repr(callback))


def _nothing() -> None:
    """What a cancelled handle holds, so that it keeps nothing alive."""
