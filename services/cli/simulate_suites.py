"""`gyre simulate --suite NAME` and `--fit`: tables of simulated runs beside what the paper reports."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from schemas.errors import ConfigError
from services.cli.output import say, say_json, table

if TYPE_CHECKING:
    from replay.simulator.fit import Surface
    from replay.simulator.pool import Spread

SEEDS = 10


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a suite found: one object with --json."""

    name: str
    figures: dict[str, float]
    targets: dict[str, float]
    ok: bool
    machine: str
    notes: list[str]
    rows: list[Any]
    wall_s: float


class Suite(msgspec.Struct, frozen=True, kw_only=True):
    rows: list[Any]
    table: Sequence[tuple[str, ...]]
    figures: dict[str, float]
    targets: dict[str, float] = {}
    """Upper bounds."""
    wrong: list[str] = []
    """What fails beside the targets."""
    notes: list[str] = []


def suite_command(name: str, *, seeds: int, jobs: int, surfaces: Path, json: bool) -> int:
    """0: every target holds. 1: one doesn't. 2: there is no such suite."""
    if name not in _SUITES:
        raise ConfigError(f"no suite is called {name!r}", remedy=f"choose from {', '.join(_SUITES)}")
    began = time.perf_counter()
    found = _SUITES[name](seeds, jobs, surfaces)
    missed = [key for key, bound in found.targets.items() if not found.figures[key] <= bound]
    report = Report(
        name=f"simulate {name}",
        figures=found.figures,
        targets=found.targets,
        ok=not missed and not found.wrong,
        machine=f"{platform.machine()}, {platform.system()}, python {platform.python_version()}",
        notes=[*found.wrong, *found.notes],
        rows=found.rows,
        wall_s=time.perf_counter() - began,
    )
    if json:
        say_json(report)
        return 0 if report.ok else 1
    for line in table(found.table):
        say(f"  {line}")
    for key, value in found.figures.items():
        bound = found.targets.get(key)
        at_most = "" if bound is None else f" (at most {bound:g}{'' if value <= bound else ': MISSED'})"
        say(f"{key} {value:.3g}{at_most}")
    for note in report.notes:
        say(note)
    return 0 if report.ok else 1


def fit_command(*, jobs: int, surfaces: Path, json: bool) -> int:
    """Plays the grid of every row, writes the surfaces, and fits. 0 always: what is found is a finding."""
    from replay.simulator.fit import CALIBRATED_ON, fit, measure

    found = measure(jobs=jobs)
    surfaces.parent.mkdir(parents=True, exist_ok=True)
    surfaces.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    fits = {
        "A0, C0, E0": fit([each for each in found if each.row in CALIBRATED_ON]),
        "all": fit(found),
        **{f"all but {row.row}": fit([each for each in found if each is not row]) for row in found},
    }
    if json:
        say_json({"surfaces": str(surfaces), "fits": fits})
        return 0
    rows = [(name, f"{each.rms_pct:.2f}", str(each.knobs)) for name, each in fits.items()]
    for line in table([("fitted on", "rms %", "knobs"), *rows]):
        say(f"  {line}")
    say(f"surfaces in {surfaces}; gyre simulate --suite ablation plays what was fitted with other seeds")
    return 0


def _read(path: Path) -> list[Surface]:
    from replay.simulator.fit import Surface

    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Surface])
    except FileNotFoundError:
        raise ConfigError("no such file", where=str(path), remedy="make it with gyre simulate --fit") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"holds no surfaces: {error}", where=str(path), remedy="make it with gyre simulate --fit"
        ) from None


def _hours(spread: Spread) -> str:
    return f"{spread.mean:.2f} ±{spread.sd:.2f}"


