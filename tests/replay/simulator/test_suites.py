"""Suites and the fit, on small scenarios and few seeds."""

from __future__ import annotations

import msgspec
import pytest

from replay.simulator.ablation import FAMILIES, wrong_directions
from replay.simulator.fit import SCALES, WORKS, Knobs, Surface, fit, made_of
from replay.simulator.pool import Runs, Spread, over_seeds, spread
from replay.simulator.scenario import ABLATION, Scenario, changed, load
from replay.simulator.staleness import EXACT, MU, PHI, dispatches, grid
from replay.simulator.workloads import WORKLOADS, Workload, assumptions, every_scenario, gaps, speedups, strategy_at
from schemas.errors import ConfigError
from tests.replay.simulator.small import small

PAPER = {row: load(row).paper.hours for row in ABLATION}


def test_staleness_is_the_identity() -> None:
    points = grid(seeds=[0, 1], phis=PHI[::2], mus=MU[1:3], bursts=3)
    assert len(points) == 6
    assert all(each.ok for each in points), [each for each in points if not each.ok]


def test_what_a_window_carries_over_its_ends_is_told() -> None:
    """With (1, 1) and this seed, groups of an older version wait at the window's start: two versions more than at its end."""
    (point,) = grid(seeds=[0], phis=[1.0], mus=[1], bursts=24)
    assert point.measured == pytest.approx(1.0 + 2 / 192)
    assert point.carried == pytest.approx(2 / 192)
    assert abs(point.error) < EXACT


def test_continuous_dispatch_is_staler_by_one_and_what_is_in_rollout() -> None:
    found = dispatches(phis=[0.5])
    assert {each.expected for each in found} == {1.5, 2.0, 3.0}
    assert all(each.ok for each in found), found


@pytest.mark.parametrize("strategy", ["elastic", "async", "colocate"])
@pytest.mark.parametrize("staleness", [1.0, 1.5])
def test_strategies_are_balanced_and_play(strategy: str, staleness: float) -> None:
    scenario = strategy_at(changed(small(), steps=12), strategy, staleness)  # type: ignore[arg-type]
    s = scenario.run.scheduler
    assert s.phi + (s.mu - 1) / 2 == staleness
    outcome = over_seeds([scenario], [1])[0][0]
    assert outcome.steps == 12
    assert outcome.transitions > 0


def test_processes_give_what_one_gives() -> None:
    scenarios: list[Scenario] = [small(), small("world.work_node_h=9.0")]
    told: list[tuple[int, int]] = []
    alone = over_seeds(scenarios, [1, 2], runs=Runs(tell=lambda over, count: told.append((over, count))))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert alone == over_seeds(scenarios, [1, 2], runs=Runs(jobs=2))
    assert spread(alone[0]).seeds == 2 and spread(alone[0]).sd > 0


def test_headroom_of_shipped_scenarios() -> None:
    (found,) = gaps([small()], seeds=[1, 2])
    assert 0 < found.bound_h < found.hours.mean


def test_headroom_is_asked_of_every_row_and_of_every_strategy_on_every_workload() -> None:
    names = [each.name for each in every_scenario()]
    assert len(names) == len(set(names)) == len(ABLATION) + 3 * len(WORKLOADS)


def test_speedup_is_taken_seed_by_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Workload(scenario="small", staleness=1.5, paper_async=(9.0, 9.1), paper_colocate=(9.0, 9.1))
    monkeypatch.setattr("replay.simulator.workloads.WORKLOADS", (one,))
    (found,) = speedups(seeds=[1, 2])
    assert found.over_async.seeds == 2
    assert found.over_async.mean == pytest.approx(found.split.hours.mean / found.elastic.hours.mean, rel=0.05)
    assert found.elastic.above_pct > 0
    assert len(found.outside) == 2
    inside = msgspec.structs.replace(found, paper_async=(0.0, 9.0), paper_colocate=(0.0, 9.0))
    assert not inside.outside
    barely = msgspec.structs.replace(inside, paper_async=(found.over_async.mean + 1e-6, 9.0))
    assert len(barely.outside) == 1, "a mean below the range is outside, however much seeds spread"


def test_standard_error_falls_with_seeds() -> None:
    assert Spread(mean=1.0, sd=0.2, seeds=4).error == pytest.approx(0.1)


def test_durations_that_are_assumed_are_told() -> None:
    lines = assumptions()
    assert [line.partition(",")[0] for line in lines] == ["deepswe-122b", "terminalbench-122b"]
    assert not assumptions("nl2repobench")


def test_surfaces_are_made_of_what_decides_a_run() -> None:
    assert made_of() == made_of()
    assert len(made_of()) == 16


def _surface(row: str, truth: Knobs, *, share: float) -> Surface:
    """A row whose hours are `30 scale + share W`, as they are at `truth`."""
    hours = [[30 * scale + share * work for work in WORKS] for scale in SCALES]
    surface = Surface(row=row, paper_h=1.0, hours=hours, shared=row[0] != "A")
    return Surface(row=row, paper_h=surface.at(truth), hours=hours, shared=surface.shared)


def test_fit_finds_the_knobs_that_made_the_hours() -> None:
    truth = Knobs(duration_scale=0.957, work_node_h=12.1, shared_work=1.11)
    surfaces = [_surface(row, truth, share=share) for row, share in (("A0", 0.8), ("C0", 1.1), ("E0", 0.1))]
    found = fit(surfaces)
    assert found.rms_pct < 0.1
    assert found.knobs.duration_scale == pytest.approx(truth.duration_scale, abs=0.005)
    assert found.knobs.work_node_h == pytest.approx(truth.work_node_h, abs=0.2)
    assert found.knobs.shared_work == pytest.approx(truth.shared_work, abs=0.02)
    assert fit(surfaces, shared=False).knobs.shared_work == 1.0


def test_directions_are_the_papers() -> None:
    assert set(ABLATION) == {row for family in FAMILIES for row in family}
    assert wrong_directions(PAPER) == []
    assert wrong_directions({**PAPER, "C3": PAPER["C2"] - 1}) == ["C2 is not faster than C3"]
    assert "E0 is not faster than A3" in wrong_directions({**PAPER, "A3": 1.0})


def test_every_workload_is_shipped() -> None:
    assert all(load(each.scenario).run.steps in (24, 48) for each in WORKLOADS)


def test_changes_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="multiple of"):
        changed(small(), scheduler={"mu": 5})
    with pytest.raises(ConfigError, match="above 0"):
        changed(small(), world={"work_node_h": 0.0})
