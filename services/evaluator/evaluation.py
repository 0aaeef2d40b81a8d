"""One evaluation: the preserved workspace unpacked, the task's tests beside it, their reward.

    {evaluation}.{tries}/work/   the workspace, working directory of the tests
                         tests/  a copy of the task's tests; test.sh runs under bash
                         logs/   VERIFIER_LOGS: where the reward is written
                         home/   their HOME, which also marks all their processes

The reward is the tests' own: nothing here depends on how the execution ended, how long it took or how much it said.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from pathlib import Path

from schemas.errors import BusError, EnvironmentMissing, TaskError
from schemas.events import EvaluationRequested
from schemas.units import TaskRef
from services.evaluator.refusal import Refusal
from services.evaluator.reward import read_reward
from services.mesh.clock import MICROSECONDS
from services.mesh.guard import Guard
from services.mesh.process_group import Launch, clean_environment
from services.mesh.service import Context
from services.mesh.tasks import Task, read_task
from services.mesh.workspace import WorkspaceError, remove, unpack


class Evaluation:
    """`name` is unique among the evaluations of the run, its folder and the log of its tests are called so."""

    def __init__(
        self, context: Context, name: str, request: EvaluationRequested, task: TaskRef, launch: Launch, guard: Guard
    ) -> None:
        self._context, self._request, self._task, self._launch, self._guard = context, request, task, launch, guard
        self._folder = folder_of(context) / name
        self._output = self._folder.with_name(f"{name}.log")

    async def score(self) -> float:
        """The reward in [0, 1]. Raises Refusal; leaves nothing behind but the beginning of what the tests printed."""
        try:
            data = await self._fetch()
            task = await asyncio.to_thread(self._prepare, data)
            await self._run(task)
            return read_reward(self._folder / "logs")
        finally:
            await asyncio.to_thread(self._clear)

    async def _fetch(self) -> bytes:
        if not self._request.workspace:
            raise Refusal("no_workspace")
        try:
            data = await self._context.bus.get_blob(self._request.workspace)
        except BusError as error:
            if await self._context.bus.blob_exists(self._request.workspace):
                raise Refusal("workspace_damaged") from error
            raise Refusal("no_workspace") from error
        if hashlib.sha256(data).hexdigest() != self._request.workspace_digest:
            raise Refusal("workspace_damaged")
        return data

    def _prepare(self, data: bytes) -> Task:
        try:
            task = read_task(self._context.tasks_folder(held_out=self._request.held_out) / self._request.task)
        except TaskError as error:
            raise Refusal("no_task") from error
        if task.digest != self._request.task_digest:
            raise Refusal("task_changed")
        try:
            remove(self._folder)
            unpack(data, self._folder / "work")
        except WorkspaceError as error:
            raise Refusal("workspace_refused") from error
        try:
            shutil.copytree(task.tests, self._folder / "tests", symlinks=True)
            for name in ("logs", "home"):
                (self._folder / name).mkdir()
        except OSError as error:
            raise Refusal("local_failure") from error
        return task

    async def _run(self, task: Task) -> None:
        """Run the tests to their end. Their exit code says nothing: the reward does."""
        home = self._folder / "home"
        limit_s = self._task.verifier_timeout_s or self._context.config.evaluator.timeout_s
        clock = self._context.clock
        try:
            group = self._launch(
                ["bash", str(self._folder / "tests" / "test.sh")],
                folder=self._folder / "work",
                environment=clean_environment(home, {"VERIFIER_LOGS": str(self._folder / "logs")}),
                output=self._output,
                guard=self._guard,
            )
        except EnvironmentMissing as error:
            raise Refusal("cannot_start") from error
        due_us = clock.now_us() + round(limit_s * MICROSECONDS)
        ended = asyncio.create_task(group.wait())
        late = asyncio.create_task(clock.sleep_until(due_us))
        try:
            await asyncio.wait({ended, late}, return_when=asyncio.FIRST_COMPLETED)
            in_time = ended.done()
            await group.end(0.0)
        finally:
            ended.cancel()
            late.cancel()
            group.abandon()
        if not in_time:
            raise Refusal("timeout")

    def _clear(self) -> None:
        try:
            remove(self._folder)
        except WorkspaceError as error:
            self._context.log.warning("evaluation folder left behind", what=str(error))


def folder_of(context: Context) -> Path:
    """Where evaluations of this evaluator work."""
    return context.folder.absolute() / "evaluations" / context.instance
