"""Fitting a few numbers of the world to rows of the ablation table, and predicting the others with them.

    measure: hours of each row on a grid of the knobs ──> a surface a row ──> fit: least squares on the surfaces

Knobs: `duration_scale` (the first 12 steps against the run's mean), `work_node_h` (W) and `load_effect` (beta: how much
faster an engine runs when it is nearly empty, which shortens a burst's tail and not a full engine's work). Each row is
played on the grid of the first two; one more point a row gives the slope of the third. What was fitted is played again
with other seeds by whoever reports it: a surface is never a result.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import msgspec

from replay.simulator.pool import over_seeds, spread
from replay.simulator.scenario import ABLATION, Scenario, changed, load

SCALES = (0.88, 1.0)
WORKS = (10.0, 12.5, 15.0)
BETA = 0.2
"""Where the slope of `load_effect` is taken."""
CALIBRATED_ON = ("A0", "C0", "E0")
"""Rows of the fit whose other rows are predictions."""
FIT_SEEDS = (100, 101)
"""Never those of a report."""
COARSE_T = 2000
"""Tokens of a micro-step in suites: two executions. Larger ones keep more groups claimed and fewer in supply: E0 takes
1.6% longer with sixteen, and half a thousandth less with one."""


class Knobs(msgspec.Struct, frozen=True, kw_only=True):
    duration_scale: float
    work_node_h: float
    load_effect: float = 0.0

    def __str__(self) -> str:
        return f"durations x {self.duration_scale:.3f}, W {self.work_node_h:.2f} node-h, beta {self.load_effect:.3f}"


class Surface(msgspec.Struct, frozen=True, kw_only=True):
    """Hours of one row over the knobs: linear between the points of the grid."""

    row: str
    paper_h: float
    hours: list[list[float]]
    """[scale][work]."""
    slope: float
    """Hours for each unit of `load_effect`."""

    def at(self, knobs: Knobs) -> float:
        i, u = _between(SCALES, knobs.duration_scale)
        j, v = _between(WORKS, knobs.work_node_h)
        low = (1 - v) * self.hours[i][j] + v * self.hours[i][j + 1]
        high = (1 - v) * self.hours[i + 1][j] + v * self.hours[i + 1][j + 1]
        return (1 - u) * low + u * high + self.slope * knobs.load_effect

    def error(self, knobs: Knobs) -> float:
        """Relative to the paper's hours."""
        return self.at(knobs) / self.paper_h - 1


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    rows: list[str]
    knobs: Knobs
    rms_pct: float
    """Over its rows, on their surfaces."""


def ablation_row(row: str, knobs: Knobs | None = None) -> Scenario:
    """A row of the table with coarse micro-steps, and with these knobs in place of its own."""
    scenario = load(row, [f"run.packer.T={COARSE_T}"])
    return scenario if knobs is None else changed(scenario, world=msgspec.structs.asdict(knobs))


def measure(rows: Sequence[str] = ABLATION, *, seeds: Sequence[int] = FIT_SEEDS, jobs: int = 1) -> list[Surface]:
    """Plays the grid. Rows times (grid + 1) times seeds runs."""
    grid = [Knobs(duration_scale=scale, work_node_h=work) for scale in SCALES for work in WORKS]
    middle = Knobs(duration_scale=SCALES[0], work_node_h=WORKS[1], load_effect=BETA)
    scenarios, keys = [], []
    for row in rows:
        scenarios += [ablation_row(row, point) for point in (*grid, middle)]
        keys += [(row, point) for point in (*grid, middle)]
    means = dict(zip(keys, (spread(each).mean for each in over_seeds(scenarios, seeds, jobs=jobs)), strict=True))
    found = []
    for row in rows:
        hours = [[means[row, Knobs(duration_scale=scale, work_node_h=work)] for work in WORKS] for scale in SCALES]
        slope = (means[row, middle] - hours[0][1]) / BETA
        found.append(Surface(row=row, paper_h=load(row).paper.hours, hours=hours, slope=slope))
    return found


def fit(surfaces: Iterable[Surface], *, load: bool = True) -> Fit:
    """Least squares of the relative errors: a lattice over all knobs (without `load` the third is 0), then finer ones
    around its best point."""
    kept = list(surfaces)
    spans = [(SCALES[0], SCALES[-1]), (WORKS[0], WORKS[-1]), (0.0, BETA if load else 0.0)]
    steps = 13
    best = _best(kept, [_spaced(low, high, steps) for low, high in spans])
    for narrowing in (6.0, 36.0, 216.0):
        around = [
            _spaced(max(low, x - (high - low) / narrowing), min(high, x + (high - low) / narrowing), 9)
            for (low, high), x in zip(spans, (best.duration_scale, best.work_node_h, best.load_effect), strict=True)
        ]
        best = _best(kept, around)
    return Fit(rows=[each.row for each in kept], knobs=best, rms_pct=100 * rms(each.error(best) for each in kept))


def rms(values: Iterable[float]) -> float:
    kept = list(values)
    return math.sqrt(math.fsum(each * each for each in kept) / len(kept))


def _best(surfaces: Sequence[Surface], axes: Sequence[Sequence[float]]) -> Knobs:
    points = (
        Knobs(duration_scale=scale, work_node_h=work, load_effect=beta)
        for scale, work, beta in itertools.product(*axes)
    )
    return min(points, key=lambda point: sum(each.error(point) ** 2 for each in surfaces))


def _spaced(low: float, high: float, count: int) -> list[float]:
    if high <= low:
        return [low]
    return [low + (high - low) * index / (count - 1) for index in range(count)]


def _between(axis: Sequence[float], x: float) -> tuple[int, float]:
    """Index of the interval and the place in it; beyond the ends the outermost interval goes on."""
    index = max(0, min(len(axis) - 2, sum(x >= each for each in axis) - 1))
    return index, (x - axis[index]) / (axis[index + 1] - axis[index])
