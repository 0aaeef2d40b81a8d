"""`gyre replay FILE --with KEY=VALUE` and `--sweep KEY=FROM:TO:STEP`: a recorded run under other parameters.

0 whatever comes out.
2: the file is no whole log, or the parameters are none that a recording can be asked about.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from replay.debugging.difference import FIGURES
from replay.logfile import read
from replay.timeline.notes import duration
from replay.whatif.parameters import changed, parse, points
from replay.whatif.plot import svg
from replay.whatif.report import Answer, Asked, Rests, Step
from replay.whatif.sweep import Point, Sweep, sweep
from schemas.envelope import Decision
from schemas.errors import ConfigError
from services.cli.output import say, say_json, table
from services.cli.why_command import cited_line

SHOWN = [name for name in FIGURES if name not in ("hours", "reward_last")]
"""A recording may go on after its last step, and what would be learned isn't known."""
_PLOT = 33
"""Columns of the plot beside a sweep."""
_PARTS = {
    "executions": "executions",
    "micro_steps": "micro-steps",
    "steps": "updates",
    "departures": "ways to training",
    "returns": "ways back",
    "publications": "publications",
}
_HOW = {
    "recorded": "as recorded",
    "prolonged": "cut off there, drawn beyond",
    "drawn": "drawn",
    "by_tokens": "by their tokens",
}


def what_if_command(paths: Sequence[Path], changes: Sequence[str], *, output: Path | None, json: bool) -> int:
    """Raises ConfigError unless one file is named."""
    asked = Asked(read(one_file(paths)))
    config = changed(asked.config, [parse(each) for each in changes])
    answer = asked.answer(config)
    if output is not None:
        asked.play(config).write(output)
    if json:
        say_json(answer)
        return 0
    for line in told(answer, paths[0].name):
        say(line)
    return 0


def sweep_command(paths: Sequence[Path], changes: Sequence[str], swept: str, *, output: Path | None, json: bool) -> int:
    """Raises ConfigError unless one file is named, and what is written is a picture."""
    if output is not None and output.suffix != ".svg":
        raise ConfigError("a sweep is drawn as .svg", where=str(output), remedy="write --output sweep.svg")
    key, values = points(swept)
    found = sweep(Asked(read(one_file(paths))), key, values, others=[parse(each) for each in changes])
    if output is not None:
        output.write_text(svg(found))
    if json:
        say_json(found)
        return 0
    for line in swept_lines(found, paths[0].name):
        say(line)
    return 0


def swept_lines(found: Sweep, name: str) -> list[str]:
    """For people: a table, and beside it where each time stands between the least and the greatest."""
    hours = [each.last_step_h for each in [found.recorded, *found.points] if each.last_step_h is not None]
    low, high = min(hours, default=0.0), max(hours, default=0.0)
    scale = f"{low:.3g} h".ljust(_PLOT - len(f"{high:.3g} h")) + f"{high:.3g} h" if hours else ""
    head = (found.key, f"step {found.step}", "change", "idle cell-hours", "staleness", "transitions", "drawn", scale)
    rows = [head, *(_row(each, low, high) for each in found.points), ("recorded", *_row(found.recorded, low, high)[1:])]
    lines = [
        f"{name}: run {found.run}, {found.key} recorded as {found.was}",
        "",
        *(f"  {each}" for each in table(rows)),
    ]
    lines += [f"  {each.value}: {each.refused}" for each in found.points if each.refused]
    if found.world_pct is not None:
        lines += ["", f"  {_world(found.world_pct)}"]
    return [*lines, "", "what the recording can't tell", *(f"  {each}" for each in found.untold)]


def _row(point: Point, low: float, high: float) -> tuple[str, ...]:
    if point.refused:
        return str(point.value), *("-",) * 6, ""
    at_h, change = point.last_step_h, "the same" if not point.change_pct else f"{point.change_pct:+.1f}%"
    place = round((at_h - low) / (high - low) * (_PLOT - 1)) if at_h is not None and high > low else 0
    return (
        str(point.value),
        "-" if at_h is None else f"{at_h:.3f} h",
        "-" if at_h is None else change,
        _number(point.idle_cell_hours),
        _number(point.staleness_mean),
        _number(point.transitions),
        str(point.drawn or ""),
        "" if at_h is None else "·" * place + "●" + "·" * (_PLOT - 1 - place),
    )


