"""One parameter of a recorded run over a range: `--sweep rho_min=0.1:0.9:0.1`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from replay.simulator.play import Stalled
from replay.whatif.parameters import changed
from replay.whatif.report import Answer, Asked, error_pct
from schemas.errors import ConfigError, GyreError


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """The run with one value. Figures are None where there is none: the value goes with nothing (`refused` says why)."""

    value: Any
    recorded: bool
    """Whether it is the recorded value, everything else being so too."""
    refused: str = ""
    last_step_h: float | None = None
    """When the last step is made that the recording and this run share, in hours since the first event."""
    change_pct: float | None = None
    """Of that time, against the recording."""
    idle_cell_hours: float | None = None
    staleness_mean: float | None = None
    transitions: float | None = None
    shared: int = 0
    """Events before decisions part."""
    drawn: int = 0
    """Executions of which something was drawn that could have mattered by the last step."""


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    key: str
    was: Any
    """The recorded value."""
    step: int
    """The last step that is compared."""
    recorded: Point
    points: list[Point]
    world_pct: float | None
    """Largest error of the world by itself over the times of steps, from the earliest place where decisions part."""
    untold: list[str]


def sweep(
    asked: Asked,
    key: str,
    values: Sequence[Any],
    *,
    others: Sequence[tuple[str, Any]] = (),
) -> Sweep:
    """`others` are changed in every point. Raises ConfigError or Stalled when no value can be played to the end."""
    answers: list[tuple[Any, Answer | GyreError]] = []
    for value in values:
        try:
            config = changed(asked.config, [*others, (key, value)], option="--sweep")
            answers.append((value, asked.answer(config, world=False)))
        except (ConfigError, Stalled) as error:
            answers.append((value, error))
    played = [each for _, each in answers if isinstance(each, Answer)]
    if not played:
        raise next(each for _, each in answers if not isinstance(each, Answer))
    last = min([max(asked.recorded().steps_s, default=0), *(max(each.what_if.steps_s, default=0) for each in played)])
    parted = [each.parting.seq for each in played if each.parting is not None]
    alone = asked.world(min(parted)) if parted else {}
    section, _, name = key.rpartition(".")
    was = getattr(getattr(asked.config, section) if section else asked.config, name)
    untold = list(dict.fromkeys(line for each in played for line in each.untold if "moves here" not in line))
    return Sweep(
        run=asked.recording.run,
        key=key,
        was=was,
        step=last,
        recorded=_point(was, asked.answer(asked.config, world=False), last),
        points=[
            _point(value, each, last)
            if isinstance(each, Answer)
            else Point(value=value, recorded=False, refused=each.what)
            for value, each in answers
        ],
        world_pct=error_pct(alone, asked.recorded().steps_s) if parted else None,
        untold=untold,
    )


def _point(value: Any, answer: Answer, last: int) -> Point:
    step = next((each for each in answer.steps if each.step == last), None)
    figures = answer.what_if.figures
    at_s, change_s = (step.what_if_s, step.change_s) if step is not None else (None, None)
    return Point(
        value=value,
        recorded=not answer.changes,
        last_step_h=None if at_s is None else at_s / 3600,
        change_pct=None if change_s is None or not step or not step.recorded_s else 100 * change_s / step.recorded_s,
        idle_cell_hours=figures["idle_cell_hours"],
        staleness_mean=figures["staleness_mean"],
        transitions=figures["transitions"],
        shared=answer.shared,
        drawn=step.drawn if step is not None else 0,
    )
