"""Tasks: folders in Harbor's format, read and checked before anything runs.

    {task}/task.toml          [agent] timeout_sec, [verifier] timeout_sec; what else it says is left alone
           instruction.md     what the harness is told
           environment/       the workspace at the start; its Dockerfile is not part of it
           tests/test.sh      writes a number in [0, 1] to ${VERIFIER_LOGS:-/logs/verifier}/reward.txt

The digest covers every file of the folder (path, whether it is executable, content) and nothing else, so the same task
has the same digest on every machine and a changed one is noticed before it is scored.
"""

from __future__ import annotations

import hashlib
import math
import os
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from schemas.errors import TaskError
from schemas.units import TaskRef

_REMEDY = "a task is a folder with task.toml, instruction.md, environment/ and tests/test.sh (Harbor's format)"
_PARTS = {
    "task.toml": "describe the task in it; an empty file takes the run's time-outs",
    "instruction.md": "write what the harness is to do",
    "environment": "make the folder and put the files in it with which the workspace begins",
    "tests/test.sh": "write a script that puts a number in [0, 1] into ${VERIFIER_LOGS:-/logs/verifier}/reward.txt",
}


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One task on this machine."""

    name: str
    """Name of its folder."""
    folder: Path
    digest: str
    """SHA-256 in hex over its content."""
    agent_timeout_s: float = 0.0
    """Harness time-out of the task; 0 takes the run's."""
    verifier_timeout_s: float = 0.0

    @property
    def environment(self) -> Path:
        return self.folder / "environment"

    @property
    def tests(self) -> Path:
        return self.folder / "tests"

    @property
    def instruction(self) -> Path:
        return self.folder / "instruction.md"


def read_task(folder: Path) -> Task:
    """The task in `folder`. Raises TaskError that names everything that is missing or wrong, and what to do."""
    if not folder.is_dir():
        raise TaskError("there is no such task folder", where=str(folder), remedy=_REMEDY)
    missing = [part for part in _PARTS if not _is_there(folder / part, folder=part == "environment")]
    if missing:
        raise TaskError(
            f"the task has no {', no '.join(missing)}",
            where=str(folder),
            remedy="; ".join(f"{part}: {_PARTS[part]}" for part in missing),
        )
    settings = _settings(folder / "task.toml")
    return Task(
        name=folder.name,
        folder=folder,
        digest=digest_of(folder),
        agent_timeout_s=_seconds(settings, "agent", folder),
        verifier_timeout_s=_seconds(settings, "verifier", folder),
    )


def list_tasks(folder: Path, *, key: str = "tasks.path") -> list[Task]:
    """Every task in `folder`, which `key` of the configuration names, sorted by name; hidden folders and plain files are
    passed over.

    Raises one TaskError with the errors of all tasks, or one that says that there is none.
    """
    if not folder.is_dir():
        raise TaskError(
            "there is no such folder of tasks", where=str(folder), remedy=f"set {key} to the folder of tasks"
        )
    tasks, errors = [], []
    for path in sorted(folder.iterdir(), key=lambda path: path.name):
        if path.name.startswith(".") or not path.is_dir():
            continue
        try:
            tasks.append(read_task(path))
        except TaskError as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        listed = "\n".join(f"  {error.where}: {error.what}" for error in errors)
        remedies = dict.fromkeys(error.remedy for error in errors)
        raise TaskError(
            f"{len(errors)} tasks cannot be used:\n{listed}", where=str(folder), remedy="\n     ".join(remedies)
        )
    if not tasks:
        raise TaskError("there is no task in this folder", where=str(folder), remedy=_REMEDY)
    return tasks


def task_refs(tasks: Iterable[Task]) -> list[TaskRef]:
    """What `run.started` says of the tasks, in the order given."""
    return [
        TaskRef(
            name=task.name,
            digest=task.digest,
            agent_timeout_s=task.agent_timeout_s,
            verifier_timeout_s=task.verifier_timeout_s,
        )
        for task in tasks
    ]


def digest_of(folder: Path) -> str:
    """SHA-256 over the paths, executable bits and contents of all files below `folder`, and where links point."""
    total = hashlib.sha256()
    for relative, path in sorted(_files(folder)):
        try:
            link = path.is_symlink()
            content = os.fsencode(os.readlink(path)) if link else path.read_bytes()
            mark = b"l" if link else b"x" if path.stat().st_mode & 0o100 else b"f"
        except OSError as error:
            raise TaskError(
                f"cannot read {relative}: {error.strerror}", where=str(folder), remedy="make it readable"
            ) from None
        for part in (mark, os.fsencode(relative), content):
            total.update(len(part).to_bytes(8, "big"))
            total.update(part)
    return total.hexdigest()


def _files(folder: Path) -> Iterable[tuple[str, Path]]:
    for root, folders, names in os.walk(folder):
        linked = [name for name in folders if os.path.islink(os.path.join(root, name))]
        for name in [*names, *linked]:
            path = Path(root, name)
            yield path.relative_to(folder).as_posix(), path


def _is_there(path: Path, *, folder: bool) -> bool:
    return path.is_dir() if folder else path.is_file()


def _settings(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TaskError(f"not valid TOML: {error}", where=str(path), remedy="correct the line named") from None
    except OSError as error:
        raise TaskError(f"cannot be read: {error.strerror}", where=str(path), remedy="make it readable") from None


def _seconds(settings: dict[str, Any], section: str, folder: Path) -> float:
    """`timeout_sec` of a section; 0 where the task leaves it to the run."""
    part = settings.get(section, {})
    if isinstance(part, dict) and "timeout_sec" not in part:
        return 0.0
    value = part["timeout_sec"] if isinstance(part, dict) else part
    number = isinstance(part, dict) and isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
        raise TaskError(
            f"[{section}] timeout_sec = {value!r} is not a number of seconds above 0",
            where=str(folder / "task.toml"),
            remedy="give a positive number, or leave it out to take the run's time-out",
        )
    return float(value)
