"""A plan shrinks to the faults that matter."""

from __future__ import annotations

import random

import msgspec
import pytest

from replay.fault import plan as p
from replay.fault.run import Outcome
from replay.fault.shrink import shrink
from replay.fault.strike import Struck
from replay.invariants import Violation


def plan_of(count: int) -> p.Plan:
    return p.Plan(seed=1, faults=[p.ServerRestart(pin=p.Pin(), down_s=float(i)) for i in range(count)])


class Runs:
    """Pretends to run plans: one that holds all of `needed` violates."""

    def __init__(self, needed: set[float], idle: set[float]) -> None:
        self.needed, self.idle, self.count = needed, idle, 0

    def __call__(self, plan: p.Plan) -> Outcome:
        self.count += 1
        there = [fault.down_s for fault in plan.faults if isinstance(fault, p.ServerRestart)]
        bad = self.needed <= set(there)
        struck = [Struck(place=i, at_s=0.0, seq=0) for i, down_s in enumerate(there) if down_s not in self.idle]
        violation = Violation(invariant="capacity", seq=1, entity="cell-0", what="too much")
        return Outcome(
            plan=plan, log=[], violations=[violation] if bad else [], struck=struck, virtual_s=0, cpu_s=0
        )


@pytest.mark.parametrize("seed", range(20))
def test_what_is_needed_stays_and_nothing_else(seed: int) -> None:
    rng = random.Random(seed)
    needed = set(map(float, rng.sample(range(22), rng.randint(0, 4))))
    runs = Runs(needed, idle=set(map(float, range(22))) - needed if seed % 2 else set())
    small = shrink(runs(plan_of(22)), run=runs)
    assert {fault.down_s for fault in small.plan.faults} == needed  # type: ignore[union-attr]
    assert small.violations
    assert runs.count < 120


def test_another_violation_is_not_followed() -> None:
    runs = Runs({3.0}, idle=set())

    def run(plan: p.Plan) -> Outcome:
        outcome = runs(plan)
        if len(plan.faults) < 5 and outcome.violations:
            other = Violation(invariant="stuck", seq=1, entity="r", what="another one")
            return msgspec.structs.replace(outcome, violations=[other])
        return outcome

    small = shrink(run(plan_of(22)), run=run)
    assert len(small.plan.faults) == 5
    assert {violation.invariant for violation in small.violations} == {"capacity"}
