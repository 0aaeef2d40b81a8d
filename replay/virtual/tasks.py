"""What coroutines are and wait for on a virtual loop: tasks whose order repeats, work of an executor, pauses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from replay.virtual.loop import VirtualLoop

T = TypeVar("T")


class Work(Generic[T]):
    """What was given to an executor; to be awaited once."""

    __slots__ = ("_args", "_func")

    def __init__(self, func: Callable[..., T], args: tuple[Any, ...]) -> None:
        self._func, self._args = func, args

    def __await__(self) -> Generator[None, None, T]:
        # The turn of others comes first; who is cancelled meanwhile has not begun.
        yield
        return self._func(*self._args)


class Pause:
    """To be awaited by a task, once."""

    __slots__ = ("_delay", "_loop")

    def __init__(self, loop: VirtualLoop, delay: float) -> None:
        self._loop, self._delay = loop, delay

    def __await__(self) -> Generator[None, None, None]:
        # The very next that is called soon is the step after this one.
        self._loop._delay, self._loop._pausing = self._delay, self._delay > 0
        yield


class VirtualTask(asyncio.Task[T]):
    """A task whose hash is its number, so that sets of tasks are walked in the same order in every repetition."""

    __slots__ = ("_number",)

    def __init__(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        number: int,
        loop: VirtualLoop,
        name: str,
        context: Context | None,
    ) -> None:
        self._number = number
        super().__init__(coro, loop=loop, name=name, context=context)

    def __hash__(self) -> int:
        return self._number
