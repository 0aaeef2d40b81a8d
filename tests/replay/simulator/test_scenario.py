"""Scenario files: strict, inherited, and every number with its origin; and what their durations are like."""

from __future__ import annotations

from pathlib import Path

import pytest

from replay.simulator.durations import Durations, profile
from replay.simulator.progress import Progress
from replay.simulator.scenario import FOLDER, World, find, load
from schemas.errors import ConfigError


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.toml")), ids=lambda path: path.stem)
def test_shipped_scenario_loads_by_name(path: Path) -> None:
    scenario = load(path.stem)
    assert find(path.stem) == path
    assert scenario.name == path.stem
    assert {scenario.origin_of(key) for key in World.__struct_fields__} <= {"given", "assumed", "fitted"}
    assert scenario.run.harness.overall_timeout_s == pytest.approx(3600 * scenario.world.ceiling_h)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("base = 'E0.toml'\n[world]\nmedian = 1.0", "did you mean 'world.median_h'"),
        ("base = 'E0.toml'\n[world]\nwork_node_h = -1", "must be above 0"),
        ("base = 'E0.toml'\n[world]\nload_effect = 1.0", "share below 1"),
        ("base = 'E0.toml'\n[origin]\ngiven = []", "world.cell_nodes is in 0 lists"),
        ("base = 'E0.toml'\n[run.eval]\nevery = 1\npath = 'held-out'", "not simulated"),
        ("base = 'E0.toml'\n[run.scheduler]\nphi = 0.3", "whole number of groups"),
        ("base = 'own.toml'", "leads back to itself"),
        ("title = 'x'", "no section"),
        ("title =", "not valid TOML"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, text: str, said: str) -> None:
    for name in ("E0", "nl2repobench-122b"):
        (tmp_path / f"{name}.toml").write_text(find(name).read_text().replace("../", ""))
    (tmp_path / "own.toml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        load(tmp_path / "own.toml")


def test_unknown_name_is_told_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean nl2repobench-122b"):
        load("nl2repobench-122")


def test_override_wins() -> None:
    scenario = load("E0", ["world.work_node_h=9.5", "run.scheduler.tau_s=5"])
    assert (scenario.world.work_node_h, scenario.run.scheduler.tau_s) == (9.5, 5.0)


def test_durations_are_those_that_the_paper_publishes() -> None:
    """Four numbers of the model were fitted to four of these; the harness time-outs' share follows."""
    scenario = load("nl2repobench-122b", ["world.duration_scale=1.0"])
    found = profile(scenario.world, N=16)
    assert found.mean_h == pytest.approx(1.93, rel=0.02)
    assert found.group_max_h == pytest.approx(2.96, rel=0.02)
    assert found.over_four_hours_pct == pytest.approx(9.51, abs=1.5)
    assert found.overall_timeout_pct == pytest.approx(0.87, abs=0.2)
    assert found.harness_timeout_pct + found.overall_timeout_pct == pytest.approx(6.25, abs=0.7)


def test_draws_depend_on_seed_and_id_only() -> None:
    world = load("E0").world
    forwards, backwards = Durations(world, 1), Durations(world, 1)
    names = [f"e-{group:06d}.{member:02d}" for group in range(3) for member in range(4)]
    assert [forwards.draw(name) for name in names] == [backwards.draw(name) for name in names[::-1]][::-1]
    assert Durations(world, 2).draw(names[0]) != forwards.draw(names[0])


def test_executions_share_the_rate_of_their_load() -> None:
    """Two executions of 10 s on 2 slots: alone at load 1/2 the first runs at 1 / (1 - 0.5 + 0.25), both together at 1."""
    world = load("E0").world
    draw = Durations(world, 1).draw("e-000000.00")
    ten = type(draw)(10.0, "completed", 0.5)
    progress = Progress(0.5)
    progress.serve(0, 2)
    progress.start(0, "e-000000.00", ten)
    assert progress.next_us() == 7_500_000
    progress.start(3_000_000, "e-000000.01", ten)
    assert progress.next_us() == 9_000_000
    assert progress.end(9_000_000)[0] == "e-000000.00"
    # 6 s of work are done, 4 s are left at rate 4/3.
    assert progress.next_us() == 12_000_000
    progress.drop(9_000_000, "e-000000.01")
    assert progress.next_us() is None
