"""The life of one attempt of an execution: workspace, process, time-outs, what is preserved, and what is said of it.

    make folder --> launch --> say started --> exit | time-out | run over --> end the group --> preserve --> say finished

An attempt that an earlier process of the service launched is lost: what is left of it is ended, and the next attempt
starts in a fresh workspace, as long as the execution's overall budget lasts.

Invariants
- `execution.finished` is said only when no process of the group lives and the workspace lies in BLOBS;
- a launch is on disk before it is in LOG, so after a crash it is known whether there was one: what was launched is never
  launched again under the same attempt;
- what the service says of one execution is a chain, each link expecting the one before: nothing of an attempt follows
  its loss, whichever process says it;
- what is said holds nothing that the harness wrote.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence

import msgspec

from schemas import streams
from schemas.errors import Conflict, EnvironmentMissing, TaskError
from schemas.events import ExecutionFinished, ExecutionLost, ExecutionStarted
from schemas.units import Counters, FinishReason, Value
from services.harness.book import Attempt, Book
from services.harness.folder import Folder, Folders
from services.mesh.clock import MICROSECONDS
from services.mesh.codec import decode
from services.mesh.environment import fill
from services.mesh.guard import Keeper
from services.mesh.process_group import Group, Launch, clean_environment
from services.mesh.service import Context
from services.mesh.tokens import make_token
from services.mesh.workspace import WorkspaceError

GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL for a harness whose time is up."""
STOP_GRACE_S = 2.0
"""The same when the service itself stops."""
_PACKERS = 2
_SCORED: tuple[FinishReason, ...] = ("completed", "failed", "harness_timeout")
"""Ends after which the workspace is preserved; the others are never scored."""
RESTARTED = "harness service restarted"
SURPLUS = "its group is complete without it"


