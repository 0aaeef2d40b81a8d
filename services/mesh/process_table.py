"""Finding and ending every process of a group, also those that left it: Linux's /proc, and nothing but the standard library.

A process belongs to a group when its process group or session is the leader's, when its parent belongs, or when its
environment says `HOME={home}`, for a home that no other group has. Whatever a program does to hide its children (new
sessions, double forks), the last one finds them; who also changes its environment is found while its parents live, so
callers look before they end a leader.

A pid is never taken for an identity: it counts together with the time at which its process started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection
from typing import NamedTuple, Protocol

_ROUNDS = 200
_PAUSE_S = 0.005
_KERNEL = 2
"""Parent of the kernel's own threads."""


class Processes(Protocol):
    """What services ask of the table of processes: this module, something else in a simulation."""

    def homes(self, folder: str) -> set[str]: ...

    def kill(self, leader: int, start: int, home: str) -> list[int]: ...


class Entry(NamedTuple):
    """One living process."""

    pid: int
    parent: int
    group: int
    session: int
    start: int
    """When it started, in clock ticks since the machine did."""


def entry_of(pid: int) -> Entry | None:
    """The process that has `pid` now; None where there is none, or a dead one that nobody has waited for."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name in parentheses may hold anything, so the fields are counted from its end.
            fields = file.read().rpartition(b") ")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    if fields[0] in (b"Z", b"X"):
        return None
    return Entry(pid, int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]))


def start_of(pid: int) -> int | None:
    """When the process that has `pid` started, be it dead and not waited for; None where there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b") ")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return None


def members(leader: int, start: int, home: str, known: Collection[Entry] = ()) -> list[Entry]:
    """Living processes of the group of `leader`, which started at `start`, and of `known` ones found earlier.

    A leader that is dead and waited for may have lent its pid to somebody else: then only the others count.
    """
    seen = {(entry.pid, entry.start) for entry in known}
    mark = b"HOME=" + os.fsencode(home)
    found: dict[int, Entry] = {}
    others: list[Entry] = []
    ours = start_of(leader) == start
    for name in os.listdir("/proc"):
        entry = entry_of(int(name)) if name.isdecimal() else None
        # Nobody in the group is older than its leader.
        if entry is None or entry.parent == _KERNEL or entry.start < start:
            continue
        by_group = ours and leader in (entry.pid, entry.group, entry.session)
        if by_group or (entry.pid, entry.start) in seen or mark in _environment(entry.pid):
            found[entry.pid] = entry
        else:
            others.append(entry)
    grown = bool(found)
    while grown:
        children = [entry for entry in others if entry.parent in found]
        others = [entry for entry in others if entry.parent not in found]
        found.update((entry.pid, entry) for entry in children)
        grown = bool(children)
    return list(found.values())


def homes(folder: str) -> set[str]:
    """Every HOME below `folder` that a living process has: groups whose launch nobody recorded."""
    prefix = b"HOME=" + os.fsencode(folder.rstrip("/")) + b"/"
    found: set[str] = set()
    for name in os.listdir("/proc"):
        if name.isdecimal() and entry_of(int(name)) is not None:
            found.update(os.fsdecode(part[5:]) for part in _environment(int(name)) if part.startswith(prefix))
    return found


def kill(leader: int, start: int, home: str, known: Collection[Entry] = ()) -> list[int]:
    """SIGKILL to all members until none lives, for about a second; returns the pids that live on.

    Blocks: short when they die as they should."""
    for round in range(_ROUNDS):
        living = members(leader, start, home, known)
        if not living:
            return []
        for entry in living:
            with contextlib.suppress(ProcessLookupError):
                _end(entry)
        if round:
            time.sleep(_PAUSE_S)
    return [entry.pid for entry in members(leader, start, home, known)]


def _end(entry: Entry) -> None:
    # The descriptor holds on to the process, so what has been checked is what is ended.
    descriptor = os.pidfd_open(entry.pid)
    try:
        now = entry_of(entry.pid)
        if now is not None and now.start == entry.start:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    finally:
        os.close(descriptor)


def _environment(pid: int) -> list[bytes]:
    # A process of another user has another environment than ours, and could not be ended either.
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []
