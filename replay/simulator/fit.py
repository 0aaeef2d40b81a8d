"""Fitting a few numbers of the world to rows of the ablation table, and predicting the others with them.

    measure: hours of each row on a grid of the knobs ──> a surface a row ──> fit: least squares on the surfaces

Knobs: `duration_scale` (the first 12 steps against the run's mean), `work_node_h` (W) and `shared_work` (how much dearer a
step is for cells that also serve). The third multiplies W in the rows that are not async, so a row is played on a grid of
the first two only. What was fitted is played again with other seeds by whoever reports it: a surface is never a result.

The third knob was chosen with the table in view. Two others were tried in its place and explain less: time added to steps
that do not stream (`whole_batch_s`), and engines that run faster when nearly empty (`load_effect`).
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from replay.simulator.pool import ALONE, Runs, over_seeds, spread
from replay.simulator.scenario import ABLATION, Scenario, changed, load

SCALES = (0.88, 1.0)
WORKS = (10.0, 12.5, 15.0)
SHARED = (1.0, 1.3)
"""Between these `shared_work` is looked for."""
CALIBRATED_ON = ("A0", "C0", "E0")
"""Rows of the fit whose other rows are predictions."""
FIT_SEEDS = (100, 101)
"""Never those of a report."""
COARSE_T = 2000
"""Tokens of a micro-step in suites: two executions. Larger ones keep more groups claimed and fewer in supply: E0 takes
1.6% longer with sixteen, and half a thousandth less with one."""

_MADE_OF = (
    "replay/scenarios",
    *(f"replay/simulator/{name}.py" for name in ("durations", "progress", "run", "world", "fit")),
    *(f"services/{name}/core" for name in ("scheduler", "packer", "trajectories")),
)


class Knobs(msgspec.Struct, frozen=True, kw_only=True):
    duration_scale: float
    work_node_h: float
    shared_work: float = 1.0

    def __str__(self) -> str:
        return f"durations x {self.duration_scale:.3f}, W {self.work_node_h:.2f} node-h, x {self.shared_work:.3f} where cells also serve"


class Surface(msgspec.Struct, frozen=True, kw_only=True):
    """Hours of one row over the knobs: linear between the points of the grid."""

    row: str
    paper_h: float
    hours: list[list[float]]
    """[scale][work]."""
    shared: bool
    """Whether its training cells also serve."""

    def at(self, knobs: Knobs) -> float:
        i, u = _between(SCALES, knobs.duration_scale)
        j, v = _between(WORKS, knobs.work_node_h * (knobs.shared_work if self.shared else 1.0))
        low = (1 - v) * self.hours[i][j] + v * self.hours[i][j + 1]
        high = (1 - v) * self.hours[i + 1][j] + v * self.hours[i + 1][j + 1]
        return (1 - u) * low + u * high

    def error(self, knobs: Knobs) -> float:
        """Relative to the paper's hours."""
        return self.at(knobs) / self.paper_h - 1


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Surfaces, and what they were played with: other deciders, another world or another scenario make others."""

    made_of: str
    surfaces: list[Surface]


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    rows: list[str]
    knobs: Knobs
    rms_pct: float
    """Over its rows, on their surfaces."""


def ablation_row(row: str, knobs: Knobs | None = None) -> Scenario:
    """A row of the table with coarse micro-steps, and with these knobs in place of its own."""
    scenario = load(row, [f"run.packer.T={COARSE_T}"])
    return scenario if knobs is None else changed(scenario, world=msgspec.structs.asdict(knobs))


def measure(rows: Sequence[str] = ABLATION, *, seeds: Sequence[int] = FIT_SEEDS, runs: Runs = ALONE) -> list[Surface]:
    """Plays the grid: rows times grid times seeds runs."""
    grid = [Knobs(duration_scale=scale, work_node_h=work) for scale in SCALES for work in WORKS]
    scenarios = [ablation_row(row, point) for row in rows for point in grid]
    means = [spread(each).mean for each in over_seeds(scenarios, seeds, runs=runs)]
    found = []
    for index, row in enumerate(rows):
        flat = means[index * len(grid) : (index + 1) * len(grid)]
        scenario = load(row)
        found.append(
            Surface(
                row=row,
                paper_h=scenario.paper.hours,
                hours=[flat[at : at + len(WORKS)] for at in range(0, len(flat), len(WORKS))],
                shared=scenario.run.scheduler.strategy != "async",
            )
        )
    return found


def made_of() -> str:
    """Digest of the sources that decide what a run of a row is."""
    root = Path(__file__).parent.parent.parent
    digest = hashlib.sha256()
    for name in _MADE_OF:
        place = root / name
        for path in sorted(place.rglob("*.*")) if place.is_dir() else [place]:
            if path.suffix in (".py", ".toml"):
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def fit(surfaces: Iterable[Surface], *, shared: bool = True) -> Fit:
    """Least squares of the relative errors: a lattice over all knobs (without `shared` the third is 1), then finer ones
    around its best point."""
    kept = list(surfaces)
    spans = [(SCALES[0], SCALES[-1]), (WORKS[0], WORKS[-1]), SHARED if shared else (1.0, 1.0)]
    steps = 13
    best = _best(kept, [_spaced(low, high, steps) for low, high in spans])
    for narrowing in (6.0, 36.0, 216.0):
        around = [
            _spaced(max(low, x - (high - low) / narrowing), min(high, x + (high - low) / narrowing), 9)
            for (low, high), x in zip(spans, (best.duration_scale, best.work_node_h, best.shared_work), strict=True)
        ]
        best = _best(kept, around)
    return Fit(rows=[each.row for each in kept], knobs=best, rms_pct=100 * rms(each.error(best) for each in kept))


def rms(values: Iterable[float]) -> float:
    kept = list(values)
    return math.sqrt(math.fsum(each * each for each in kept) / len(kept))


def _best(surfaces: Sequence[Surface], axes: Sequence[Sequence[float]]) -> Knobs:
    points = (
        Knobs(duration_scale=scale, work_node_h=work, shared_work=dear)
        for scale, work, dear in itertools.product(*axes)
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
