"""One evaluation: the preserved workspace unpacked, the task's tests beside it, their reward.

The reward is the tests' own: nothing here depends on how the execution ended, how long it took or how much it said.
"""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

from schemas.errors import BusError, EnvironmentMissing
from schemas.events import EvaluationRequested
from schemas.units import TaskRef
from services.evaluator.folder import Folders
from services.evaluator.refusal import Refusal
from services.mesh.clock import MICROSECONDS
from services.mesh.guard import Keeper
from services.mesh.process_group import Launch, clean_environment
from services.mesh.service import Context
from services.mesh.workspace import WorkspaceError


class Evaluation:
    """`name` is unique among the evaluations of the run, its folder and the log of its tests are called so."""

    def __init__(
        self,
        context: Context,
        name: str,
        request: EvaluationRequested,
        task: TaskRef,
        *,
        launch: Launch,
        guard: Keeper,
        folders: Folders,
    ) -> None:
        self._context, self._request, self._task, self._launch, self._guard = context, request, task, launch, guard
        self._folder = folders(folder_of(context), name)

    async def score(self) -> float:
        """The reward in [0, 1]. Raises Refusal; leaves nothing behind but the beginning of what the tests printed."""
        try:
            data = await self._fetch()
            source = self._context.tasks_folder(held_out=self._request.held_out) / self._request.task
            await asyncio.to_thread(self._folder.prepare, source, self._request.task_digest, data)
            await self._run()
            return self._folder.reward()
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

    async def _run(self) -> None:
        """Run the tests to their end. Their exit code says nothing: the reward does."""
        limit_s = self._task.verifier_timeout_s or self._context.config.evaluator.timeout_s
        clock = self._context.clock
        try:
            group = self._launch(
                ["bash", str(self._folder.tests / "test.sh")],
                folder=self._folder.work,
                environment=clean_environment(self._folder.home, {"VERIFIER_LOGS": str(self._folder.logs)}),
                output=self._folder.output,
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
            self._folder.clear()
        except WorkspaceError as error:
            self._context.log.warning("evaluation folder left behind", what=str(error))


def folder_of(context: Context) -> Path:
    """Where evaluations of this evaluator work."""
    return context.folder.absolute() / "evaluations" / context.instance
