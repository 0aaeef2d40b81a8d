"""`gyre bench scheduler`: how many events a second the scheduler's decider takes, and what an execution costs it.

The decider is fed as it is live, input by input through its driver, with facts that answer what it decided: cells join,
executions are placed, start and finish, and each that finishes makes room for the next. Inputs and decisions count. Time is
that of the processor, so that other programs don't count. Once with 10 cells and 1,000 executions, once with 10,000 cells
and a million, half of them waiting.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import msgspec

from schemas import events as e
from schemas import ids
from schemas.config import Config
from schemas.config_file import from_tree
from schemas.envelope import Event
from schemas.flags import NEWEST
from schemas.units import TaskRef, Value
from services.cli.figures import machine
from services.cli.output import say, say_json
from services.mesh.decider import DECISION_LIMIT, Driver
from services.scheduler.core.state import State
from services.scheduler.decider import Scheduler

CAPACITY = 50
N = 16
EVENTS_PER_S = 50_000.0
BYTES_PER_EXECUTION = 400.0
_CHURN = 60_000
"""Executions that start, finish and make room while time is taken."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    cells: int
    executions: int
    """Outstanding at the most."""
    events: int
    cpu_s: float
    bytes_per_execution: float
    """Of the state as a snapshot has it."""

    @property
    def events_per_s(self) -> float:
        return self.events / self.cpu_s


def scheduler_bench(*, small: int = 10, large: int = 10_000, json: bool) -> int:
    """0 when every bound is kept. `small` and `large` are numbers of cells."""
    few, many = measure(small), measure(large)
    figures = {
        "events_per_s": round(few.events_per_s),
        f"events_per_s_{large}_cells": round(many.events_per_s),
        "bytes_per_execution": round(many.bytes_per_execution, 1),
        f"bytes_per_execution_{small}_cells": round(few.bytes_per_execution, 1),
    }
    targets = {
        "events_per_s": f">= {EVENTS_PER_S:g}",
        f"events_per_s_{large}_cells": f">= {EVENTS_PER_S:g}",
        "bytes_per_execution": f"<= {BYTES_PER_EXECUTION:g}",
    }
    ok = min(few.events_per_s, many.events_per_s) >= EVENTS_PER_S and many.bytes_per_execution <= BYTES_PER_EXECUTION
    if json:
        said = {"name": "scheduler", "figures": figures, "targets": targets, "runs": [few, many], "ok": ok}
        say_json({**said, "machine": machine()})
    else:
        for each in (few, many):
            say(
                f"{each.cells:6d} cells, {each.executions:8d} executions: {each.events_per_s:9,.0f} events/s "
                f"({each.events} events, {each.cpu_s:.1f} s), {each.bytes_per_execution:.0f} bytes an execution"
            )
        say("ok" if ok else f"missed: {', '.join(f'{name} {bound}' for name, bound in targets.items())}")
    return 0 if ok else 1


def measure(cells: int) -> Measured:
    run = _Run(_config(cells))
    gc.collect()
    gc.disable()
    try:
        cpu_s = _timed(run.begin)
        most = len(run.driver.state.executions)
        size = len(run.driver.snapshot()) / most
        cpu_s += _timed(lambda: run.churn(min(_CHURN, most // 2)))
    finally:
        gc.enable()
    return Measured(cells=cells, executions=most, events=run.events, cpu_s=cpu_s, bytes_per_execution=size)


def _timed(act: Callable[[], None]) -> float:
    began = time.process_time()
    act()
    return time.process_time() - began


def _config(cells: int) -> Config:
    """(phi + mu) N B executions are twice what the engines take: half of them wait."""
    B = max(1, cells * CAPACITY // N)
    tree = {
        "name": "bench",
        "cells": {"count": cells, "capacity": CAPACITY, "trainable": cells},
        "scheduler": {"N": N, "B": B, "mu": 1, "phi": 1.0},
        "harness": {"command": ["true"]},
    }
    return from_tree(tree, where="bench")


class _Run:
    """The decider and who answers it."""

    def __init__(self, config: Config) -> None:
        self.driver: Driver[State] = Driver(Scheduler(), decision_limit=10 * DECISION_LIMIT)
        self.config = config
        self.events = 0
        self._seq = 0
        self._placed: list[str] = []

    def begin(self) -> None:
        tasks = [TaskRef(name=f"task-{index}", digest=str(index)) for index in range(64)]
        self._say("operator", "run.started", "r", e.RunStarted(seed=0, config=self.config, tasks=tasks, code="", flags=NEWEST))
        for index in range(self.config.cells.count):
            joined = e.CellJoined(index=index, capacity=CAPACITY, url="", engine="", version=0, capabilities=[])
            self._say("rollout", "cell.joined", ids.cell_id(index), joined)

    def churn(self, executions: int) -> None:
        """The oldest starts and finishes, and the next takes its place, so often."""
        for index in range(executions):
            name = self._placed[index]
            self._say("harness", "execution.started", name, e.ExecutionStarted(attempt=0))
            ended = e.ExecutionFinished(
                attempt=0, reason="completed", exit_code=0, seconds=1.0, workspace="w", workspace_digest="d"
            )
            self._say("harness", "execution.finished", name, ended)

    def _say(self, owner: str, kind: str, entity: str, data: Value) -> None:
        self._seq += 1
        event = Event(
            seq=self._seq,
            time_us=self._seq,
            kind=kind,
            entity=entity,
            owner=owner,
            instance="",
            causation=0,
            id="",
            data=data,
        )
        decisions = self.driver.feed(event)
        self.events += 1 + len(decisions)
        self._placed += [decision.entity for decision in decisions if decision.kind == "execution.placed"]
