"""The trajectories service: the outcome decider in its shell, the freezer of trees, the SQL projection, and a read-only
face over HTTP.

    LOG ── shell(Outcome) ──> evaluation.requested, execution.settled, group.ready, .materialized, .discarded
    LOG ── freezer ─ RECORDS ─> BLOBS, execution.tree-frozen
    LOG ── projection ─ RECORDS ─> SQL ──> GET /executions/{id}/tree?after=SEQ

The shell takes the fence first; everything that this service says leaves under it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from aiohttp import web
from sqlalchemy import URL

from services.mesh.environment import fill
from services.mesh.service import Context, alone, announce
from services.mesh.shell import Shell
from services.trajectories.core.outcome import Outcome
from services.trajectories.freezer import Freezer
from services.trajectories.projection import InThread, Projection
from services.trajectories.store import Rows, Store

DATABASE = "trajectories.sqlite"
FRESH_S = 10.0
"""Longest wait for `?after=SEQ`, with which a reader asks for rows that hold LOG up to there."""


def database_url(context: Context) -> str | URL:
    """The configured database, or SQLite in the run's folder."""
    configured = fill(context.config.trajectories.database, key="trajectories.database")
    return configured or URL.create("sqlite", database=str(context.folder / DATABASE))


def open_store(context: Context) -> Store:
    return Store(database_url(context), context.run)


async def serve(
    context: Context,
    *,
    open_rows: Callable[[Context], Rows] = open_store,
    in_thread: InThread = asyncio.to_thread,
) -> None:
    """Runs until cancelled; ends with the error of whichever part fails first. Rows are read and written `in_thread`."""
    store: Rows = await in_thread(open_rows, context)
    shell = Shell(
        decider=Outcome(),
        bus=context.bus,
        clock=context.clock,
        publisher=context.publisher,
        snapshot_every=context.snapshot_every,
    )
    projection = Projection(bus=context.bus, run=context.run, store=store, in_thread=in_thread)
    freezer = Freezer(context, frozen=projection.keep)

    async def tree(request: web.Request) -> web.Response:
        execution, after = request.match_info["execution"], request.query.get("after", "0")
        if not after.isdecimal():
            return _refused(400, "bad_request", f"after={after!r} is no sequence of LOG")
        try:
            async with asyncio.timeout(FRESH_S):
                await projection.reached(int(after))
        except TimeoutError:
            return _refused(503, "behind", f"the database holds LOG up to {projection.position}, not yet {after}")
        found = await in_thread(store.tree, execution)
        if found is None:
            return _refused(404, "not_found", f"no execution {execution}")
        return web.json_response(found)

    async def freeze() -> None:
        await shell.caught_up.wait()
        await freezer.follow()

    async def project() -> None:
        async for event in context.events(await projection.resume()):
            await projection.apply(event)

    context.health.app.add_routes([web.get("/executions/{execution}/tree", tree)])
    context.health.ready = lambda: "" if shell.caught_up.is_set() else "reading the log"
    context.health.gauge("gyre_open_groups", "Groups that are not settled", lambda: len(shell.driver.state.groups))
    context.health.gauge("gyre_trees_frozen", "Trees frozen by this process", lambda: freezer.count)
    context.health.gauge("gyre_records_broken", "Seals that RECORDS did not keep", lambda: freezer.broken)
    context.health.gauge("gyre_projection_position", "LOG sequence in the database", lambda: projection.position)
    await alone(context)
    await announce(context)
    try:
        await _all(shell.run(), freeze(), project())
    finally:
        await in_thread(store.close)


def _refused(status: int, kind: str, message: str) -> web.Response:
    return web.json_response({"error": {"type": kind, "message": message}}, status=status)


async def _all(*parts: Coroutine[Any, Any, None]) -> None:
    """Runs the parts together; the first error ends them all and is raised as it is."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
