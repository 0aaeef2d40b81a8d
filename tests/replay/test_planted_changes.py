"""Changes of deciders: each is found at the input where it first tells, with the reason that fits it.

The log is written by the code as it is. The changed code decides it again in this process, up to the first difference; one
change also in a process of its own, as a person's edited checkout would.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from replay.divergence import Divergence
from replay.simulator.run import Simulation
from replay.simulator.scenario import load
from schemas.envelope import Event
from services.mesh.decider import Driver
from services.scheduler.decider import Scheduler
from tests.replay.mesh import Mesh
from tests.replay.planting import ROOT, Change, planted
from tests.replay.recorded import write

CORE = "services/scheduler/core"
WATERLEVEL = 'check(WATERLEVEL, w, "<=", C_R - C_e)'
Where = Callable[[list[Event]], int]
"""Sequence of the input on which it has to be found."""


class Plant(Change, frozen=True, kw_only=True):
    where: Where
    decider: str = "scheduler"
    shape: str = "different"
    reason: str = "different"
    evidence: str = ""
    fields: tuple[str, ...] = ()
    """Fields that differ, by the beginnings of their paths."""
    simulated: bool = False
    """Told by a simulated log: it has many tasks, and its cells hold many executions when they leave. What is drawn of few,
    or lies in a set of few, may be as it was by chance."""


def cause_of(kind: str, holds: Callable[[Any], bool] = lambda data: True) -> Where:
    """The input on which the first such decision was taken."""
    return lambda log: next(each.causation for each in log if each.kind == kind and holds(each.data))


def tells_of(rule: str) -> Where:
    """The input on which the first decision was taken that gives this rule as a reason."""

    def where(log: list[Event]) -> int:
        return next(
            each.causation
            for each in log
            if each.kind in ("cell.held", "cell.role-transition")
            and any(check.rule == rule for check in each.data.reason)
        )

    return where


def first_out_of_order(log: list[Event]) -> int:
    """The first input on which executions are moved whose set, as it lies in memory, isn't sorted."""
    driver = Driver(Scheduler())
    for event in log:
        if not driver.is_input(event):
            continue
        at = driver.arrive(event)
        sources: set[str] = set()
        for decision in driver.decide(at):
            if decision.kind == "route.moved" and decision.data.source not in sources:
                sources.add(decision.data.source)
                held = list(driver.state.cells[decision.data.source].holds.copy())
                if held != sorted(held):
                    return event.seq
            driver.apply(decision, at)
    raise AssertionError("no set is out of order")


PLANTS = {
    "swapped-comparison": Plant(
        path=f"{CORE}/equations.py",
        old=WATERLEVEL,
        new='check(WATERLEVEL, w, ">=", C_R - C_e)',
        where=tells_of("waterlevel (2)"),
        fields=("data.reason[0].op",),
    ),
    "off-by-one-in-capacity": Plant(
        path=f"{CORE}/equations.py",
        old="return C_s + (K - k) * C_e",
        new="return C_s + (K - k) * C_e + 1",
        where=cause_of("execution.placed"),
        fields=("data.reason[0].right",),
    ),
    "clock-read": Plant(
        path=f"{CORE}/transitions.py",
        old="due_us=now_us + ",
        new="due_us=__import__('time').time_ns() // 1000 + ",
        where=cause_of("timer.set"),
        reason="clock_or_randomness",
        evidence="time.time_ns at services/scheduler/core/transitions.py:",
        fields=("data.due_us",),
    ),
    "set-iteration": Plant(
        path=f"{CORE}/placement.py",
        old="for execution in sorted(state.cells[source].holds):",
        new="for execution in state.cells[source].holds.copy():",
        where=first_out_of_order,
        reason="unordered",
        evidence="with its sets in another order",
        fields=("entity",),
        simulated=True,
    ),
    "unseeded-draw": Plant(
        path=f"{CORE}/dispatch.py",
        old='random.Random(f"{seed}:tasks:{lap}")',
        new="random.Random()",
        where=lambda log: 1,
        reason="clock_or_randomness",
        evidence="random.Random without a seed at services/scheduler/core/dispatch.py:",
        fields=("data.task",),
        simulated=True,
    ),
    "hash-of-a-text": Plant(
        path=f"{CORE}/dispatch.py",
        old="divmod(index, len(state.tasks))",
        new="divmod(index + 1 + hash(state.run) % (len(state.tasks) - 1), len(state.tasks))",
        where=lambda log: 1,
        reason="clock_or_randomness",
        evidence="hash at services/scheduler/core/dispatch.py:",
        fields=("data.task",),
    ),
    "counted-twice": Plant(
        path=f"{CORE}/execution_changes.py",
        old="    state.d += 1\n",
        new="    state.d += 2\n",
        where=tells_of("waterlevel (2)"),
        fields=("data.reason[0].left",),
    ),
    "decision-left-out": Plant(
        path=f"{CORE}/transitions.py",
        old="if HELD in state.flags and ",
        new="if False and ",
        where=cause_of("cell.held"),
        shape="missing",
        reason="missing",
    ),
    "other-constant": Plant(
        path="services/trajectories/core/advantages.py",
        old="STD_FLOOR = 1e-4",
        new="STD_FLOOR = 1e-3",
        where=cause_of("group.ready", lambda data: data.std > 0),
        decider="trajectories",
        fields=("data.rewards[0].advantage",),
    ),
    "one-draw-more": Plant(
        path="services/trajectories/core/admission.py",
        old="while len(rows) < limit and",
        new="while len(rows) <= limit and",
        where=cause_of("group.materialized"),
        decider="trajectories",
        fields=("data.rows",),
    ),
    "said-twice": Plant(
        path="services/trajectories/core/outcome.py",
        old='    yield _decision("group.materialized", name, e.GroupMaterialized(rows=rows))\n',
        new='    for _ in range(2):\n        yield _decision("group.materialized", name, e.GroupMaterialized(rows=rows))\n',
        where=cause_of("group.materialized"),
        decider="trajectories",
        shape="extra",
        reason="decided_twice",
    ),
    "raises": Plant(
        path="services/packer/core/packing.py",
        old="def _close(batch: OpenBatch) -> Decision:\n",
        new="def _close(batch: OpenBatch) -> Decision:\n    batch.nothing\n",
        where=cause_of("batch.stream-closed"),
        decider="packer",
        shape="raised",
        reason="raised",
        evidence="AttributeError",
    ),
}


