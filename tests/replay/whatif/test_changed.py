"""Under other parameters the recorded world does what a fresh simulation with the same seed does; what comes out is a log."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from replay.checker import check
from replay.invariants import Evidence
from replay.logfile import read_events
from replay.replayer import Replayer
from replay.whatif.continuation import Continuation
from replay.whatif.parameters import changed
from replay.whatif.report import Asked
from schemas.envelope import Event
from tests.replay.whatif.simulated import configured, recorded, simulated, step_hours

GOLDEN = Path(__file__).parents[2] / "golden" / "quickstart-elastic.gyre"
CHANGES: dict[str, tuple[str, ...]] = {
    "rho_min": ("run.scheduler.rho_min=0.9",),
    "phi": ("run.scheduler.phi=0.25",),
    "mu": ("run.scheduler.mu=2",),
    "tau": ("run.scheduler.tau_s=600",),
    "tokens": ("run.packer.T=4000",),
    "trainable": ("run.cells.trainable=2",),
    "pool": ("run.cells.pool=1", "run.cells.pool_capacity=18"),
    "capacity": ("run.cells.capacity=12",),
    "async": ("run.scheduler.strategy=async", "run.cells.trainable=2"),
    "colocate": ("run.scheduler.strategy=colocate",),
}
STEPS = "run.steps=12"


def error_pct(ours: list[Event], fresh: list[Event]) -> float:
    pairs = list(zip(step_hours(ours), step_hours(fresh), strict=True))
    return max(100 * abs(a / b - 1) for a, b in pairs)


@pytest.mark.parametrize("change", CHANGES)
def test_it_lands_within_two_percent_of_a_fresh_simulation(change: str) -> None:
    _, asked = recorded(STEPS, seed=1)
    found = asked.play(configured(STEPS, *CHANGES[change]))
    assert found.parting is not None
    assert error_pct(found.events, simulated(STEPS, *CHANGES[change], seed=1).events) < 2.0


@pytest.mark.parametrize("change", ["rho_min", "mu", "pool", "colocate"])
def test_what_comes_out_holds_every_law_and_replays(change: str) -> None:
    _, asked = recorded()
    found = asked.play(configured(*CHANGES[change]))
    report = check(found.events, evidence=Evidence())
    assert report.ok, report.violations[:3]
    replayed = Replayer().replay(found.events)
    assert replayed.ok, str(replayed.first)


@settings(max_examples=3, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    phi=st.sampled_from([0.0, 0.25, 1.0, 2.0]),
    mu=st.sampled_from([1, 2, 3, 6]),
    rho_min=st.floats(0.05, 1.0),
    seed=st.integers(0, 50),
    oversample=st.integers(0, 2),
)
def test_laws_hold_and_causes_come_first_whatever_is_changed(
    phi: float, mu: int, rho_min: float, seed: int, oversample: int
) -> None:
    _, asked = recorded(seed=seed)
    overrides = [f"phi={phi}", f"mu={mu}", f"rho_min={rho_min}", f"oversample={oversample}"]
    found = asked.play(configured(*(f"run.scheduler.{each}" for each in overrides)))
    report = check(found.events, evidence=Evidence())
    assert report.ok, report.violations[:3]
    causes_come_first(found.events)


def test_a_real_run_under_another_strategy_is_a_run() -> None:
    events = read_events(GOLDEN)
    asked = Asked(events)
    found = asked.play(changed(asked.config, [("scheduler.strategy", "colocate")]))
    assert found.parting is not None and len(step_hours(found.events)) == 20
    report = check(found.events, evidence=Evidence())
    assert report.ok, report.violations[:3]
    assert Replayer().replay(found.events).ok
    causes_come_first(found.events)
    # Facts before the parting are the recorded ones.
    shared = [
        each for each in found.events[1 : found.shared] if each.owner not in ("scheduler", "trajectories", "packer")
    ]
    theirs = {each.id: (each.time_us, each.data) for each in events}
    assert len(shared) > 100 and all((each.time_us, each.data) == theirs[each.id] for each in shared)


def test_who_ended_while_it_was_given_up_ends_once() -> None:
    """Services hear of each other later: a surplus execution may have ended by then."""
    _, asked = recorded("run.scheduler.oversample=2")
    found = Continuation(asked.recording, asked.config)
    found.answers.gaps = dict.fromkeys([("trajectories", "execution.cancelled")], 600_000_000)
    found.run(simulated("run.scheduler.oversample=2").events, from_seq=1)
    cancelled = {each.entity for each in found.events if each.kind == "execution.cancelled"}
    ends = [each for each in found.events if each.kind == "execution.finished" and each.entity in cancelled]
    assert len(ends) == len({each.entity for each in ends})
    assert any(each.data.reason != "surplus" for each in ends)


def causes_come_first(events: list[Event]) -> None:
    """Nothing is decided, or happens, before what it follows from; time never goes back."""
    times = {each.seq: each.time_us for each in events}
    assert [each.seq for each in events] == list(range(1, len(events) + 1))
    for before, each in pairwise(events):
        assert before.time_us <= each.time_us
        assert each.causation < each.seq and times.get(each.causation, 0) <= each.time_us


def test_a_step_that_rests_on_recorded_executions_alone_is_exact() -> None:
    """Where something was drawn it is said from when on."""
    _, asked = recorded(STEPS, seed=0)
    overrides = (STEPS, "run.scheduler.strategy=colocate")
    answer = asked.answer(configured(*overrides))
    fresh = step_hours(simulated(*overrides, seed=0).events)
    assert answer.world_pct == 0.0
    assert answer.steps[0].drawn == 0 and answer.steps[-1].drawn > 0
    for each in answer.steps:
        assert each.what_if_s is not None
        if not each.drawn:
            assert each.what_if_s == pytest.approx(3600 * fresh[each.step - 1], rel=1e-6)
