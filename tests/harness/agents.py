"""Harness programs for tests: short scripts for `python -S -c` and bash, and files instead of sleeps to wait for them."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

PYTHON = ["{python}", "-S", "-E", "-c"]
BASH = ["bash", "-c"]

GOOD = [
    *BASH,
    'cp in.txt out.txt; echo \'{"calls": 3, "reconnects": 1, "harness_errors": 0, "turns": 2}\' > "$1"; cat "$0"',
    "{instruction}",
    "{report}",
]
"""Copies in.txt to out.txt, reports, prints its instruction."""

HANG = [*BASH, "echo partial > out.txt; echo $$ > up; exec sleep 600"]
"""Writes out.txt, says that it is up, and goes on for ever."""


def workspace(folder: Path, execution: str, attempt: int = 0) -> Path:
    return folder / "workspaces" / f"{execution}.{attempt}" / "work"


async def file_of(path: Path) -> str:
    """The content of a file that another process writes, once it is there and not empty."""
    while not path.exists() or not path.stat().st_size:
        await asyncio.sleep(0.002)
    return path.read_text()


def alive(pid: int) -> bool:
    """Whether the process lives; a dead one that nobody waited for doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def gone(pid: int) -> None:
    """Returns once the process is dead."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
