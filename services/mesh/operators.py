"""What an operator may say of a run that is going on: wishes that the scheduler follows, each one event.

A wish that is said again is another wish: whoever says it gives each a nonce.
"""

from __future__ import annotations

from schemas import events as e
from schemas import streams
from services.mesh.bus import Bus
from services.mesh.clock import Clock
from services.mesh.publisher import Publisher

WISHES = {
    "run.paused": e.RunPaused,
    "run.resumed": e.RunResumed,
    "cell.withdrawn": e.CellWithdrawn,
    "cell.reinstated": e.CellReinstated,
    "cell.added": e.CellAdded,
}


def publisher(bus: Bus, *, clock: Clock, run: str) -> Publisher:
    """Who speaks for the people that run the mesh."""
    return Publisher(bus=bus, clock=clock, run=run, owner="operator", instance="operator")


async def is_over(bus: Bus, run: str) -> bool:
    """Whether `run.finished` was said, by whomever."""
    return await bus.last_for(streams.log_stream(run), f"gyre.{run}.*.run.{run}.finished") is not None


async def has_joined(bus: Bus, run: str, cell: str) -> bool:
    """Whether the scheduler knows the cell: what is wished of one before it joins would be forgotten."""
    return await bus.last_for(streams.log_stream(run), f"gyre.{run}.*.cell.{cell}.joined") is not None


async def wish(operator: Publisher, kind: str, entity: str, *, by: str, nonce: str) -> int:
    """Says a wish of the run or of one of its cells; returns its sequence. Raises BusError where nobody answers."""
    return await operator.say(kind, entity, WISHES[kind](by=by), id=f"{operator.run}.{kind}.{nonce}")
