"""The folder of one attempt of an execution, and what is found in it after a crash of the service.

workspaces/{execution}.{attempt}/work/            where the harness works: what is preserved and scored
                                 home/            its HOME, which also marks all its processes
                                 instruction.md   what it is told
                                 report.json      what it says of its own model calls
                                 output.log       the beginning of what it wrote to stdout and stderr
                                 process.json     pid and start time of its first process
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Protocol

import msgspec

from schemas.errors import TaskError
from schemas.units import Counters, TaskRef
from services.mesh.process_table import kill
from services.mesh.tasks import read_task
from services.mesh.workspace import WorkspaceError, pack, read_plain, remove

_LEFT_OUT = ("Dockerfile",)
_REPORT_BYTES = 64 * 1024


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """The process that was launched here."""

    pid: int
    start: int
    """When it started, in clock ticks since the machine did."""


class Folder(Protocol):
    """What the service asks of it; `ExecutionFolder` on this machine."""

    @property
    def work(self) -> Path: ...

    @property
    def home(self) -> Path: ...

    @property
    def instruction(self) -> Path: ...

    @property
    def report(self) -> Path: ...

    @property
    def output(self) -> Path: ...

    def make(self, tasks: Path, ref: TaskRef) -> None: ...

    def record(self, pid: int, start: int) -> None: ...

    def recorded(self) -> Recorded | None: ...

    def end_orphans(self) -> list[int]: ...

    def counters(self) -> Counters | None: ...

    def pack(self) -> bytes: ...


class Folders(Protocol):
    """Where the folder of an attempt is found."""

    def __call__(self, run_folder: Path, execution: str, attempt: int) -> Folder: ...


class ExecutionFolder:
    def __init__(self, run_folder: Path, execution: str, attempt: int) -> None:
        self.path = run_folder.absolute() / "workspaces" / f"{execution}.{attempt}"
        self.work = self.path / "work"
        self.home = self.path / "home"
        self.instruction = self.path / "instruction.md"
        self.report = self.path / "report.json"
        self.output = self.path / "output.log"
        self._process = self.path / "process.json"

    def make(self, tasks: Path, ref: TaskRef) -> None:
        """A fresh workspace from the environment of the task that the run began with, whatever was here.

        Raises TaskError, WorkspaceError, OSError."""
        task = read_task(tasks / ref.name)
        if task.digest != ref.digest:
            raise TaskError(
                f"task {task.name} is not the one that the run began with",
                where=str(task.folder),
                remedy="restore the task's folder, or start a new run",
            )
        remove(self.path)
        self.home.mkdir(parents=True)
        shutil.copytree(
            task.environment,
            self.work,
            symlinks=True,
            ignore=lambda folder, names: _LEFT_OUT if Path(folder) == task.environment else (),
        )
        shutil.copyfile(task.instruction, self.instruction)

    def record(self, pid: int, start: int) -> None:
        """Remember the process, so that a service that starts again knows that it was launched, and ends no other."""
        new = self._process.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(Recorded(pid=pid, start=start)))
        new.replace(self._process)

    def recorded(self) -> Recorded | None:
        """The process that was launched here; None when none was."""
        try:
            return msgspec.json.decode(self._process.read_bytes(), type=Recorded)
        except FileNotFoundError:
            return None

    def end_orphans(self) -> list[int]:
        """End what an earlier service left running here; blocks. Returns pids that could not be ended."""
        known = self.recorded() or Recorded(pid=0, start=0)
        return kill(known.pid, known.start, str(self.home))

    def pack(self) -> bytes:
        """The workspace as bytes. Raises WorkspaceError."""
        return pack(self.work)

    def counters(self) -> Counters | None:
        """What the harness reported; None when the report is absent or not one."""
        try:
            counters = msgspec.json.decode(read_plain(self.report, _REPORT_BYTES) or b"", type=Counters)
        except (msgspec.MsgspecError, WorkspaceError):
            return None
        whole = min(counters.calls, counters.reconnects, counters.harness_errors) >= 0
        return counters if whole else None
