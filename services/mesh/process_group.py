"""Programs that aren't ours: started in a group of their own with a small clean environment, ended whole.

    launch --> running --the leader ends--> `wait` returns --`end`--> no member lives, the leader is waited for

Invariants
- the leader is waited for only after its group is gone, so its pid stands for it all the while;
- what it writes to stdout and stderr lands in one file, up to a bound, and never blocks it;
- nothing of ours is inherited: no descriptor, and of the environment only PATH.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import structlog

from schemas.errors import EnvironmentMissing
from services.mesh.guard import Keeper
from services.mesh.process_table import Entry, kill, members, start_of

OUTPUT_BYTES = 256 * 1024
"""Most bytes kept of what a group writes to stdout and stderr."""
_CHUNK = 64 * 1024
_log = structlog.get_logger()


class Group(Protocol):
    """A launched group."""

    pid: int
    start: int

    async def wait(self) -> None:
        """Returns once the leader has ended by itself or by force."""

    async def end(self, grace_s: float) -> int:
        """SIGTERM to the group if its leader lives, SIGKILL to every member after `grace_s`. Returns the leader's exit
        code, negative for a signal. May be called again."""

    def abandon(self) -> None:
        """End it at once, blocking; nothing happens after `end`."""


class Launch(Protocol):
    """How groups are started: `launch` here, something else in a simulation."""

    def __call__(
        self,
        command: Sequence[str],
        *,
        folder: Path,
        environment: Mapping[str, str],
        output: Path,
        guard: Keeper,
    ) -> Group: ...


def clean_environment(home: Path, extra: Mapping[str, str]) -> dict[str, str]:
    """PATH, HOME and LANG, and what the caller adds."""
    return {"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8", **extra, "HOME": str(home)}


class ProcessGroup:
    """Implements `Group` over a process of this machine."""

    def __init__(self, process: subprocess.Popen[bytes], start: int, home: str, guard: Keeper, output: _Output) -> None:
        self.pid, self.start = process.pid, start
        self._process, self._home, self._guard, self._output = process, home, guard, output
        self._descriptor = os.pidfd_open(process.pid)
        self._ended = asyncio.Event()
        self._closed = False
        asyncio.get_running_loop().add_reader(self._descriptor, self._on_end)

    def __repr__(self) -> str:
        state = "gone" if self._closed else "ended" if self._ended.is_set() else "running"
        return f"<ProcessGroup {self.pid} [{state}]>"

    async def wait(self) -> None:
        await self._ended.wait()

    async def end(self, grace_s: float) -> int:
        if not self._closed:
            known: list[Entry] = []
            if not self._ended.is_set():
                known = await asyncio.to_thread(members, self.pid, self.start, self._home)
                os.killpg(self.pid, signal.SIGTERM)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(grace_s):
                        await self._ended.wait()
            self._close(await asyncio.to_thread(kill, self.pid, self.start, self._home, known))
        return -signal.SIGKILL if self._process.returncode is None else self._process.returncode

    def abandon(self) -> None:
        if not self._closed:
            self._close(kill(self.pid, self.start, self._home))

    def _on_end(self) -> None:
        # Readable once the leader is dead; it stays so, hence read once.
        asyncio.get_running_loop().remove_reader(self._descriptor)
        self._ended.set()

    def _close(self, survivors: list[int]) -> None:
        self._closed = True
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        self._output.close()
        if survivors:
            _log.error("processes survived SIGKILL", pids=survivors, leader=self.pid)
        if self.pid not in survivors:
            self._process.wait()
        self._guard.drop(self.pid)
        self._ended.set()


class _Output:
    """The reading end of a pipe, copied into a file up to a bound. The file exists once there is something in it."""

    def __init__(self, path: Path) -> None:
        self._path, self._kept = path, 0
        self._source, self.sink = os.pipe()
        os.set_blocking(self._source, False)
        asyncio.get_running_loop().add_reader(self._source, self._read)

    def close_sink(self) -> None:
        os.close(self.sink)

    def close(self) -> None:
        while self._read():
            pass
        asyncio.get_running_loop().remove_reader(self._source)
        os.close(self._source)

    def _read(self) -> bool:
        try:
            data = os.read(self._source, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            asyncio.get_running_loop().remove_reader(self._source)
            return False
        kept = data[: OUTPUT_BYTES - self._kept]
        if kept:
            with open(self._path, "ab") as file:
                file.write(kept)
            self._kept += len(kept)
        return True


def launch(
    command: Sequence[str],
    *,
    folder: Path,
    environment: Mapping[str, str],
    output: Path,
    guard: Keeper,
) -> ProcessGroup:
    """Start `command` in `folder`, as the leader of a session of its own. `environment` has the group's own HOME.

    Raises EnvironmentMissing when the program cannot be started."""
    pipe = _Output(output)
    try:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=pipe.sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        pipe.close_sink()
        pipe.close()
        raise EnvironmentMissing(
            f"cannot start {command[0]}: {error.strerror}",
            where=str(folder),
            remedy="see that the program exists and may be executed",
        ) from error
    pipe.close_sink()
    start = start_of(process.pid)
    assert start is not None, "nobody else waits for our children"
    guard.add(process.pid, start, environment["HOME"])
    return ProcessGroup(process, start, environment["HOME"], guard, pipe)
