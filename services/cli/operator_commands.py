"""`gyre pause`, `resume`, `cell drain` and `cell add`: an operator's wish is an event that the scheduler follows."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

from schemas import ids, streams
from schemas.errors import ConfigError, GyreError
from services.cli.logs import open_log
from services.cli.output import say, say_json
from services.cli.places import Places
from services.mesh import operators
from services.mesh.bus import Bus
from services.mesh.clock import SystemClock
from services.mesh.service import read_started

WHO = "command line"


def pause_command(run: str | None, *, state: Path, json: bool) -> int:
    return _tell(run, "run.paused", None, state=state, json=json)


def resume_command(run: str | None, *, state: Path, json: bool) -> int:
    return _tell(run, "run.resumed", None, state=state, json=json)


def drain_command(cell: str, run: str | None, *, state: Path, json: bool) -> int:
    return _tell(run, "cell.withdrawn", cell, state=state, json=json)


def add_command(cell: str | None, run: str | None, *, state: Path, json: bool) -> int:
    """A cell that the run knows serves again; the next one after them, which is meant without a name, is added."""
    places = Places(state)
    chosen = places.chosen(run)
    added, next_cell = asyncio.run(_is_new(places, chosen, cell))
    if added:
        return _tell(chosen, "cell.added", next_cell, state=state, json=json)
    return _tell(chosen, "cell.reinstated", cell, state=state, json=json)


def _tell(run: str | None, kind: str, cell: str | None, *, state: Path, json: bool) -> int:
    places = Places(state)
    chosen = places.chosen(run)
    seq = asyncio.run(_publish(places, chosen, kind, cell))
    if json:
        say_json({"run": chosen, "kind": kind, "entity": cell or chosen, "sequence": seq})
    else:
        say(f"{kind} of {cell or chosen} is in the log at {seq}")
    return 0


async def _publish(places: Places, run: str, kind: str, cell: str | None) -> int:
    async with open_log(places, run) as bus:
        await _check(bus, run, cell, kind)
        operator = operators.publisher(bus, clock=SystemClock(), run=run)
        return await operators.wish(operator, kind, cell or run, by=WHO, nonce=uuid.uuid4().hex)


async def _is_new(places: Places, run: str, cell: str | None) -> tuple[bool, str]:
    """Whether that is the cell after those that the run has, and which that is."""
    async with open_log(places, run) as bus:
        next_cell = ids.cell_id(len(await _cells(bus, run)))
    return cell in (None, next_cell), next_cell


async def _cells(bus: Bus, run: str) -> list[str]:
    """The cells that belong to the run: the configured ones, and those added since."""
    known = [ids.cell_id(index) for index in range((await read_started(bus, run)).config.cells.count)]
    while await _was_added(bus, run, next_cell := ids.cell_id(len(known))):
        known.append(next_cell)
    return known


async def _was_added(bus: Bus, run: str, cell: str) -> bool:
    subject = streams.subject(run, "operator", "cell.added", cell)
    return await bus.last_for(streams.log_stream(run), subject) is not None


async def _check(bus: Bus, run: str, cell: str | None, kind: str) -> None:
    """A wish that nobody could follow is an error, not an event."""
    if await operators.is_over(bus, run):
        raise GyreError(f"run {run} is over", remedy="name a run that is going on")
    if cell is None or kind == "cell.added":
        return
    known = await _cells(bus, run)
    pool = (await read_started(bus, run)).config.cells.pool
    if cell not in known and cell not in map(ids.pool_id, range(pool)):
        more = f"; the next one to add is {ids.cell_id(len(known))}" if kind == "cell.reinstated" else ""
        raise ConfigError(f"no cell {cell!r} in run {run}", remedy=f"choose from {', '.join(known)}{more}")
    if kind == "cell.withdrawn" and cell == known[0]:
        raise ConfigError(f"{cell} is the core: without it nothing is trained", remedy="pause the run instead")
    if kind == "cell.withdrawn" and not await operators.has_joined(bus, run, cell):
        raise GyreError(f"{cell} has not joined run {run} yet: it serves nobody", remedy="drain it once it has")
