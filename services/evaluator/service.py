"""The evaluator: a worker that claims requested evaluations, runs them, and says their scores.

    history --> end orphans --> claim, run, answer ... what an earlier process left undone too ... until cancelled

It decides nothing. Several may serve a run under names of their own: a claim is stored only at the request's sequence,
so one of them wins. A free worker claims, not before, so the load follows who has time.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager

from schemas import streams
from schemas.errors import Conflict, EnvironmentMissing
from schemas.events import EvaluationClaimed, EvaluationFailed, EvaluationRequested, EvaluationScored
from schemas.units import TaskRef
from services.evaluator.book import Book, Request
from services.evaluator.evaluation import Evaluation, folder_of
from services.evaluator.folder import EvaluationFolder, Folders
from services.evaluator.refusal import Reason, Refusal
from services.mesh import process_group, process_table
from services.mesh.clock import MICROSECONDS
from services.mesh.guard import Guard, Keeper
from services.mesh.process_group import Launch
from services.mesh.process_table import Processes
from services.mesh.service import Context, announce

ABOUT = ("evaluation", "group", "run")
"""What the evaluator follows in LOG."""
CLAIM_REST_S = 30.0
"""What an evaluation may need besides its tests: to fetch and unpack a workspace, and to answer."""


async def serve(
    context: Context,
    *,
    launch: Launch = process_group.launch,
    guard: Callable[[], AbstractContextManager[Keeper]] = Guard,
    folders: Folders = EvaluationFolder,
    processes: Processes = process_table,
) -> None:
    """Runs until cancelled; tests that run then are ended, and run again at the next start."""
    if shutil.which("bash") is None:
        raise EnvironmentMissing("there is no bash", where=context.instance, remedy="install bash: tests run under it")
    reading = ["reading the log"]
    context.health.ready = lambda: reading[0]
    with guard() as keeper:
        evaluator = Evaluator(context, launch, keeper, folders)
        context.health.gauge("gyre_evaluations_running", "Evaluations that run", lambda: evaluator.running)
        context.health.gauge("gyre_evaluations_waiting", "Requests that nobody claimed", lambda: len(evaluator.book))
        past, after = await context.history(about=ABOUT)
        # Of all that LOG holds: where an evaluator starts again and again, nothing else may be said meanwhile.
        newest = await context.bus.get(streams.log_stream(context.run), after)
        now_us = context.clock.now_us()
        for event in past:
            # Only how long it lies behind the newest is known, whatever the clock of the event bus shows.
            evaluator.book.apply(event, now_us - (newest.time_us - event.time_us))
        for home in sorted(await asyncio.to_thread(processes.homes, str(folder_of(context)))):
            await asyncio.to_thread(processes.kill, 0, 0, home)
        await announce(context)
        evaluator.book.process = context.joined
        reading[0] = ""
        try:
            await evaluator.work(after)
        except ExceptionGroup as failures:
            # The first failure ended the others; it is what a person has to read.
            raise failures.exceptions[0] from failures


class Evaluator:
    def __init__(self, context: Context, launch: Launch, guard: Keeper, folders: Folders) -> None:
        self.book = Book(context.instance, self._holds_us)
        self.running = 0
        self._context, self._launch, self._guard, self._folders = context, launch, guard, folders
        self._tasks = {(False, task.name): task for task in context.started.tasks}
        self._tasks |= {(True, task.name): task for task in context.started.held_out}
        self._arrived = asyncio.Condition()

    async def work(self, after: int) -> None:
        """Follows LOG from `after` with as many workers as configured."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._context.config.evaluator.workers):
                tasks.create_task(self._worker())
            for due in self.book.dues():
                tasks.create_task(self._ring(due))
            async for event in self._context.events(after, about=ABOUT):
                self.book.apply(event, self._context.clock.now_us())
                if event.kind in ("evaluation.requested", "evaluation.claimed"):
                    news = self.book.due(event.entity)
                    if news is not None:
                        tasks.create_task(self._ring(news))

    def _holds_us(self, data: EvaluationRequested) -> int:
        """A claim holds for twice the time after which its evaluator ends the tests, and some for the rest."""
        known = self._tasks.get((data.held_out, data.task))
        limit_s = (known.verifier_timeout_s if known else 0.0) or self._context.config.evaluator.timeout_s
        return round((2 * limit_s + CLAIM_REST_S) * MICROSECONDS)

    async def _ring(self, due: int) -> None:
        """Wakes a worker when an evaluation is due; one that is busy then looks by itself."""
        await self._context.clock.sleep_until(due)
        async with self._arrived:
            self._arrived.notify()

    async def _worker(self) -> None:
        while True:
            request = await self._next()
            claimed = await self._claim(request)
            if claimed:
                self.running += 1
                try:
                    await self._evaluate(request, claimed)
                finally:
                    self.running -= 1

    async def _next(self) -> Request:
        async with self._arrived:
            while (request := self.book.take(self._context.clock.now_us())) is None:
                await self._arrived.wait()
            return request

    async def _claim(self, request: Request) -> int:
        """Sequence of the claim; 0 where somebody else was first."""
        context = self._context
        # An evaluator may claim again what an earlier process of it left undone, or another that it had lost it to.
        again = f".{request.after}" if request.after != request.seq else ""
        try:
            return await context.say(
                "evaluation.claimed",
                request.evaluation,
                EvaluationClaimed(evaluator=context.instance, process=context.joined),
                id=f"{request.fact_id('claimed')}.{context.instance}{again}",
                causation=request.after,
                claim=(self._all_of(request), request.after),
            )
        except Conflict:
            return 0

    def _all_of(self, request: Request) -> str:
        return streams.aggregate_filter(self._context.run, "evaluation", request.evaluation)

    async def _evaluate(self, request: Request, claimed: int) -> None:
        context, data = self._context, request.data
        began_us = context.clock.now_us()
        task = self._tasks.get((data.held_out, data.task), TaskRef(name=data.task, digest=""))
        name = f"{request.evaluation}.{data.tries}"
        try:
            evaluation = Evaluation(
                context, name, data, task, launch=self._launch, guard=self._guard, folders=self._folders
            )
            score = await evaluation.score()
        except Refusal as refusal:
            context.log.warning(
                "no score", evaluation=request.evaluation, reason=refusal.reason, cause=str(refusal.__cause__ or "")
            )
            await self._say_failed(request, claimed, refusal.reason)
            return
        try:
            await context.say(
                "evaluation.scored",
                request.evaluation,
                EvaluationScored(
                    execution=data.execution,
                    attempt=data.attempt,
                    score=score,
                    valid=True,
                    workspace_digest=data.workspace_digest,
                    branch=data.branch,
                    reference=data.workspace,
                    seconds=(context.clock.now_us() - began_us) / MICROSECONDS,
                ),
                id=request.fact_id("scored"),
                causation=request.seq,
            )
        except Conflict as error:
            # Write-once: an evaluation has one score, the one that was said first.
            context.log.warning("scored before", evaluation=request.evaluation, what=error.what)

    async def _say_failed(self, request: Request, claimed: int, reason: Reason) -> None:
        context, data = self._context, request.data
        try:
            await context.say(
                "evaluation.failed",
                request.evaluation,
                EvaluationFailed(execution=data.execution, attempt=data.attempt, reason=reason, tries=data.tries),
                id=request.fact_id("failed"),
                causation=request.seq,
                claim=(self._all_of(request), claimed),
            )
        except Conflict as error:
            # An earlier process that had the try was heard late, or it was claimed anew.
            context.log.warning("answered before", evaluation=request.evaluation, what=error.what)
