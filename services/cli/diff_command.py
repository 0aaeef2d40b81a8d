"""`gyre replay --diff A B`: two recorded runs side by side. Exit code 0 whether they differ or not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from replay.debugging.difference import FIGURES, Parting, RunDifference, Side, Taken, compare_runs
from replay.logfile import read
from replay.timeline.notes import duration
from schemas.errors import ConfigError
from services.cli.debug_view import check_line
from services.cli.output import say, say_json, table
from services.cli.why_command import cited_line


def diff_command(paths: Sequence[Path], *, alone: bool, json: bool) -> int:
    """Raises ConfigError unless two files are named, and nothing else is asked."""
    if not alone:
        raise ConfigError("--diff asks something else than --at, --until, --step and --why", remedy="leave one out")
    if len(paths) != 2 or any(path.is_dir() for path in paths):
        raise ConfigError("two logs are compared", where="--diff", remedy="name two files that `gyre export` wrote")
    found = compare_runs(read(paths[0]), read(paths[1]))
    if json:
        say_json(found)
        return 0
    for name, path, side in (("a", paths[0], found.a), ("b", paths[1], found.b)):
        end = "" if side.finished else ", not finished"
        say(f"{name}  {path.name}: run {side.run}, seed {side.seed}, code {side.code}{end}")
    for line in [*_config(found), *_parting(found), *_steps(found.a, found.b), *_figures(found.a, found.b)]:
        say(line)
    return 0


def _config(found: RunDifference) -> list[str]:
    rows = [(f"  {each.path}", f"{each.expected}", f"{each.actual}") for each in found.config]
    return ["", "configuration", *(table(rows) or ["  the same"])]


def _parting(found: RunDifference) -> list[str]:
    parting = found.parting
    if parting is None:
        return ["", f"all {found.decisions} decisions of the scheduler are the same"]
    lines = ["", f"after {parting.index} decisions that are the same, the first that parts"]
    return [*lines, *_side("a", parting.a), *_side("b", parting.b), *_differences(parting)]


def _side(name: str, taken: Taken | None) -> list[str]:
    if taken is None:
        return [f"  {name}  no more decisions"]
    return [
        f"  {name}  {cited_line(taken.input)}",
        f"       -> {cited_line(taken.decision)}",
        *(f"          {check_line(check)}" for check in taken.decision.checks),
        f"       state before: {taken.stands}",
    ]


def _differences(parting: Parting) -> list[str]:
    return [f"     {each.path}: {each.expected} | {each.actual}" for each in parting.decision]


def _steps(a: Side, b: Side) -> list[str]:
    rows = [("step", "a", "b", "b - a")]
    for step in sorted({*a.steps_s, *b.steps_s}):
        left, right = a.steps_s.get(step), b.steps_s.get(step)
        change = "" if left is None or right is None else _signed(right - left)
        rows.append((str(step), _time(left), _time(right), change))
    return ["", "when each step was made", *(f"  {each}" for each in table(rows))]


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else f"+{duration(seconds)}"


def _signed(seconds: float) -> str:
    return f"{'-' if seconds < 0 else '+'}{duration(abs(seconds))}"


def _figures(a: Side, b: Side) -> list[str]:
    rows = [("", "a", "b", "b - a", "")]
    for name, meaning in FIGURES.items():
        left, right = a.figures[name], b.figures[name]
        change = "" if left is None or right is None else f"{right - left:+.3g}"
        rows.append((name, _number(left), _number(right), change, meaning))
    return ["", "figures", *(f"  {each}" for each in table(rows))]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
