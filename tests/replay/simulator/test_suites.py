"""Suites and the fit, on small scenarios and few seeds."""

from __future__ import annotations

import pytest

from replay.simulator.fit import SCALES, WORKS, Knobs, Surface, fit
from replay.simulator.pool import over_seeds, spread
from replay.simulator.scenario import Scenario, changed, load
from replay.simulator.staleness import MU, PHI, dispatches, grid
from replay.simulator.suites import ABLATION, FAMILIES, WORKLOADS, gaps, strategy_at, wrong_directions
from schemas.errors import ConfigError
from tests.replay.simulator.small import small

PAPER = {row: load(row).paper.hours for row in ABLATION}


def test_staleness_is_the_identity() -> None:
    points = grid(phis=PHI[::2], mus=MU[1:3], bursts=8)
    assert len(points) == 6
    assert all(each.ok for each in points), [each for each in points if not each.ok]


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
    alone, shared = (over_seeds(scenarios, [1, 2], jobs=jobs) for jobs in (1, 2))
    assert alone == shared
    assert spread(alone[0]).seeds == 2 and spread(alone[0]).sd > 0


def test_headroom_of_shipped_scenarios() -> None:
    (found,) = gaps(["small"], seeds=[1, 2])
    assert 0 < found.bound_h < found.hours.mean


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
