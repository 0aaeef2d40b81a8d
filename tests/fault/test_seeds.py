"""As many seeds as continuous integration has time for, others with every commit."""

from __future__ import annotations

import gc
import os
import subprocess
from pathlib import Path

import pytest

from replay.fault.run import simulate

ROOT = Path(__file__).parents[2]
PORTIONS = 12
SEEDS = int(os.environ.get("GYRE_FAULT_SEEDS", "120"))
"""About two minutes of one core."""


def first_seed() -> int:
    """From the commit: the same code looks at the same seeds, other code at others."""
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    return int(head[:7] or "0", 16) * 1000


@pytest.mark.parametrize("portion", range(PORTIONS))
def test_seeds_of_the_commit(portion: int) -> None:
    first = first_seed()
    violated: dict[int, str] = {}
    for seed in range(first + portion, first + SEEDS, PORTIONS):
        outcome = simulate(seed)
        if not outcome.ok:
            violated[seed] = str(outcome.violations[0])
        del outcome
        gc.collect()
    assert not violated, "repeat one with `gyre fault --seed N`"
