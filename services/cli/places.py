"""Where things lie: the state folder, its runs, and who uses it now.

state/cache          what runs share: starting policies, generated tasks
state/nats           the event bus's store
state/runs/{run}     secret, mesh.json, logs, checkpoints, workspaces, summary.json
state/lock           held by the one process that runs something here
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec

from schemas.errors import EnvironmentMissing, GyreError
from services.mesh.processes import Mesh, is_alive, read_mesh


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """The process that holds the state folder."""

    pid: int
    created: float
    what: str


class Places:
    """Paths below one state folder; makes nothing until asked."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.cache = self.root / "cache"
        self.nats = self.root / "nats"
        self.runs = self.root / "runs"

    def run(self, run: str) -> Path:
        return self.runs / run

    def newest(self) -> str | None:
        """The run that was started last."""
        folders = [path for path in self.runs.glob("r-*") if (path / "mesh.json").exists()]
        return max(folders, key=_began).name if folders else None

    def newest_supervised(self) -> str | None:
        """The run that was started last, unless others keep its services (`gyre open`)."""
        run = self.newest()
        mesh = read_mesh(self.run(run)) if run else None
        return run if mesh is not None and mesh.supervisor else None

    def chosen(self, run: str | None) -> str:
        """The run that a person named, or the newest. Raises GyreError when there is none."""
        found = run or self.newest()
        if found is None:
            raise GyreError("no run here yet", where=str(self.root), remedy="start one with `gyre run FILE`")
        if not self.run(found).is_dir():
            known = ", ".join(sorted(path.name for path in self.runs.glob("r-*"))) or "none"
            raise GyreError(f"no run {found}; known here: {known}", where=str(self.root), remedy="name one of these")
        return found

    def live(self) -> Mesh | None:
        """The mesh that runs from this folder now."""
        for folder in sorted(self.runs.glob("r-*"), key=_began, reverse=True):
            mesh = read_mesh(folder)
            if mesh and not mesh.ended and is_alive(mesh.supervisor, mesh.supervisor_created):
                return mesh
        return None

    def goes_on(self, run: str) -> bool:
        """Whether somebody keeps the run up: the mesh that runs here, or others (`gyre open`), of whom we can't know."""
        mesh = read_mesh(self.run(run))
        if mesh is None or not mesh.supervisor:
            return mesh is not None
        return not mesh.ended and is_alive(mesh.supervisor, mesh.supervisor_created)

    def holder(self) -> Holder | None:
        """Who holds the folder now."""
        try:
            held = msgspec.json.decode((self.root / "lock").read_bytes(), type=Holder)
        except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
            return None
        return held if is_alive(held.pid, held.created) else None

    def new_log(self, name: str) -> IO[bytes]:
        """A fresh log in the folder, open for writing. Raises EnvironmentMissing when the folder cannot be used, or is:
        who uses it may write there."""
        holder = self.holder()
        if holder is not None:
            raise self._taken(holder)
        with self._usable():
            self.root.mkdir(parents=True, exist_ok=True)
            return (self.root / name).open("wb")

    def _taken(self, holder: Holder | None) -> EnvironmentMissing:
        who = f"process {holder.pid} ({holder.what})" if holder else "another process"
        return EnvironmentMissing(
            f"{who} runs here already",
            where=str(self.root),
            remedy="end it with `gyre down`, or use another folder with --state DIR",
        )

    @contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise EnvironmentMissing(
                f"the state folder cannot be used: {error.strerror}",
                where=str(self.root),
                remedy="choose one that you may write to with --state DIR",
            ) from error

    @contextmanager
    def hold(self, what: str) -> Iterator[None]:
        """The folder for us alone. Raises EnvironmentMissing that names who has it."""
        import psutil

        with self._usable():
            self.root.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise self._taken(self.holder()) from None
            me = Holder(pid=os.getpid(), created=psutil.Process().create_time(), what=what)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, msgspec.json.encode(me), 0)
            try:
                yield
            finally:
                os.ftruncate(descriptor, 0)
        finally:
            os.close(descriptor)


def _began(folder: Path) -> float:
    try:
        return (folder / "secret").stat().st_mtime
    except FileNotFoundError:
        return 0.0
