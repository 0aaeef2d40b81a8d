"""Simulated runs end well, repeat byte by byte, and show what a broken product does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from replay.checker import check
from replay.fault.plan import Plan
from replay.fault.run import simulate, simulate_plan
from replay.logfile import read_events

ROOT = Path(__file__).parents[2]


def test_an_undisturbed_run_ends_and_holds_every_invariant(tmp_path: Path) -> None:
    outcome = simulate_plan(Plan(seed=1))
    assert not outcome.violations
    assert not outcome.struck
    path = tmp_path / "run.gyre"
    outcome.write(path)
    events = read_events(path)
    assert events[-1].time_us > events[0].time_us
    kinds = [event.kind for event in events]
    assert kinds.count("run.finished") == 1
    assert 40 <= kinds.count("execution.finished") <= 70
    assert not check(events, only=["ledger", "decisions"]).violations


def test_a_seed_in_one_process_twice_is_the_same_run() -> None:
    first, between, second = simulate(3), simulate(4), simulate(3)
    assert first.digest == second.digest != between.digest
    assert [stored.data for stored in first.log] == [stored.data for stored in second.log]
    assert first.struck == second.struck
    assert len(first.struck) > 8


def test_a_seed_in_two_processes_is_the_same_run() -> None:
    """Whatever the order of their sets of strings is."""

    def run(hash_seed: str) -> bytes:
        return subprocess.run(
            [
                sys.executable,
                "-c",
                "from replay.fault.run import simulate; print([simulate(s).digest for s in (5, 6)])",
            ],
            check=True,
            capture_output=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
        ).stdout

    assert run("1") == run("2") != b""


@pytest.mark.parametrize("fault", range(3))
def test_leaving_a_fault_out_leaves_the_others(fault: int) -> None:
    whole = simulate(3)
    smaller = simulate_plan(whole.plan.without({fault}))
    assert smaller.plan.faults == [each for place, each in enumerate(whole.plan.faults) if place != fault]
    assert not smaller.violations