def refuse_others(**others: object) -> None:
    """Raises ConfigError where something else is asked as well."""
    for name, value in others.items():
        if value:
            raise ConfigError(f"--{name} and --with are two questions", where="--with", remedy="leave one out")


def one_file(paths: Sequence[Path]) -> Path:
    if len(paths) != 1 or paths[0].is_dir():
        raise ConfigError("one recorded run is asked", where="--with", remedy="name one file that `gyre export` wrote")
    return paths[0]


def told(answer: Answer, name: str) -> list[str]:
    """For people."""
    recorded = answer.recorded
    lines = [f"{name}: run {answer.run}, {recorded.figures['steps']} steps recorded"]
    lines += [f"  {line}" for line in table([(each.key, f"{each.was} -> {each.now}") for each in answer.changes])]
    if not answer.changes:
        lines.append("  every parameter is the recorded one")
    if answer.parting is None:
        return [*lines, "", f"no decision changes: all {answer.events} events are the recorded ones, at their times"]
    return [*lines, *_parting(answer), *_steps(answer), *_figures(answer), *_rests(answer)]


def _parting(answer: Answer) -> list[str]:
    parting = answer.parting
    assert parting is not None and answer.input is not None
    lines = ["", f"decisions part after {answer.shared - 1} events", f"  {cited_line(answer.input)}"]
    if not parting.decider:
        return [*lines, "    from here on other cells serve: nothing of what was recorded can be followed"]
    return [
        *lines,
        f"    recorded  {_decision(parting.recorded)}",
        f"    now       {_decision(parting.taken)}",
    ]


def _decision(decision: Decision | None) -> str:
    return "nothing more" if decision is None else f"{decision.kind} {decision.entity}"


def _steps(answer: Answer) -> list[str]:
    rows = [("step", "recorded", "what if", "change", "drawn")]
    rows += [
        (str(each.step), _time(each.recorded_s), _time(each.what_if_s), _change(each), str(each.drawn or ""))
        for each in answer.steps
    ]
    lines = ["", "when each step is made", *(f"  {each}" for each in table(rows))]
    if answer.world_pct is not None:
        lines.append(f"  {_world(answer.world_pct)}")
    return lines


def _world(error_pct: float) -> str:
    errs = f"errs by {error_pct:.2g}% at most" if round(error_pct, 2) else "gives every step its recorded time"
    return f"the recorded world by itself, with the recorded parameters from there on, {errs}"


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else f"+{duration(seconds)}"


def _change(step: Step) -> str:
    change = step.change_s
    if change is None or step.recorded_s is None:
        return ""
    sign = "-" if change < 0 else "+"
    return f"{sign}{duration(abs(change))} ({100 * change / step.recorded_s:+.1f}%)" if change else "the same"


def _figures(answer: Answer) -> list[str]:
    rows = [("", "recorded", "what if", "change", "")]
    for name in SHOWN:
        left, right = answer.recorded.figures[name], answer.what_if.figures[name]
        change = "" if left is None or right is None else f"{right - left:+.3g}"
        rows.append((name, _number(left), _number(right), change, FIGURES[name]))
    return ["", "figures", *(f"  {each}" for each in table(rows))]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _rests(answer: Answer) -> list[str]:
    rows = [(_PARTS[each.part], _counts(each)) for each in answer.rests]
    lines = ["", "what it rests on, from there on", *(f"  {each}" for each in table(rows))]
    return [*lines, "", "what the recording can't tell", *(f"  {each}" for each in answer.untold)]


def _counts(rests: Rests) -> str:
    order = [each for each in _HOW if each in rests.counts]
    return ", ".join(f"{rests.counts[each]} {_HOW[each]}" for each in order)
