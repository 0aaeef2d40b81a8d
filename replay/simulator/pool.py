"""Many simulated runs, side by side in processes, in the order in which they were asked for."""

from __future__ import annotations

import gc
import multiprocessing
import os
import statistics
from collections.abc import Sequence

import msgspec

from replay.simulator.account import Outcome
from replay.simulator.run import simulate
from replay.simulator.scenario import Scenario


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Hours over seeds."""

    mean: float
    sd: float
    """Of one run; 0 with one seed."""
    seeds: int


def play(cases: Sequence[tuple[Scenario, int]], *, jobs: int = 1) -> list[Outcome]:
    """Outcomes of (scenario, seed), in order. `jobs` 0 takes a process for each core; 1 stays in this one."""
    workers = min(jobs or os.cpu_count() or 1, len(cases))
    if workers <= 1:
        return [_one(case) for case in cases]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        return pool.map(_one, cases, chunksize=1)


def over_seeds(scenarios: Sequence[Scenario], seeds: Sequence[int], *, jobs: int = 1) -> list[list[Outcome]]:
    """For each scenario its outcomes, one a seed."""
    flat = play([(scenario, seed) for scenario in scenarios for seed in seeds], jobs=jobs)
    return [flat[at : at + len(seeds)] for at in range(0, len(flat), len(seeds))]


def spread(outcomes: Sequence[Outcome]) -> Spread:
    hours = [each.hours for each in outcomes]
    return Spread(mean=statistics.fmean(hours), sd=statistics.stdev(hours) if len(hours) > 1 else 0.0, seeds=len(hours))


def _one(case: tuple[Scenario, int]) -> Outcome:
    """Without the collector of cycles: a run makes events by the ten thousand and no cycles, and looking costs a tenth."""
    scenario, seed = case
    collects = gc.isenabled()
    gc.disable()
    try:
        return simulate(scenario, seed=seed)
    finally:
        if collects:
            gc.enable()
