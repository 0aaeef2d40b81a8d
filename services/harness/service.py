"""The harness service: a worker that follows LOG, launches what is placed, and reports how it ended.

    history --> end orphans --> say what is lost with an earlier process --> launch what is placed --> ... until cancelled

It decides nothing. An execution starts when its proxy has joined, at the address of the process that joined last; at
`run.finished` all that run are stopped. One instance serves a run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager

from services.harness.book import Book
from services.harness.execution import Executions
from services.harness.folder import ExecutionFolder, Folders
from services.mesh import process_group, process_table
from services.mesh.guard import Guard, Keeper
from services.mesh.process_group import Launch
from services.mesh.process_table import Processes
from services.mesh.service import Context, announce

ABOUT = ("execution", "service", "run")
"""What the service follows in LOG."""
_LAUNCHING = ("execution.placed", "execution.lost", "execution.cancelled", "service.joined", "run.finished")
"""After these somebody may have to be started, or ended without a start."""


async def serve(
    context: Context,
    *,
    launch: Launch = process_group.launch,
    guard: Callable[[], AbstractContextManager[Keeper]] = Guard,
    folders: Folders = ExecutionFolder,
    processes: Processes = process_table,
) -> None:
    """Runs until cancelled; then it ends its children, which the next start reports."""
    book = Book(context.started.tasks, context.started.held_out, proxies=context.config.proxy.count)
    waits_for = ["reading the log"]
    context.health.ready = lambda: waits_for[0]
    with guard() as keeper:
        executions = Executions(context, book, launch, keeper, folders)
        context.health.gauge("gyre_executions_running", "Harness processes that run", lambda: executions.running)
        past, after = await context.history(about=ABOUT)
        for event in past:
            book.apply(event)
        await announce(context)
        try:
            async with asyncio.TaskGroup() as tasks:
                await _take_up(context, executions, processes, tasks)
                waits_for[0] = ""
                await _follow(context, executions, tasks, after)
        except ExceptionGroup as failures:
            # The first failure ended the others; it is what a person has to read.
            raise failures.exceptions[0] from failures


async def _take_up(context: Context, executions: Executions, processes: Processes, tasks: asyncio.TaskGroup) -> None:
    """What earlier processes of this service left: orphans are ended, launched attempts are lost, the others start."""
    book = executions.book
    homes = await asyncio.to_thread(processes.homes, str(context.folder.absolute() / "workspaces"))
    for home in sorted(homes):
        await asyncio.to_thread(processes.kill, 0, 0, home)
    for attempt in book.open():
        folder = executions.folder(attempt)
        if book.was_started(attempt) or folder.recorded() is not None or str(folder.home) in homes:
            book.take(attempt)
            tasks.create_task(executions.resume(attempt))
    _launch_due(executions, tasks)


async def _follow(context: Context, executions: Executions, tasks: asyncio.TaskGroup, after: int) -> None:
    async for event in context.events(after, about=ABOUT):
        executions.book.apply(event)
        if event.kind == "execution.cancelled":
            executions.end(event.entity)
        if event.kind in _LAUNCHING:
            _launch_due(executions, tasks)


def _launch_due(executions: Executions, tasks: asyncio.TaskGroup) -> None:
    book = executions.book
    for attempt in book.superfluous():
        tasks.create_task(executions.cancel(attempt))
    if book.over:
        executions.over.set()
        for attempt in [*book.open(), *book.unplaced()]:
            book.take(attempt)
            tasks.create_task(executions.cancel(attempt))
    for attempt in book.due():
        tasks.create_task(executions.run(attempt))