def _ablation(seeds: int, jobs: int, surfaces: Path) -> Suite:
    from replay.simulator.suites import TARGETS, ablation

    found = ablation(_read(surfaces), seeds=range(seeds), jobs=jobs)
    lines = [("row", "paper h", "fitted on A0 C0 E0", "%", "without the row", "%", "fitted on all", "%")]
    lines += [
        (
            row.row,
            f"{row.paper_h:.2f}",
            _hours(row.predicted) + (" (fitted)" if row.fitted else ""),
            f"{row.predicted_pct:+.1f}",
            _hours(row.left_out),
            f"{row.left_out_pct:+.1f}",
            _hours(row.all_rows),
            f"{row.all_rows_pct:+.1f}",
        )
        for row in found.rows
    ]
    return Suite(
        rows=list(found.rows),
        table=lines,
        figures=found.figures,
        targets=TARGETS,
        wrong=found.wrong_directions,
        notes=[
            f"fitted on A0, C0, E0: {found.held_out.knobs}",
            f"fitted on all: {found.everything.knobs}",
            f"{seeds} seeds that no fit has seen; ± is the standard deviation of one run, and the paper's rows are single runs",
        ],
    )


def _speedups(seeds: int, jobs: int, surfaces: Path) -> Suite:
    from replay.simulator.suites import NOTES, speedups

    found = speedups(seeds=range(seeds), jobs=jobs)
    lines = [
        ("workload", "E[d]", "elastic h", "async h", "colocate h", "over async", "paper", "over colocate", "paper", "")
    ]
    lines += [
        (
            each.workload,
            f"{each.staleness:g}",
            _hours(each.elastic),
            _hours(each.split),
            _hours(each.together),
            f"{each.over_async:.2f}",
            each.paper_async,
            f"{each.over_colocate:.2f}",
            each.paper_colocate,
            each.reading,
        )
        for each in found
    ]
    return Suite(rows=list(found), table=lines, figures={"rows": float(len(found))}, notes=list(NOTES))


def _staleness(seeds: int, jobs: int, surfaces: Path) -> Suite:
    from replay.simulator.staleness import TOLERANCE, dispatches, grid

    points, apart = grid(jobs=jobs), dispatches(jobs=jobs)
    lines = [("phi", "mu", "phi + (mu - 1)/2", "simulated", "groups")]
    lines += [
        (f"{each.phi:g}", str(each.mu), f"{each.expected:g}", f"{each.measured:.4f}", str(each.groups))
        for each in points
    ]
    lines += [("phi", "R", "1 + R/B", "E_c[d] - E_b[d]", "continuous, boundary")]
    lines += [
        (
            f"{each.phi:g}",
            str(each.in_rollout),
            f"{each.expected:g}",
            f"{each.continuous - each.boundary:.4f}",
            f"{each.continuous:.3f}, {each.boundary:.3f}",
        )
        for each in apart
    ]
    return Suite(
        rows=[*points, *apart],
        table=lines,
        figures={
            "max_staleness_error": max(abs(each.measured - each.expected) for each in points),
            "max_dispatch_error": max(abs(each.continuous - each.boundary - each.expected) for each in apart),
        },
        targets={"max_staleness_error": TOLERANCE, "max_dispatch_error": 2 * TOLERANCE},
    )


def _headroom(seeds: int, jobs: int, surfaces: Path) -> Suite:
    from replay.simulator.suites import gaps

    found = gaps(seeds=range(seeds), jobs=jobs)
    lines = [("scenario", "hours", "bound h", "above %", "rollout %", "training %", "waits %", "empty %")]
    lines += [
        (
            each.scenario,
            _hours(each.hours),
            f"{each.bound_h:.2f}",
            f"{each.above_pct:.1f}",
            f"{each.rollout_pct:.1f}",
            f"{each.training_pct:.1f}",
            f"{each.waiting_pct:.1f}",
            f"{each.empty_pct:.1f}",
        )
        for each in found
    ]
    return Suite(
        rows=list(found),
        table=lines,
        figures={f"above_bound_{each.scenario}_pct": each.above_pct for each in found},
        notes=[
            "bound: all work over all capacity, at the scenario's slots a node and with every execution run in full"
        ],
    )


_SUITES: dict[str, Callable[[int, int, Path], Suite]] = {
    "ablation": _ablation,
    "speedups": _speedups,
    "staleness": _staleness,
    "headroom": _headroom,
}
