"""A plan that shows a violation, made as small as it gets and still shows it (delta debugging)."""

from __future__ import annotations

from collections.abc import Callable

from replay.fault.plan import Plan
from replay.fault.run import Outcome, simulate_plan

RUNS = 200
"""Most runs that shrinking one plan may take."""


def shrink(outcome: Outcome, *, run: Callable[[Plan], Outcome] = simulate_plan, runs: int = RUNS) -> Outcome:
    """The smallest plan found that violates one of the same invariants, with its outcome.

    Faults that never struck go first, then halves, quarters and so on, until no single fault can be left out."""
    wanted = {violation.invariant for violation in outcome.violations}
    left = runs

    def shows(plan: Plan) -> Outcome | None:
        nonlocal left
        left -= 1
        tried = run(plan)
        return tried if wanted & {violation.invariant for violation in tried.violations} else None

    struck = {each.place for each in outcome.struck}
    idle = set(range(len(outcome.plan.faults))) - struck
    if idle and (smaller := shows(outcome.plan.without(idle))):
        outcome = smaller
    parts = 2
    while outcome.plan.faults and left > 0:
        count = len(outcome.plan.faults)
        size = max(1, count // parts)
        for start in range(0, count, size):
            smaller = shows(outcome.plan.without(set(range(start, min(start + size, count)))))
            if smaller is not None:
                outcome = smaller
                parts = max(2, parts - 1)
                break
            if left <= 0:
                break
        else:
            if size == 1:
                break
            parts = min(2 * parts, count)
    return outcome
