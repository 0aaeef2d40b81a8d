"""Processes of a host that aren't services: agents and tests, each a life of its own, and the guard that ends them.

A group has the face of `services.mesh.process_group.Group`. What its service leaves behind when it is killed lives on until
the guard ends it, a moment later, or until the next life of the service finds it in the table.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self

from replay.worlds.faces import Life, forget


class Machine:
    """The process table of a host. Implements `services.mesh.process_table.Processes`."""

    def __init__(self, violations: list[str]) -> None:
        self.violations = violations
        """Where it is said that a script failed: what it met should not have happened."""
        self.groups: dict[int, WorldGroup] = {}
        """Those that live, by pid."""
        self._pids = 1000

    def __repr__(self) -> str:
        return f"<Machine [{len(self.groups)} groups]>"

    def pid(self) -> int:
        self._pids += 1
        return self._pids

    def homes(self, folder: str) -> set[str]:
        return {group.home for group in self.groups.values() if group.home.startswith(f"{folder}/")}

    def kill(self, leader: int, start: int, home: str) -> list[int]:
        for group in list(self.groups.values()):
            if group.home == home or (group.pid, group.start) == (leader, start):
                group.kill(-signal.SIGKILL)
        return []

    def wipe(self) -> None:
        """Fault: the host is gone."""
        for group in list(self.groups.values()):
            group.kill(-signal.SIGKILL)


class WorldGroup:
    """One process. `main` returns its exit code."""

    def __init__(self, machine: Machine, life: Life, home: str, *, stubborn: bool = False) -> None:
        self.pid, self.start, self.home = machine.pid(), 1, home
        self.code: int | None = None
        self._machine, self._life, self._stubborn = machine, life, stubborn
        self._ended = asyncio.Event()
        machine.groups[self.pid] = self
        life.at_end(self._over)

    def __repr__(self) -> str:
        return f"<WorldGroup {self.pid} [{'runs' if self.code is None else f'ended with {self.code}'}]>"

    def begin(self, main: Coroutine[Any, Any, int]) -> None:
        self._life.at_end(lambda: forget(main))
        self._life.begin(self._run(main))

    async def wait(self) -> None:
        await self._ended.wait()

    async def end(self, grace_s: float) -> int:
        if self.code is None and not self._stubborn:
            self.kill(-signal.SIGTERM)
        elif self.code is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._ended.wait()
            self.kill(-signal.SIGKILL)
        return -signal.SIGKILL if self.code is None else self.code

    def abandon(self) -> None:
        self.kill(-signal.SIGKILL)

    def kill(self, code: int) -> None:
        """Ends it at once; nothing happens when it has ended."""
        if self.code is None:
            self.code = code
            self._life.kill()

    async def _run(self, main: Coroutine[Any, Any, int]) -> None:
        try:
            code = await main
        except Exception as error:
            self._machine.violations.append(f"the process in {self.home} crashed: {error!r}")
            raise
        if self.code is None:
            self.code = code

    def _over(self) -> None:
        if self.code is None:
            self.code = -signal.SIGKILL
        self._machine.groups.pop(self.pid, None)
        self._ended.set()


class WorldGuard:
    """Implements `services.mesh.guard.Keeper` for one life of a service; `after_s` it takes to notice its end."""

    def __init__(self, machine: Machine, life: Life, *, after_s: float) -> None:
        self._machine, self._after_s = machine, after_s
        self._known: set[int] = set()
        self._loop = asyncio.get_running_loop()
        life.at_end(self._orphaned)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def add(self, pid: int, start: int, home: str) -> None:
        self._known.add(pid)

    def drop(self, pid: int) -> None:
        self._known.discard(pid)

    def _orphaned(self) -> None:
        self._loop.call_later(self._after_s, self._end)

    def _end(self) -> None:
        for pid in sorted(self._known):
            group = self._machine.groups.get(pid)
            if group is not None:
                group.kill(-signal.SIGKILL)
        self._known.clear()
