"""A small process that ends the process groups of a service when the service itself dies, however it dies.

    service --"+ pid start home" / "- pid"--> guard        the pipe closes --> guard kills what it still knows, and ends

One guard a service, in a session of its own, on the standard library alone (some 9 MB). The groups that it ends are found
by `process_table`, so programs that made sessions of their own are ended too.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from services.mesh.process_table import kill

_STOP_S = 5.0


class Keeper(Protocol):
    """Who is told of groups, because it ends them when the service can't."""

    def add(self, pid: int, start: int, home: str) -> None: ...

    def drop(self, pid: int) -> None: ...


class Guard:
    """Implements `Keeper`. Lives from `__enter__` to `__exit__`; groups that are still known at the exit are ended too."""

    def __init__(self) -> None:
        self._known: dict[int, str] = {}
        self._process: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        return f"<Guard [{len(self._known)} groups]>"

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process.wait(_STOP_S)

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    def add(self, pid: int, start: int, home: str) -> None:
        """From now on the group dies with us."""
        self._known[pid] = json.dumps([pid, start, home])
        self._tell("+" + self._known[pid])

    def drop(self, pid: int) -> None:
        """The group is gone. Nothing happens for one that isn't known."""
        if self._known.pop(pid, None) is not None:
            self._tell(f"-{pid}")

    def _tell(self, line: str) -> None:
        assert self._process is not None and self._process.stdin is not None, "the guard is entered first"
        try:
            self._process.stdin.write(line.encode() + b"\n")
        except BrokenPipeError:
            # Somebody ended the guard: another one takes over all that lives.
            self._process.stdin.close()
            self._process.wait(_STOP_S)
            self._start()

    def _start(self) -> None:
        root = str(Path(__file__).parents[2])
        code = f"import sys; sys.path.insert(0, {root!r}); from services.mesh.guard import main; main()"
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
        for line in self._known.values():
            self._tell("+" + line)


def main() -> None:
    """The guard's own process."""
    known: dict[int, tuple[int, str]] = {}
    for line in sys.stdin.buffer:
        if line.startswith(b"+"):
            pid, start, home = json.loads(line[1:])
            known[pid] = (start, home)
        else:
            known.pop(int(line[1:]), None)
    for pid, (start, home) in known.items():
        kill(pid, start, home)
