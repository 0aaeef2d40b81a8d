"""The scheduler's bench, at a size that takes no time."""

from __future__ import annotations

import msgspec
import pytest

from services.cli.bench_scheduler import CAPACITY, measure, scheduler_bench


def test_inputs_and_decisions_are_counted() -> None:
    measured = measure(4)
    assert measured.executions == pytest.approx(2 * 4 * CAPACITY, rel=0.1)
    # Each is dispatched; those that have a slot are placed, and half as many start, finish and make room.
    assert measured.events > 2 * measured.executions
    assert 0 < measured.bytes_per_execution < 1000


def test_it_prints_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    scheduler_bench(small=2, large=4, json=True)
    said = msgspec.json.decode(capsys.readouterr().out)
    assert said["name"] == "scheduler"
    assert {"events_per_s", "events_per_s_4_cells", "bytes_per_execution"} <= said["figures"].keys()
    assert said["targets"]["events_per_s"] == ">= 50000"
