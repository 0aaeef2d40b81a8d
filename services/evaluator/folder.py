"""The folder of one evaluation: the preserved workspace unpacked, and a copy of the task's tests beside it.

{evaluation}.{tries}/work/   the workspace, working directory of the tests
                     tests/  a copy of the task's tests; test.sh runs under bash
                     logs/   VERIFIER_LOGS: where the reward is written
                     home/   their HOME, which also marks all their processes
{evaluation}.{tries}.log     the beginning of what the tests printed; all that is left afterwards
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Protocol

from schemas.errors import TaskError
from services.evaluator.refusal import Refusal
from services.evaluator.reward import read_reward
from services.mesh.tasks import read_task
from services.mesh.workspace import WorkspaceError, remove, unpack


class Folder(Protocol):
    """What an evaluation asks of it; `EvaluationFolder` on this machine."""

    work: Path
    tests: Path
    logs: Path
    home: Path
    output: Path

    def prepare(self, task: Path, digest: str, workspace: bytes) -> None: ...

    def reward(self) -> float: ...

    def clear(self) -> None: ...


class Folders(Protocol):
    """Where the folder of an evaluation is found, by its name below the evaluator's own folder."""

    def __call__(self, folder: Path, name: str) -> Folder: ...


class EvaluationFolder:
    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / name
        self.work = self.path / "work"
        self.tests = self.path / "tests"
        self.logs = self.path / "logs"
        self.home = self.path / "home"
        self.output = folder / f"{name}.log"

    def prepare(self, task: Path, digest: str, workspace: bytes) -> None:
        """Everything that the tests need, whatever was here. Raises Refusal."""
        try:
            found = read_task(task)
        except TaskError as error:
            raise Refusal("no_task") from error
        if found.digest != digest:
            raise Refusal("task_changed")
        try:
            remove(self.path)
            unpack(workspace, self.work)
        except WorkspaceError as error:
            raise Refusal("workspace_refused") from error
        try:
            shutil.copytree(found.tests, self.tests, symlinks=True)
            for folder in (self.logs, self.home):
                folder.mkdir()
        except OSError as error:
            raise Refusal("local_failure") from error

    def reward(self) -> float:
        """What the tests wrote. Raises Refusal."""
        return read_reward(self.logs)

    def clear(self) -> None:
        """Raises WorkspaceError where something can't be removed."""
        remove(self.path)