class Executions:
    """What all executions of the service share."""

    def __init__(self, context: Context, book: Book, launch: Launch, guard: Keeper, folders: Folders) -> None:
        self.context, self.book, self.launch, self.guard = context, book, launch, guard
        self._folders = folders
        self.over = asyncio.Event()
        """The run is finished: whatever runs is stopped."""
        self.running = 0
        self._live: dict[str, Execution] = {}
        """Those that run in this process."""
        self.packers = asyncio.Semaphore(_PACKERS)

    def folder(self, attempt: Attempt) -> Folder:
        return self._folders(self.context.folder, attempt.execution, attempt.attempt)

    async def run(self, attempt: Attempt) -> None:
        """From the placement to `execution.finished`. Cancelling ends the process and says nothing."""
        execution = self._live[attempt.execution] = Execution(self, attempt)
        try:
            if self.book.is_cancelled(attempt.execution):
                execution.surplus.set()
            finished = await execution.live()
        finally:
            if self._live.get(attempt.execution) is execution:
                del self._live[attempt.execution]
        await self._say_finished(attempt, finished)

    def end(self, execution: str) -> None:
        """The execution is cancelled: what runs of it here is stopped."""
        if execution in self._live:
            self._live[execution].surplus.set()

    async def resume(self, attempt: Attempt) -> None:
        """Close an attempt that an earlier process of the service launched: end what is left of it, and report."""
        survivors = await asyncio.to_thread(self.folder(attempt).end_orphans)
        if survivors:
            self.context.log.error("orphans survived SIGKILL", execution=attempt.execution, pids=survivors)
        if self.book.is_cancelled(attempt.execution):
            await self._say_finished(attempt, self._ended(attempt, "surplus", SURPLUS))
        elif self.book.over:
            await self._say_finished(attempt, self._ended(attempt, "cancelled", "the run is over"))
        elif self.overdue(attempt):
            await self._say_finished(attempt, self._ended(attempt, "overall_timeout", RESTARTED))
        else:
            await self._say(attempt, "lost", ExecutionLost(attempt=attempt.attempt, reason=RESTARTED))

    def overdue(self, attempt: Attempt) -> bool:
        """Whether the overall budget of the attempt's execution is spent."""
        age_us = self.book.age_us(attempt.execution, self.context.clock.now_us())
        return age_us >= round(self.context.config.harness.overall_timeout_s * MICROSECONDS)

    def _ended(self, attempt: Attempt, reason: FinishReason, detail: str) -> ExecutionFinished:
        """The end of an attempt of an earlier process, with nothing to score."""
        return ExecutionFinished(
            attempt=attempt.attempt,
            reason=reason,
            exit_code=None,
            seconds=self.book.age_us(attempt.execution, self.context.clock.now_us()) / MICROSECONDS,
            workspace="",
            workspace_digest="",
            counters=self.folder(attempt).counters() or Counters(),
            detail=detail,
        )

    async def cancel(self, attempt: Attempt) -> None:
        """Report an attempt that was cancelled, or that the end of the run overtook, before it started."""
        if self.book.is_cancelled(attempt.execution):
            await self._say_finished(attempt, unstarted(attempt, "surplus", SURPLUS))
        else:
            await self._say_finished(attempt, unstarted(attempt, "cancelled", "the run is over"))

    async def say_started(self, attempt: Attempt) -> None:
        await self._say(attempt, "started", ExecutionStarted(attempt=attempt.attempt))

    async def preserve(self, attempt: Attempt, finished: ExecutionFinished) -> ExecutionFinished:
        """Put the workspace into BLOBS, where its end leaves something to score; `finished` with its name and digest."""
        if finished.reason not in _SCORED:
            return finished
        name = streams.workspace_blob(attempt.execution, attempt.attempt)
        try:
            async with self.packers:
                data = await asyncio.to_thread(self.folder(attempt).pack)
                digest = await self.context.bus.put_blob(name, data)
        except WorkspaceError as error:
            self.context.log.warning("workspace not preserved", execution=attempt.execution, what=str(error))
            said = f"{finished.detail}; {error.what}" if finished.detail else error.what
            return msgspec.structs.replace(finished, detail=said)
        return msgspec.structs.replace(finished, workspace=name, workspace_digest=digest)

    async def _say_finished(self, attempt: Attempt, finished: ExecutionFinished) -> None:
        await self._say(attempt, "finished", finished)

    async def _say(self, attempt: Attempt, verb: str, data: Value) -> None:
        """Say something of an attempt, unless it ended before: what was said first stands, deciders have acted on it."""
        context, execution = self.context, attempt.execution
        log = streams.log_stream(context.run)
        mine = streams.chain_filter(context.run, "harness", "execution", execution)
        while not self.book.has_ended(attempt):
            claim = (mine, self.book.said(execution))
            try:
                seq = await context.say(
                    f"execution.{verb}",
                    execution,
                    data,
                    id=attempt.fact_id(verb),
                    causation=attempt.causation,
                    claim=claim,
                )
            except Conflict as error:
                last = await context.bus.last_for(log, mine)
                assert last is not None
                event = decode(last)
                if event.kind != "execution.started":
                    context.log.warning("ended before", execution=execution, what=error.what)
                    return
                # An earlier process of this service had said it, and it came late.
                seq = event.seq
                self.book.heard(execution, seq)
            else:
                self.book.heard(execution, seq)
                return
        context.log.warning("ended before", execution=execution, attempt=attempt.attempt)


