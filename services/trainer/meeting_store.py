"""The store on which members of a batch meet: keys and values in the core's process, asked with a limit.

A call into a store whose process stands still, or whose host is gone, returns when the kernel gives the connection up,
which may be never. So every call is made in a thread of its own store, and whoever asks goes on after `ANSWER_S`: that
thread then stays behind, with the connection, until the kernel ends both. Invariant: no call here blocks for longer than
it says.
"""

from __future__ import annotations

import datetime
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from services.mesh.host import own_host
from services.mesh.processes import may_stay_behind

T = TypeVar("T")
ANSWER_S = 5.0
"""A store that is there answers within it, also while it is reached."""
_POLL_S = 0.005


class StoreSilent(RuntimeError):
    """The store did not answer in time."""


class MeetingStore:
    """One end. `MeetingStore()` lends a store; `MeetingStore(rendezvous)` reaches another process's.

    Every call raises RuntimeError where the store is gone or silent; nothing more can be asked then.
    """

    def __init__(self, rendezvous: str = "", *, timeout_s: float) -> None:
        """`timeout_s`: of what a group waits for inside the store while it is built."""
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._asked: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        # A thread that never returns may not hold the process when it ends, and one that returns then may not abort it.
        thread = threading.Thread(target=_answer, args=(self._asked,), name="meeting store", daemon=True)
        thread.start()
        may_stay_behind(thread)
        self.rendezvous = rendezvous
        """`host:port`."""
        try:
            self._store: TCPStore = self.ask(lambda: self._reach(rendezvous) if rendezvous else self._lend())
        except RuntimeError:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"<MeetingStore {self.rendezvous}>"

    def say(self, key: str, value: str) -> None:
        self.ask(lambda: self._store.set(key, value))

    def all_said(self, keys: Sequence[str], wait_s: float) -> list[str] | None:
        """Their values, once there are all; None after `wait_s`."""

        def look() -> list[str] | None:
            deadline = time.monotonic() + wait_s
            while not self._store.check(list(keys)):
                if time.monotonic() >= deadline:
                    return None
                time.sleep(_POLL_S)
            return [value.decode() for value in self._store.multi_get(list(keys))]

        return self.ask(look, within_s=wait_s)

    def build(self, make: Callable[[TCPStore], T]) -> T:
        """What `make` makes of the store, which waits there for up to `timeout_s`."""
        return self.ask(lambda: make(self._store), within_s=self._timeout.total_seconds())

    def ask(self, act: Callable[[], T], *, within_s: float = 0.0) -> T:
        """What `act` returns in the thread that speaks with the store; it may take so long beside the answer."""
        within_s += ANSWER_S
        asked: Future[T] = Future()
        self._asked.put((asked, act))
        try:
            return asked.result(within_s)
        except TimeoutError:
            raise StoreSilent(
                f"the store at {self.rendezvous or 'this host'} did not answer for {within_s:g} s"
            ) from None

    def close(self) -> None:
        """Lets go of it: a store that was lent ends with the last of its calls."""
        self._asked.put(None)

    def _lend(self) -> TCPStore:
        # Left to itself the store listens on every interface.
        listener = socket.socket()
        here = own_host()
        listener.bind((here, 0))
        listener.listen(64)
        port = listener.getsockname()[1]
        self.rendezvous = f"{here}:{port}"
        return TCPStore(
            here,
            port,
            None,
            is_master=True,
            timeout=self._timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    def _reach(self, rendezvous: str) -> TCPStore:
        host, _, port = rendezvous.rpartition(":")
        timeout = min(self._timeout, datetime.timedelta(seconds=ANSWER_S))
        store = TCPStore(host, int(port), None, is_master=False, timeout=timeout, wait_for_workers=False)
        store.set_timeout(self._timeout)
        return store


def _answer(asked: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    """One call after the other, until None."""
    while (each := asked.get()) is not None:
        future, act = each
        try:
            future.set_result(act())
        except BaseException as error:
            future.set_exception(error)
        # What was made may not outlive whoever asked for it.
        del each, future, act
