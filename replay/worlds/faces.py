"""What worlds ask of the machine below them: lives of processes, and a network between them.

`replay.virtual` is one such machine; a test has another on an ordinary event loop.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Protocol

Handlers = Mapping[str, Callable[..., Awaitable[Any]]]


class Life(Protocol):
    """One process, from its start to its end or to kill -9."""

    @property
    def dead(self) -> bool: ...

    @property
    def held(self) -> bool:
        """Whether it lives, and does nothing."""

    @property
    def silent(self) -> bool:
        """Whether it ended with its host: nobody is told, connections stay open on the other side."""

    def begin(self, main: Coroutine[Any, Any, None]) -> None:
        """Run `main` as this life's program."""

    def at_end(self, ending: Callable[[], None]) -> None:
        """`ending` is called, outside, once the life is over."""

    def kill(self) -> None: ...


class Network(Protocol):
    """Requests between lives. Both are called from inside one."""

    def listen(self, name: str, handlers: Handlers, *, port: int = 0) -> str:
        """The url of the running life. Raises OSError when the port is taken."""

    def listens(self, url: str) -> bool:
        """Whether a life listens at the address now."""

    async def ask(self, url: str, path: str, *args: Any) -> Any:
        """What the handler at `path` returns. Raises ConnectionError."""


def forget(program: Coroutine[Any, Any, Any]) -> None:
    """The life that was to run it is over: where it never began, nobody waits for it any more."""
    if inspect.getcoroutinestate(program) == inspect.CORO_CREATED:
        program.close()


def now() -> float:
    """Seconds of the running loop."""
    return asyncio.get_running_loop().time()
