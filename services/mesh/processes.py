"""Processes of a run as others see them: the content of `mesh.json`, and what a supervised process does for itself."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec
import psutil

from schemas.errors import GyreError

State = Literal["starting", "running", "waiting", "done", "stopped", "failed"]
_PR_SET_PDEATHSIG = 1
_ORPHAN_GRACE_S = 10.0
_TAIL_BYTES = 16 * 1024
_LAST_WORD_S = 0.2
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_staying: list[threading.Thread] = []


class Process(msgspec.Struct, kw_only=True):
    """One service as `mesh.json` shows it."""

    name: str
    state: State = "starting"
    pid: int = 0
    created: float = 0.0
    """Start of the process in seconds since the epoch: with the pid it names one process for ever."""
    restarts: int = 0
    exit_code: int | None = None
    log: str = ""


class Mesh(msgspec.Struct, kw_only=True):
    """The content of `mesh.json`."""

    run: str
    supervisor: int
    supervisor_created: float
    nats: str
    nats_pid: int = 0
    peak_rss_bytes: int = 0
    ended: bool = False
    services: list[Process] = []


def read_mesh(folder: Path) -> Mesh | None:
    """The `mesh.json` of a run's folder, or None where there is none. Raises GyreError for one that is damaged."""
    path = folder / "mesh.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Mesh)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise GyreError(f"is damaged: {error}", where=str(path), remedy=f"move {folder} away") from error


def is_alive(pid: int, created: float) -> bool:
    """Whether that very process lives; a later one with the same pid is another, and a zombie is dead."""
    try:
        process = psutil.Process(pid)
        same = abs(float(process.create_time()) - created) < 1.0
        return same and bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def last_line(log: Path) -> str:
    """The last line of a service's log that says something, errors of ours reduced to their sentence."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    said = [line.strip() for line in lines if line.strip()]
    return _sentence(said) if said else ""


def end_with_parent(grace_s: float = _ORPHAN_GRACE_S) -> None:
    """In a supervised process: once the parent is gone and the time is up, end whatever still holds us."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        time.sleep(grace_s)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="end-with-parent").start()


def may_stay_behind(thread: threading.Thread) -> None:
    """For a daemon thread that may stand in a library's call when its process ends; `end` looks after it."""
    _staying[:] = [known for known in _staying if known.is_alive()] + [thread]


def end(code: int) -> int:
    """The last thing that a process does; returns `code` for `sys.exit`, or ends the process with it at once.

    A daemon thread that comes back from a C++ call into an interpreter that goes down aborts the process. Nothing is
    taken down where one stands in such a call."""
    for thread in _staying:
        thread.join(_LAST_WORD_S)
    if any(thread.is_alive() for thread in _staying):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _sentence(said: Iterable[str]) -> str:
    """A structured line tells what happened in `what`, or in its exception's last line."""
    last = ""
    for line in said:
        try:
            fields = msgspec.json.decode(line, type=dict[str, object])
        except msgspec.DecodeError:
            last = line
            continue
        if fields.get("level") in ("error", "critical"):
            trace = str(fields.get("exception", "")).strip()
            last = str(fields.get("what") or (trace.splitlines()[-1] if trace else fields.get("event", line)))
        elif not last:
            last = str(fields.get("event", line))
    return last.splitlines()[0]


def die_with(parent: int) -> None:
    """Runs in the child between fork and exec: the kernel tells it when `parent` dies."""
    # SIGTERM, so that the child can end what it started itself.
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
    if os.getppid() != parent:
        os._exit(1)


def kill_group(group: int) -> None:
    """SIGKILL to every process of the group that still lives."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