class Execution:
    """One attempt in this process of the service."""

    def __init__(self, executions: Executions, attempt: Attempt) -> None:
        self._all, self._attempt = executions, attempt
        self._folder = executions.folder(attempt)
        self._ref = executions.book.task(attempt)
        self.surplus = asyncio.Event()
        """Its group is complete without it."""

    async def live(self) -> ExecutionFinished:
        if self.surplus.is_set():
            return unstarted(self._attempt, "surplus", SURPLUS)
        if self._all.over.is_set():
            return unstarted(self._attempt, "cancelled", "the run is over")
        if self._all.overdue(self._attempt):
            return unstarted(self._attempt, "overall_timeout", "its time was over before this attempt")
        try:
            await asyncio.to_thread(self._make)
            if self.surplus.is_set():
                return unstarted(self._attempt, "surplus", SURPLUS)
            group = self._launch()
            try:
                self._folder.record(group.pid, group.start)
            except OSError:
                group.abandon()
                raise
        except (TaskError, WorkspaceError, EnvironmentMissing) as error:
            self._all.context.log.error("cannot start", execution=self._attempt.execution, what=str(error))
            return unstarted(self._attempt, "total_failure", error.what)
        except OSError as error:
            self._all.context.log.error("cannot start", execution=self._attempt.execution, what=str(error))
            return unstarted(self._attempt, "total_failure", f"no workspace: {os.strerror(error.errno or 0)}")
        began = self._all.context.clock.now_us()
        self._all.running += 1
        try:
            await self._all.say_started(self._attempt)
            reason = await self._until_end(group, began)
            code = await group.end(GRACE_S)
            seconds = (self._all.context.clock.now_us() - began) / MICROSECONDS
            return await self._all.preserve(self._attempt, self._finished(reason, code, seconds))
        except asyncio.CancelledError:
            await group.end(STOP_GRACE_S)
            raise
        finally:
            group.abandon()
            self._all.running -= 1

    def _make(self) -> None:
        self._folder.make(self._all.context.tasks_folder(held_out=self._attempt.held_out), self._ref)

    def _launch(self) -> Group:
        context, attempt = self._all.context, self._attempt
        harness = context.config.harness
        values = {
            "{python}": sys.executable,
            "{here}": str(context.here),
            "{instruction}": str(self._folder.instruction),
            "{report}": str(self._folder.report),
        }
        proxy = self._all.book.proxy_of(attempt.execution)
        token = make_token(context.secret, attempt.execution, attempt.attempt)
        environment = {
            **{name: fill(value, key=f"harness.env.{name}") for name, value in harness.env.items()},
            "ANTHROPIC_BASE_URL": proxy,
            "ANTHROPIC_AUTH_TOKEN": token,
            "ANTHROPIC_MODEL": harness.model,
            "OPENAI_BASE_URL": f"{proxy}/v1",
            "OPENAI_API_KEY": token,
            "OPENAI_MODEL": harness.model,
            "GYRE_AGENT_SEED": attempt.execution,
        }
        return self._all.launch(
            filled(harness.command, values),
            folder=self._folder.work,
            environment=clean_environment(self._folder.home, environment),
            output=self._folder.output,
            guard=self._all.guard,
        )

    async def _until_end(self, group: Group, began_us: int) -> FinishReason | None:
        """Why it has to end; None when it ended by itself."""
        config, clock = self._all.context.config.harness, self._all.context.clock
        first_us = min(began_us, self._all.book.started_us.get(self._attempt.execution, began_us))
        own_us = began_us + round((self._ref.agent_timeout_s or config.timeout_s) * MICROSECONDS)
        overall_us = first_us + round(config.overall_timeout_s * MICROSECONDS)
        ended = asyncio.create_task(group.wait())
        late = asyncio.create_task(clock.sleep_until(min(own_us, overall_us)))
        over = asyncio.create_task(self._all.over.wait())
        surplus = asyncio.create_task(self.surplus.wait())
        try:
            await asyncio.wait({ended, late, over, surplus}, return_when=asyncio.FIRST_COMPLETED)
            # However its process ended: refused calls end it too.
            if surplus.done():
                return "surplus"
            if ended.done():
                return None
            if over.done():
                return "cancelled"
            return "harness_timeout" if own_us <= overall_us else "overall_timeout"
        finally:
            for task in (ended, late, over, surplus):
                task.cancel()

    def _finished(self, forced: FinishReason | None, code: int, seconds: float) -> ExecutionFinished:
        reason: FinishReason = forced or ("completed" if code == 0 else "failed")
        counters = self._folder.counters()
        if counters is None:
            counters = Counters(harness_errors=1 if reason == "failed" else 0)
        return ExecutionFinished(
            attempt=self._attempt.attempt,
            reason=reason,
            exit_code=code,
            seconds=seconds,
            workspace="",
            workspace_digest="",
            counters=counters,
            detail=_detail(reason, code, seconds),
        )


def filled(command: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """The command with its placeholders filled in; other braces stay."""
    parts = list(command)
    for placeholder, value in values.items():
        parts = [part.replace(placeholder, value) for part in parts]
    return parts


def unstarted(attempt: Attempt, reason: FinishReason, detail: str) -> ExecutionFinished:
    """The end of an attempt of which no process ever ran."""
    return ExecutionFinished(
        attempt=attempt.attempt,
        reason=reason,
        exit_code=None,
        seconds=0.0,
        workspace="",
        workspace_digest="",
        detail=detail,
    )


def _detail(reason: FinishReason, code: int, seconds: float) -> str:
    match reason:
        case "completed":
            return ""
        case "failed" if code < 0:
            return f"ended by signal {-code}"
        case "failed":
            return f"exit code {code}"
        case "cancelled":
            return "the run is over"
        case "surplus":
            return SURPLUS
        case _:
            return f"stopped after {seconds:.1f} s"
