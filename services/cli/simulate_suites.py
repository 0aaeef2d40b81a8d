"""`gyre simulate --suite NAME` and `--fit`: tables of simulated runs beside what the paper reports."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from schemas.errors import ConfigError
from services.cli.output import say, say_json, table

if TYPE_CHECKING:
    from replay.simulator.fit import Surface
    from replay.simulator.pool import Runs, Spread


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


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a suite is asked for."""

    seeds: int
    runs: Runs
    only: str
    surfaces: Path


def suite_command(name: str, *, only: str, seeds: int, jobs: int, surfaces: Path, json: bool) -> int:
    """0: every target holds. 1: one doesn't. 2: there is no such suite."""
    if name not in _SUITES:
        raise ConfigError(f"no suite is called {name!r}", remedy=f"choose from {', '.join(_SUITES)}")
    if seeds < 1:
        raise ConfigError(f"--seeds {seeds}", remedy="a suite needs at least one")
    began = time.perf_counter()
    found = _SUITES[name](Asked(seeds=seeds, runs=_runs(jobs), only=only, surfaces=surfaces))
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
    from replay.simulator.fit import CALIBRATED_ON, fit

    found = _measure(surfaces, _runs(jobs))
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


def _among(only: str, names: Sequence[str]) -> None:
    if not any(name.startswith(only) for name in names):
        known = ", ".join(dict.fromkeys(names))
        raise ConfigError(f"no name begins with {only!r}", where="--only", remedy=f"there are {known}")


def _runs(jobs: int) -> Runs:
    from replay.simulator.pool import Runs

    return Runs(jobs=jobs, tell=_tell if sys.stderr.isatty() else None)


def _tell(over: int, count: int) -> None:
    """To whoever sits before it."""
    sys.stderr.write(f"\r{over} of {count} runs" + ("\n" if over == count else ""))
    sys.stderr.flush()


def _measure(path: Path, runs: Runs) -> list[Surface]:
    from replay.simulator.fit import Measured, made_of, measure

    found = Measured(made_of=made_of(), surfaces=measure(runs=runs))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    return found.surfaces


def _surfaces(path: Path, runs: Runs) -> list[Surface]:
    """Those in the file, when they were made of what would make them now; else made now."""
    from replay.simulator.fit import Measured, made_of

    try:
        kept = msgspec.json.decode(path.read_bytes(), type=Measured)
    except FileNotFoundError:
        return _measure(path, runs)
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"holds no surfaces: {error}", where=str(path), remedy="make it with gyre simulate --fit"
        ) from None
    return kept.surfaces if kept.made_of == made_of() else _measure(path, runs)


def _hours(spread: Spread) -> str:
    return f"{spread.mean:.2f} ±{spread.sd:.2f}"


def _ablation(asked: Asked) -> Suite:
    from replay.simulator.ablation import TARGETS, ablation

    found = ablation(_surfaces(asked.surfaces, asked.runs), seeds=range(asked.seeds), runs=asked.runs)
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
            *(
                []
                if found.wrong_directions
                else [f"every direction is the paper's: {', '.join(_chains())}; E0 before all"]
            ),
            f"fitted on A0, C0, E0: {found.held_out.knobs}",
            f"fitted on all: {found.everything.knobs}",
            f"{asked.seeds} seeds that no fit has seen; ± is the standard deviation of one run, and the paper's rows are single runs",
        ],
    )


def _chains() -> list[str]:
    from replay.simulator.ablation import FAMILIES

    return [" < ".join(family) for family in FAMILIES]


def _ratio(spread: Spread) -> str:
    return f"{spread.mean:.3f} ±{spread.sd:.3f}"


def _range(paper: tuple[float, float]) -> str:
    low, high = paper
    return f"{low:g}" if low == high else f"{low:g}-{high:g}"


def _speedups(asked: Asked) -> Suite:
    from replay.simulator.workloads import NOTES, WORKLOADS, assumptions, speedups

    _among(asked.only, [each.scenario for each in WORKLOADS])
    found = speedups(seeds=range(asked.seeds), runs=asked.runs, only=asked.only)
    lines = [
        ("workload", "E[d]", "elastic h", "async h", "colocate h", "over async", "paper", "over colocate", "paper", "")
    ]
    lines += [
        (
            each.workload,
            f"{each.staleness:g}",
            _hours(each.elastic.hours),
            _hours(each.split.hours),
            _hours(each.together.hours),
            _ratio(each.over_async),
            _range(each.paper_async),
            _ratio(each.over_colocate),
            _range(each.paper_colocate),
            each.reading,
        )
        for each in found
    ]
    return Suite(
        rows=list(found),
        table=lines,
        figures={
            f"{each.workload}_{each.staleness:g}_over_{name}": ratio.mean
            for each in found
            for name, ratio in (("async", each.over_async), ("colocate", each.over_colocate))
        },
        wrong=[f"not in the paper's range: {text}" for each in found if each.predicted for text in each.outside],
        notes=[
            f"{asked.seeds} seeds; ± is the standard deviation of one run, or of one seed's speedup",
            *NOTES,
            *assumptions(asked.only),
        ],
    )


def _staleness(asked: Asked) -> Suite:
    from replay.simulator.staleness import EXACT, TOLERANCE, dispatches, grid

    seeds = range(asked.seeds)
    points, apart = grid(seeds=seeds, runs=asked.runs), dispatches(seeds=seeds)
    lines = [("phi", "mu", "phi + (mu - 1)/2", "simulated", "carried over the ends", "groups")]
    lines += [
        (
            f"{each.phi:g}",
            str(each.mu),
            f"{each.expected:g}",
            f"{each.measured:.4f}",
            f"{each.carried:+.4f}",
            str(each.groups),
        )
        for each in points
    ]
    lines += [("phi", "R", "1 + R/B", "E_c[d] - E_b[d]", "continuous, boundary", "")]
    lines += [
        (
            f"{each.phi:g}",
            str(each.in_rollout),
            f"{each.expected:g}",
            f"{each.continuous - each.boundary:.4f} ±{each.sd:.4f}",
            f"{each.continuous:.3f}, {each.boundary:g}",
            "",
        )
        for each in apart
    ]
    return Suite(
        rows=[*points, *apart],
        table=lines,
        figures={
            "max_staleness_error": max(abs(each.error) for each in points),
            "max_dispatch_error": max(abs(each.error) for each in apart),
        },
        targets={"max_staleness_error": EXACT, "max_dispatch_error": TOLERANCE},
        notes=[
            "staleness error: simulated, less what groups carried over the ends of the window add, less the identity",
        ],
    )


def _headroom(asked: Asked) -> Suite:
    from replay.simulator.workloads import every_scenario, gaps

    every = every_scenario()
    _among(asked.only, [each.name for each in every])
    scenarios = [each for each in every if each.name.startswith(asked.only)]
    found = gaps(scenarios, seeds=range(asked.seeds), runs=asked.runs)
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


_SUITES: dict[str, Callable[[Asked], Suite]] = {
    "ablation": _ablation,
    "speedups": _speedups,
    "staleness": _staleness,
    "headroom": _headroom,
}
