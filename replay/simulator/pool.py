"""Many simulated runs, side by side in processes, in the order in which they were asked for."""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import signal
import statistics
from collections.abc import Callable, Iterable, Sequence

import msgspec

from replay.simulator.account import Outcome
from replay.simulator.run import simulate
from replay.simulator.scenario import Scenario


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Hours, or what is made of them, over seeds."""

    mean: float
    sd: float
    """Of one run; 0 with one seed."""
    seeds: int

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        return self.sd / math.sqrt(self.seeds)


class Runs(msgspec.Struct, frozen=True, kw_only=True):
    """How runs are played: in how many processes, and who is told how many of them are over."""

    jobs: int = 1
    """0 takes a process for each core; 1 stays in this one."""
    tell: Callable[[int, int], None] | None = None
    """Called with the runs that are over and with all of them, after each."""


ALONE = Runs()


def play(cases: Sequence[tuple[Scenario, int]], *, runs: Runs = ALONE) -> list[Outcome]:
    """Outcomes of (scenario, seed), in order."""
    workers = min(runs.jobs or os.cpu_count() or 1, len(cases))
    if workers <= 1:
        return _gathered(map(_one, cases), len(cases), runs)
    with multiprocessing.get_context("spawn").Pool(workers, initializer=_ignore_interrupt) as pool:
        return _gathered(pool.imap(_one, cases), len(cases), runs)


def over_seeds(scenarios: Sequence[Scenario], seeds: Sequence[int], *, runs: Runs = ALONE) -> list[list[Outcome]]:
    """For each scenario its outcomes, one a seed."""
    flat = play([(scenario, seed) for scenario in scenarios for seed in seeds], runs=runs)
    return [flat[at : at + len(seeds)] for at in range(0, len(flat), len(seeds))]


def spread(outcomes: Sequence[Outcome]) -> Spread:
    return spread_of([each.hours for each in outcomes])


def spread_of(values: Sequence[float]) -> Spread:
    return Spread(
        mean=statistics.fmean(values), sd=statistics.stdev(values) if len(values) > 1 else 0.0, seeds=len(values)
    )


def _gathered(outcomes: Iterable[Outcome], count: int, runs: Runs) -> list[Outcome]:
    found = []
    for outcome in outcomes:
        found.append(outcome)
        if runs.tell is not None:
            runs.tell(len(found), count)
    return found


def _ignore_interrupt() -> None:
    """The process that asked for the runs ends them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


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
