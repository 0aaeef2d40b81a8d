"""`gyre replay FILE --with KEY=VALUE`: a recorded run under other parameters. Exit code 0 whatever comes out.

2: the file is no whole log, or the parameters are none that a recording can be asked about.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from replay.debugging.difference import FIGURES
from replay.logfile import read
from replay.timeline.notes import duration
from replay.whatif.parameters import changed, parse
from replay.whatif.report import Answer, Asked, Rests, Step
from schemas.envelope import Decision
from schemas.errors import ConfigError
from services.cli.output import say, say_json, table
from services.cli.why_command import cited_line

SHOWN = [name for name in FIGURES if name not in ("hours", "reward_last")]
"""A recording may go on after its last step, and what would be learned isn't known."""
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
        said = (
            "gives every step its recorded time"
            if not round(answer.world_pct, 2)
            else f"errs by {answer.world_pct:.2g}% at most"
        )
        lines.append(f"  the recorded world by itself, with the recorded parameters from there on, {said}")
    return lines


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
