"""A simulated run is a run: its log is written as all logs are, holds every law, and replays to the last byte."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from replay.checker import check
from replay.invariants import Evidence
from replay.logfile import read_events
from replay.replayer import Replayer, load_deciders
from replay.simulator.bounds import headroom
from replay.simulator.run import START_US, Simulation, simulate
from schemas.errors import GyreError
from services.scheduler.core.equations import mean_staleness
from tests.replay.simulator.small import small

WAYS = {
    "elastic": ["run.cells.pool=1", "run.cells.pool_capacity=18", "world.pool_nodes=4"],
    "colocate": ["run.scheduler.strategy=colocate", "run.scheduler.streaming=false", "run.cells.trainable=3"],
    "async": ["run.scheduler.strategy=async", "run.cells.trainable=2"],
    "oversampled": ["run.scheduler.oversample=2", "world.load_effect=0.4"],
}


@pytest.mark.parametrize("way", WAYS)
def test_log_checks_and_replays(tmp_path: Path, way: str) -> None:
    simulation = Simulation(small(*WAYS[way]), seed=3, keep=True)
    outcome = simulation.run()
    manifest = simulation.write(tmp_path / "small.gyre")
    events = read_events(tmp_path / "small.gyre")
    assert manifest.messages == outcome.events == len(events)
    report = check(events)
    assert report.ok, report.violations[:3]
    # What a decider is not fed here, the replayer feeds it: the decisions are the same.
    replayed = Replayer(deciders=load_deciders()).replay(events)
    assert replayed.ok, str(replayed.first)
    assert all(not each.stopped for each in replayed.deciders)
    assert events[0].time_us == START_US


def test_same_seed_same_log_another_seed_another() -> None:
    first, again, other = (Simulation(small(), seed=seed, keep=True) for seed in (1, 1, 2))
    hours = [each.run().hours for each in (first, again, other)]
    assert first.events == again.events
    assert hours[0] == hours[1] != hours[2]


def test_watchers_see_every_event_in_order() -> None:
    seen: list[int] = []
    outcome = Simulation(small(), watchers=[lambda event: seen.append(event.seq)]).run()
    assert seen == list(range(1, outcome.events + 1))


@settings(max_examples=3, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    phi=st.sampled_from([0.0, 0.5, 1.0, 1.5]),
    mu=st.sampled_from([1, 2, 3]),
    work=st.floats(0.1, 30.0),
    scale=st.floats(0.1, 1.2),
    seed=st.integers(0, 1000),
)
def test_every_law_and_staleness_hold_whatever_the_world(
    phi: float, mu: int, work: float, scale: float, seed: int
) -> None:
    scenario = small(
        f"run.scheduler.phi={phi}",
        f"run.scheduler.mu={mu}",
        f"run.steps={4 * mu}",
        f"world.work_node_h={work}",
        f"world.duration_scale={scale}",
    )
    simulation = Simulation(scenario, seed=seed, keep=True)
    outcome = simulation.run()
    report = check(simulation.events, evidence=Evidence())
    assert report.ok, report.violations[:3]
    if not outcome.discarded:
        # The last bursts: the first ones have groups that nobody could dispatch earlier.
        steady = outcome.staleness[3 * mu :]
        assert sum(steady) / len(steady) == pytest.approx(mean_staleness(phi=phi, mu=mu))


def test_work_is_conserved_and_no_run_beats_its_bound() -> None:
    scenario = small()
    outcome = simulate(scenario, seed=5)
    found = headroom(scenario, outcome)
    assert found.above_pct > 0
    parts = found.rollout_pct + found.training_pct + found.waiting_pct + found.empty_pct
    assert parts == pytest.approx(100.0)
    # What has no reward is not packed, so a little less than W a step is trained.
    excluded = outcome.excluded / (scenario.run.scheduler.N * scenario.run.scheduler.B * outcome.steps)
    whole = scenario.world.work_node_h * outcome.steps
    assert whole * (1 - excluded) - 1e-3 <= outcome.trained_node_h <= whole + 1e-3


def test_surplus_is_given_up_and_counted_apart() -> None:
    """Where slots abound the slowest two of six hold no group up, and the time that they took is no work that was needed."""
    plain, more = (
        simulate(small("run.cells.capacity=80", f"run.scheduler.oversample={surplus}"), seed=2) for surplus in (0, 2)
    )
    config = small().run
    consumed = config.scheduler.B * config.steps
    assert (plain.surplus, more.surplus) == (0, 2 * consumed)
    assert more.excluded == more.discarded == 0
    assert more.hours < plain.hours
    assert more.executed_h < plain.executed_h and more.running_h > plain.running_h
    assert more.staleness == plain.staleness


def test_faster_rollout_and_less_work_take_less_time() -> None:
    hours = [
        simulate(small(f"world.duration_scale={scale}", f"world.work_node_h={work}"), seed=1).hours
        for scale, work in ((0.5, 3.0), (1.0, 3.0), (1.0, 30.0))
    ]
    assert hours == sorted(hours)


def test_engines_slow_down_under_load() -> None:
    fast, slow = (simulate(small(f"world.load_effect={beta}"), seed=1).hours for beta in (0.5, 0.0))
    # At a load of 1 the rate is 1 whatever beta is, below it is higher.
    assert fast < slow


def test_run_that_cannot_go_on_is_an_error() -> None:
    scenario = small()
    config = msgspec.structs.replace(scenario.run, cells=msgspec.structs.replace(scenario.run.cells, trainable=0))
    with pytest.raises(GyreError, match="nothing is left to happen"):
        simulate(msgspec.structs.replace(scenario, run=config))
