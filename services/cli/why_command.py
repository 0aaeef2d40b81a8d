"""`gyre replay FILE --why ENTITY`: why a cell was in its role; the life of an execution, a group, a batch, a micro-step."""

from __future__ import annotations

from replay.debugging.citing import Cited
from replay.debugging.life import Life, entity_kind, life
from replay.debugging.moments import Point
from replay.debugging.why_cell import Because, WhyCell, why_cell
from replay.logfile import Log
from replay.timeline.notes import duration
from services.cli.debug_view import check_line
from services.cli.output import say, say_json


def why_command(log: Log, entity: str, at: Point | None, *, json: bool) -> int:
    """0, or raises ConfigError for what the log does not know."""
    found: WhyCell | Life
    if entity_kind(entity) == "cell":
        cell = why_cell(log, entity, at)
        found, lines = cell, _cell_lines(cell)
    else:
        told = life(log, entity, at)
        found, lines = told, _life_lines(told)
    if json:
        say_json(found)
    else:
        for line in lines:
            say(line)
    return 0


def cited_line(cited: Cited) -> str:
    words = f": {cited.note}" if cited.note else ""
    return f"{cited.seq}  +{duration(cited.time_s)}  {cited.kind} {cited.entity}{words}"


def _cell_lines(why: WhyCell) -> list[str]:
    lines = [
        f"{why.cell} at {cited_line(why.at)}",
        f"  role {why.role}, {why.load} executions on it; since +{duration(why.since_s)}",
    ]
    if why.came:
        lines += ["", "how it came there"]
        for each in why.came:
            lines += [f"  {cited_line(each)}", *(f"      {check_line(check)}" for check in each.checks)]
    if why.held:
        lines += ["", "what held it back from training" + ("" if why.role in ("rollout", "away") else " before")]
        for held in why.held:
            lines.append(f"  {cited_line(held.cited)} (for {duration(held.seconds)})")
    if why.now:
        lines += ["", "what keeps it there"]
        for because in why.now:
            lines += _because_lines(because)
    return lines


def _because_lines(because: Because) -> list[str]:
    lines = [f"  {because.text}"]
    lines += [f"      {check_line(check)}" for check in because.checks]
    return [*lines, *(f"      {cited_line(each)}" for each in because.cited)]


def _life_lines(found: Life) -> list[str]:
    lines = [found.entity]
    for chapter in found.chapters:
        lines += ["", chapter.title, *(f"  {text}" for text in chapter.told)]
        for each in chapter.cited:
            lines.append(f"    {cited_line(each)}")
            lines += [f"        {check_line(check)}" for check in each.checks]
    return lines
