"""One simulated run from a plan: the log that it leaves, what struck it, and what was violated.

The same plan gives the same log, byte by byte, with the same code: nothing here reads a clock, a file or the machine.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import structlog

from replay.checker import check
from replay.fault.draw import draw
from replay.fault.evidence import evidence_of
from replay.fault.mesh import Mesh
from replay.fault.plan import Plan
from replay.fault.setting import RUN, setting_of
from replay.fault.strike import Striker, Struck
from replay.invariants import ALL, Violation
from replay.logwriter import LogWriter
from replay.virtual.loop import Livelock, Standstill, Unhandled, VirtualLoop
from replay.worlds.training import wrong_steps
from schemas import streams
from schemas.envelope import Envelope, Event
from schemas.events import CellLost
from services.mesh.bus import Stored
from services.mesh.codec import decode, encode_data

_LOOKED_AT = [name for name in ALL if name != "harness_errors"]
"""What harnesses suffer is what the faults are for."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a plan."""

    plan: Plan
    log: list[Stored]
    violations: list[Violation]
    struck: list[Struck]
    """In the order in which they struck."""
    virtual_s: float
    cpu_s: float

    @property
    def digest(self) -> str:
        """Over the log's bytes: equal for equal runs."""
        return digest_of(self.log)

    @property
    def ok(self) -> bool:
        return not self.violations

    def write(self, path: Path) -> None:
        """The log as a `.gyre` file, for `gyre replay`, `gyre check` and friends."""
        with LogWriter(path) as writer:
            for stored in self.log:
                writer.add(stored)
            writer.finish()


def simulate(seed: int) -> Outcome:
    """The run of a seed with the faults of the seed."""
    return simulate_plan(draw(seed, setting_of(seed)))


def simulate_plan(plan: Plan) -> Outcome:
    """The run of the plan's seed with the plan's faults."""
    began = time.process_time()
    # What asyncio has and a virtual loop has not raises NotImplementedError.
    with _undisturbed(), VirtualLoop() as loop:  # type: ignore[abstract]
        mesh = Mesh(loop, setting_of(plan.seed))
        striker = Striker(mesh, plan)
        try:
            loop.run_until_complete(mesh.run(striker.begin))
        except (Livelock, Standstill, Unhandled) as error:
            mesh.report(type(error).__name__.lower(), str(error))
        log = mesh.stored(streams.log_stream(RUN))
        violations = [*mesh.violations, *_check(mesh, log)]
        virtual_s = round(loop.time(), 6)
    return Outcome(
        plan=plan,
        log=log,
        violations=violations,
        struck=striker.struck,
        virtual_s=virtual_s,
        cpu_s=time.process_time() - began,
    )


def digest_of(log: list[Stored]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for stored in log:
        digest.update(b"%d %d %s\n" % (stored.seq, stored.time_us, stored.subject.encode()))
        digest.update(stored.data)
    return digest.hexdigest()


def _check(mesh: Mesh, log: list[Stored]) -> list[Violation]:
    """Every invariant over LOG, RECORDS, calls and rows, and what the worlds saw."""
    events = [decode(stored) for stored in log]
    complete = not mesh.violations
    evidence = evidence_of(mesh, events, complete=complete)
    violations = list(check(events, only=_LOOKED_AT, evidence=evidence).violations)
    seen = [("world", what) for what in mesh.world.violations]
    seen += [("training", what) for what in wrong_steps(events, mesh.world.steps)]
    seen += [("read-only", what) for what in _changed(events, log)]
    seen += [("lives-on", what) for what in (_living_on(events) if complete else ())]
    violations += [Violation(invariant=name, seq=0, entity=RUN, what=what) for name, what in seen]
    return violations


def _changed(events: list[Event], log: list[Stored]) -> Iterator[str]:
    """Readers share what they read: nobody may have changed it."""
    for event, stored in zip(events, log, strict=True):
        data = msgspec.json.decode(stored.data, type=Envelope).data
        if encode_data(event.data) != bytes(data):
            yield f"somebody changed {event.kind} at {event.seq} in his hands"


def _living_on(events: list[Event]) -> Iterator[str]:
    """Who was taken for lost makes room for another, else its cell is out for good; at the end everybody was there."""
    newest: dict[str, int] = {}
    for event in events:
        if event.kind == "service.joined":
            newest[event.entity] = event.seq
    for event in events:
        if isinstance(event.data, CellLost):
            name = f"{event.data.service}-{event.entity}"
            if newest.get(name, 0) <= event.data.process:
                yield f"{name} was taken for lost at {event.seq}, and no other process of it joined"


@contextmanager
def _undisturbed() -> Iterator[None]:
    """No logging, no collection of garbage at moments that nobody chose, and no register of all tasks: a life knows its own,
    and nobody asks asyncio for them."""
    known = structlog.get_config()
    enabled = gc.isenabled()
    register: Any = asyncio.tasks._all_tasks  # type: ignore[attr-defined]  # asyncio's own
    register.add = id
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory(), wrapper_class=_Silent)
    gc.disable()
    try:
        yield
    finally:
        del register.add
        if enabled:
            gc.enable()
        structlog.configure(**known)


class _Silent(structlog.BoundLoggerBase):
    """Takes every message and says nothing."""

    def _nothing(self, event: str | None = None, **values: object) -> None: ...

    debug = info = warning = error = exception = critical = _nothing