@pytest.fixture(scope="module")
def log() -> list[Event]:
    return Mesh(seed=2, lose=0.05, trajectories__J_max=1).run()


@pytest.fixture(scope="module")
def simulated() -> list[Event]:
    simulation = Simulation(load("small", ["run.steps=3"]), keep=True)
    simulation.run()
    return simulation.events


def first_difference(replayer: Any, log: Sequence[Event]) -> Divergence | None:
    """Reads no further than some events beyond it. `replayer` is the module, of this code or of a changed one."""
    replay = replayer.Replayer(code=log[0].data.code).begin()
    for begin in range(0, len(log), 64):
        replay.feed(log[begin : begin + 64])
        if (found := replay.result().first) is not None:
            return found
    for _ in replay.end():
        pass
    return replay.result().first


def test_the_code_as_it_is_decides_the_same(log: list[Event], simulated: list[Event]) -> None:
    unchanged = Change(path=f"{CORE}/equations.py", old=WATERLEVEL, new=WATERLEVEL)
    with planted(unchanged) as replayer:
        assert first_difference(replayer, log) is None
        assert first_difference(replayer, simulated) is None


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_change_is_found_where_it_tells(name: str, log: list[Event], simulated: list[Event]) -> None:
    plant = PLANTS[name]
    log = simulated if plant.simulated else log
    with planted(plant) as replayer:
        first = first_difference(replayer, log)
    assert first is not None and first.input is not None
    assert (first.decider, first.seq) == (plant.decider, plant.where(log))
    assert first.input.seq == first.seq
    assert (first.shape, first.reason) == (plant.shape, plant.reason)
    assert plant.evidence in first.evidence
    paths = [each.path for each in first.differences]
    for field in plant.fields:
        assert any(path.startswith(field) for path in paths), paths
    assert first.state is not None


def test_an_edited_checkout_says_so(tmp_path: Path, log: list[Event]) -> None:
    for name in ("schemas", "services", "replay"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    plant = PLANTS["swapped-comparison"]
    (tmp_path / plant.path).write_text(plant.text())
    code = importlib.metadata.version("qwengyre")
    started = msgspec.structs.replace(log[0], data=msgspec.structs.replace(log[0].data, code=code))
    write(tmp_path / "run.gyre", [started, *log[1:]])
    words = [sys.executable, "-m", "services.cli", "replay", "run.gyre", "--json"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    found = msgspec.json.decode(done.stdout)
    assert not found["ok"] and found["events"] == len(log)
    assert (found["first"]["seq"], found["first"]["reason"]) == (plant.where(log), "different")
