"""A run that was stopped goes on: which one, whether it is of this configuration, and what has to be gone before.

    newest run, not finished ── same configuration and tasks ──> its services start again, on its log
                             ├─ another configuration ─────────> an error that names the first key that differs
                             └─ `--new` ───────────────────────> `run.finished` ends it; another run begins

Invariants: a run goes on only with what its `run.started` says; no service of its earlier mesh lives when the next
starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from schemas import streams
from schemas.config import Config
from schemas.errors import BusError, ConfigError, Conflict
from schemas.events import RunContinued, RunFinished, RunResumed, RunStarted
from schemas.units import TaskRef
from services.cli.chaos_hold import CHAOS
from services.cli.places import Places
from services.cli.preflight import code_identity
from services.cli.view import View
from services.mesh import operators
from services.mesh.bus import Bus
from services.mesh.clock import SystemClock
from services.mesh.codec import decode
from services.mesh.nats_bus import connect
from services.mesh.processes import Mesh, is_alive, kill_group, read_mesh
from services.mesh.publisher import Publisher
from services.mesh.service import read_started

ENDS_S = 20.0
"""How long services of a mesh whose supervisor is gone may take to end by themselves."""
_POLL_S = 0.1
_ABSENT = "absent"


async def open_run(
    config: Config,
    *,
    tasks: list[TaskRef],
    held_out: Sequence[TaskRef] = (),
    places: Places,
    url: str,
    new: bool,
    view: View,
) -> str | None:
    """The run to go on with, ready for its services; None when another is to begin.

    Raises ConfigError where it is of another configuration or its tasks have changed.
    """
    run = places.newest_supervised()
    if run is None:
        return None
    async with await connect(url, run, name=f"gyre/{run}/operator") as bus:
        try:
            started = await read_started(bus, run)
        except BusError as error:
            view.note(f"run {run} is not in this event store ({error.what}); another begins")
            return None
        if await operators.is_over(bus, run):
            return None
        mesh = read_mesh(places.run(run))
        assert mesh is not None
        if new:
            await _ended(mesh)
            await abandon(bus, run)
            view.note(f"run {run} is over; another begins")
            return None
        _check_same(run, started, config, tasks, held_out)
        await _ended(mesh)
        # Its services may have lived on until now.
        if await operators.is_over(bus, run):
            return None
        view.note(f"run {run} goes on")
        code = code_identity()
        if code != started.code:
            view.note(f"it began with {started.code}; this is {code}")
        end = await bus.last_seq(streams.log_stream(run))
        operator = _operator(bus, run)
        await operator.say("run.continued", run, RunContinued(code=code), id=f"{run}.continued.{end}")
        await _let_go(bus, operator)
    return run


def differences(before: Any, now: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Key, value before and value now, in the order of the configuration; both as built-in values."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in [*before, *(key for key in now if key not in before)]:
            inner = f"{path}.{key}" if path else str(key)
            yield from differences(before.get(key, _ABSENT), now.get(key, _ABSENT), inner)
    elif before != now:
        yield path, before, now


def _check_same(
    run: str, started: RunStarted, config: Config, tasks: Sequence[TaskRef], held_out: Sequence[TaskRef]
) -> None:
    remedy = f"put it back to go on with {run}, or start another run with --new"
    before, now = msgspec.to_builtins(started.config), msgspec.to_builtins(config)
    for key, was, is_ in differences(before, now):
        raise ConfigError(f"run {run} is not finished, and it has {was!r}; now it is {is_!r}", where=key, remedy=remedy)
    for section, old, new in (("tasks", started.tasks, tasks), ("eval", started.held_out, held_out)):
        digests = {task.name: task.digest for task in old}
        for name, was, is_ in differences(digests, {task.name: task.digest for task in new}):
            what = "is new" if was == _ABSENT else "is gone" if is_ == _ABSENT else "has changed"
            raise ConfigError(f"run {run} is not finished, and task {name} {what}", where=section, remedy=remedy)


async def abandon(bus: Bus, run: str) -> None:
    """Ends a run of which no service lives any more, unless one of them said its end before: that is said once."""
    last = await bus.last_for(streams.log_stream(run), f"gyre.{run}.trainer.batch.*.stepped")
    steps = decode(last).data.step if last is not None else 0
    finished = RunFinished(steps=steps, reason="stopped")
    nobody_did = (f"gyre.{run}.*.run.*.finished", 0)
    with contextlib.suppress(Conflict):
        await _operator(bus, run).say("run.finished", run, finished, id=f"{run}.stopped", claim=nobody_did)


async def _let_go(bus: Bus, operator: Publisher) -> None:
    """What chaos held back and could not let go, because it was killed itself."""
    log, run = streams.log_stream(operator.run), operator.run
    paused, resumed = [await bus.last_for(log, f"gyre.{run}.operator.run.*.{verb}") for verb in ("paused", "resumed")]
    if paused is None or (resumed is not None and resumed.seq > paused.seq) or decode(paused).data.by != CHAOS:
        return
    await operator.say("run.resumed", run, RunResumed(by=CHAOS), id=f"{run}.{CHAOS}.resumed.after.{paused.seq}")


def _operator(bus: Bus, run: str) -> Publisher:
    return operators.publisher(bus, clock=SystemClock(), run=run)


async def _ended(mesh: Mesh) -> None:
    """Wait until no service of the mesh lives; whoever is left then is ended by force."""
    deadline = time.monotonic() + ENDS_S
    while left := [each for each in mesh.services if is_alive(each.pid, each.created)]:
        if time.monotonic() > deadline:
            for each in left:
                kill_group(each.pid)
        await asyncio.sleep(_POLL_S)
