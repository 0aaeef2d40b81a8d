"""Held-out measurements as a person meets them: before the run, while it goes on, and in its figures and curves."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from schemas import events as e
from schemas.config_file import load
from schemas.errors import ConfigError, TaskError
from schemas.units import TaskRef
from services.cli import checks, preflight
from services.cli.figures import figures
from services.cli.places import Places
from services.cli.progress import Progress
from services.cli.projection import evolve
from services.cli.resuming import _check_same
from services.cli.scalars import Point, Scalars
from services.cli.view import PlainView, measured_line, panel_rows
from tests.cli.conftest import ROOT, write_policy, write_tasks
from tests.replay.recorded import event, first, recorded

QUICKSTART = ROOT / "examples" / "quickstart.toml"
EVENTS = recorded(seed=2, eval__every=2, eval__executions=5)
CLOSED = [each for each in EVENTS if each.kind == "measurement.closed"]


def projected(events: list[Any]) -> Progress:
    progress = Progress()
    for each in events:
        evolve(progress, each)
    return progress


@pytest.fixture
def places(tmp_path: Path) -> Places:
    made = Places(tmp_path / "state")
    write_policy(made.cache / "policy")
    write_tasks(made.cache / "tasks")
    return made


def test_both_sets_are_read_before_a_run(places: Places) -> None:
    config = load(QUICKSTART)
    write_tasks(places.cache / "held-out")
    (places.cache / "held-out" / "task-0" / "instruction.md").write_text("Another one.")
    tasks, held_out = preflight.inputs(config, places)
    assert [task.name for task in tasks] == ["task-0"] == [task.name for task in held_out]
    assert tasks[0].digest != held_out[0].digest
    assert preflight.inputs(load(QUICKSTART, ["eval.every=0"]), places) == (tasks, [])


def test_a_task_in_both_sets_is_refused(places: Places) -> None:
    write_tasks(places.cache / "held-out")
    with pytest.raises(ConfigError, match="1 of 1 held-out tasks are training tasks: task-0 is task-0"):
        preflight.inputs(load(QUICKSTART), places)


def test_a_set_that_is_absent_is_named_by_its_key(places: Places) -> None:
    with pytest.raises(TaskError) as caught:
        preflight.inputs(load(QUICKSTART), places)
    assert "eval.path" in caught.value.remedy and "held-out" in caught.value.where


def test_a_run_goes_on_only_with_the_same_set() -> None:
    config = load(QUICKSTART)
    task = TaskRef(name="card", digest="a")
    started = e.RunStarted(seed=0, config=config, tasks=[], held_out=[task], code="test")
    _check_same("r-1", started, config, [], [task])
    with pytest.raises(ConfigError, match="task card has changed"):
        _check_same("r-1", started, config, [], [TaskRef(name="card", digest="b")])


def test_doctor_tells_what_is_measured(tmp_path: Path) -> None:
    places, config = Places(tmp_path), load(QUICKSTART)
    found = checks.held_out(config, places)
    assert found.ok and "every 10 steps" in found.detail and "made when a run begins" in found.detail
    absent = checks.held_out(load(QUICKSTART, ["prepare=[]"]), places)
    assert not absent.ok and "is not there" in absent.detail and "eval.path" in absent.remedy
    assert "nothing is measured" in checks.held_out(load(QUICKSTART, ["eval.every=0"]), places).detail


def test_the_ledger_that_is_shown_is_the_schedulers() -> None:
    """Held-out executions are on cells and in no counter."""
    progress, beside = Progress(), False
    for each in EVENTS:
        evolve(progress, each)
        assert 0 <= progress.f <= progress.p <= progress.d
        for name, cell in progress.cells.items():
            assert cell.load == sum(place == name for place in progress.open.values()) <= cell.capacity
        beside = beside or len(progress.open) > progress.d - progress.f
        if each.kind == "cell.role-transition":
            levels = [check.left for check in each.data.reason if check.rule == "waterlevel (2)"]
            assert levels in ([], [progress.waterlevel])
    assert beside
    assert progress.d == sum(each.kind == "execution.dispatched" and not each.data.measurement for each in EVENTS)
    assert progress.held_out == set() and progress.measuring == -1


def test_figures_hold_the_first_and_the_last() -> None:
    found = figures(projected(EVENTS), peak_rss_bytes=0)
    assert found["measurements"] == len(CLOSED) > 2
    means = [round(each.data.mean, 4) for each in CLOSED if each.data.mean is not None]
    assert (found["held_out_first"], found["held_out_last"]) == (means[0], means[-1])
    without = figures(Progress(), peak_rss_bytes=0)
    assert (without["held_out_first"], without["held_out_last"], without["measurements"]) == (None, None, 0)


def test_a_line_and_a_row_of_each_measurement() -> None:
    out = io.StringIO()
    view, progress = PlainView(out), Progress()
    seen = set()
    for each in EVENTS:
        evolve(progress, each)
        view.update(progress)
        seen.add(dict(panel_rows(progress)).get("held-out", "").partition(",")[0])
    lines = [line for line in out.getvalue().splitlines() if line.startswith("held-out")]
    assert lines == [measured_line(each) for each in progress.measured]
    assert "measuring v0" in seen and f"at v{CLOSED[-1].data.version}" in dict(panel_rows(progress))["held-out"]
    assert "held-out" not in dict(panel_rows(projected(recorded(seed=2))))


def test_a_measurement_without_any_reward() -> None:
    closed = e.MeasurementClosed(version=0, mean=None, std=None, valid=0, placeholder=0, excluded=3, steps=0)
    progress = projected([event(1, "measurement.closed", "h-000000", closed)])
    assert measured_line(progress.measured[0]) == "held-out v0  no reward, 3 excluded"
    assert figures(progress, peak_rss_bytes=0)["held_out_first"] is None
    points = Scalars().apply(event(1, "measurement.closed", "h-000000", closed))
    assert [(each.curve, each.value) for each in points] == [("held_out/excluded", 3)]


def test_curves_by_version() -> None:
    scalars = Scalars()
    points: list[Point] = []
    for each in EVENTS:
        points += scalars.apply(each)
    drawn = {each.step: each.value for each in points if each.curve == "held_out/reward"}
    assert drawn == {each.data.version: each.data.mean for each in CLOSED if each.data.mean is not None}
    assert first(EVENTS, "measurement.opened").data.version == 0
