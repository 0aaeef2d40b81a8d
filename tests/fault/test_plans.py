"""Plans that once showed a bug: each holds every invariant now."""

from __future__ import annotations

from pathlib import Path

import pytest

from replay.fault.plan import read
from replay.fault.run import simulate_plan

PLANS = sorted((Path(__file__).parent / "plans").glob("*.json"))


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_a_plan_that_was_kept_violates_nothing(path: Path) -> None:
    plan = read(path)
    outcome = simulate_plan(plan)
    assert not outcome.violations, plan.note
    assert {struck.place for struck in outcome.struck} == set(range(len(plan.faults))), "a kept plan strikes as it did"
