"""`gyre replay FILE --at`, `--until`, `--step`: the scheduler's state at a place of a recorded run.

Exit code 0; 1 when a condition never came to hold; 2 for a place or a condition that cannot be.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from replay.debugging.breakpoints import Condition
from replay.debugging.fields import values
from replay.debugging.moments import Moment, Point, Walk, check_inside, point
from replay.logfile import Log, read
from replay.timeline.notes import note, reasons
from schemas.envelope import Event
from schemas.errors import ConfigError
from services.cli.debug_view import Steps, event_line, say_state
from services.cli.output import say, say_json, say_json_line


def refuse_deciding(follow: str, deciders: Sequence[str]) -> None:
    """Raises ConfigError where something is asked for that belongs to deciding again."""
    if follow or deciders:
        raise ConfigError(
            f"{'--follow' if follow else '--decider'} decides again, and debugging doesn't", remedy="leave it out"
        )


def debug_command(paths: Sequence[Path], *, at: str, until: str, step: bool, why: str, json: bool) -> int:
    """Raises ConfigError unless one file is named, and one question."""
    if len(paths) != 1 or paths[0].is_dir():
        raise ConfigError("debugging looks at one log", remedy="name one file that `gyre export` wrote")
    if why and (until or step):
        raise ConfigError("--why asks something else than --until and --step", remedy="leave one of them out")
    log = read(paths[0])
    if why:
        from services.cli.why_command import why_command

        return why_command(log, why, place_of(log, at), json=json)
    if step:
        return step_command(log, at=at, until=until, json=json)
    return state_command(log, at=at, until=until, json=json)


def place_of(log: Log, at: str) -> Point | None:
    """Raises ConfigError for what is no place, or outside of the log."""
    if not at:
        return None
    place = point(at)
    check_inside(log, place)
    return place


def state_command(log: Log, *, at: str, until: str, json: bool) -> int:
    """Shows the state at a place, or where a condition begins to hold, from that place on."""
    place, condition = place_of(log, at), Condition(until) if until else None
    walk = Walk(log)
    moment = walk.to(place) if place is not None else walk.step()
    if moment is None:
        raise ConfigError("the log holds no event", where=str(log.path), remedy="export a run that has begun")
    told: dict[str, Any] = {}
    if condition is not None:
        moment = _hits(walk, moment, condition, started=place is not None)
        if moment is None:
            return _never(condition, json=json)
        told = condition.told(moment)
    shown = _shown(moment, told)
    decided = _decided(walk, moment)
    if json:
        say_json({**shown, "decided": [_named(each, moment) for each in decided]})
    else:
        say_state(moment, shown, decided, told)
    return 0


def step_command(log: Log, *, at: str, until: str, json: bool) -> int:
    """Decision by decision. In a terminal a key goes on; in a pipe all are printed."""
    place, condition = place_of(log, at), Condition(until) if until else None
    walk = Walk(log)
    moment = walk.to(place) if place is not None else None
    held = condition is not None and moment is not None and condition(moment)
    asks = not json and sys.stdin.isatty() and sys.stdout.isatty()
    with _by_key() if asks else contextlib.nullcontext():
        return _step(walk, condition, held=held, asks=asks, json=json)


def _step(walk: Walk, condition: Condition | None, *, held: bool, asks: bool, json: bool) -> int:
    steps = Steps()
    for moment in walk:
        holds = condition is not None and condition(moment)
        if moment.cause is not None:
            if json:
                say_json_line(_as_step(moment))
            else:
                steps.say(moment)
            if asks and not _goes_on(moment):
                return 0
        if condition is not None and holds and not held:
            if not json:
                say(f"{event_line(moment.event, moment.start_us)}\n  here begins: {condition.text}")
            return 0
        held = holds
    return _never(condition, json=json) if condition is not None else 0


def _hits(walk: Walk, moment: Moment, condition: Condition, *, started: bool) -> Moment | None:
    """Where it begins to hold. At a place that was named it may hold already; at the log's very first event it may not,
    because everything is zero there."""
    held = condition(moment)
    if held and started:
        return moment
    for following in walk:
        holds = condition(following)
        if holds and not held:
            return following
        held = holds
    return None


def _never(condition: Condition, *, json: bool) -> int:
    if json:
        say_json_line({"found": False, "condition": condition.text})
    else:
        say(f"from there to the end of the log there is no event with which this begins to hold: {condition.text}")
    return 1


def _shown(moment: Moment, told: dict[str, Any]) -> dict[str, Any]:
    state = msgspec.Raw(msgspec.json.encode(moment.state, order="deterministic"))
    found: dict[str, Any] = {
        "found": True,
        "event": moment.event,
        "cause": moment.cause.seq if moment.cause is not None else moment.event.causation,
        "fields": values(moment),
    }
    if told:
        found["condition"] = told
    # Encoded now: the state goes on with the walk.
    return {**found, "state": state}


def _decided(walk: Walk, moment: Moment) -> list[Event]:
    """What was decided on the input in hand after this moment."""
    seq, found = (moment.cause or moment.event).seq, []
    while (ahead := walk.ahead) is not None and (cause := walk.answers) is not None and cause.seq == seq:
        found.append(ahead)
        walk.step()
    return found


def _named(event: Event, moment: Moment) -> dict[str, Any]:
    return {
        "seq": event.seq,
        "time_s": (event.time_us - moment.start_us) / 1e6,
        "kind": event.kind,
        "entity": event.entity,
        "note": note(event),
        "checks": reasons(event),
    }


def _as_step(moment: Moment) -> dict[str, Any]:
    assert moment.cause is not None
    return {
        **_named(moment.event, moment),
        "input": _named(moment.cause, moment),
        "fields": values(moment),
    }


def _goes_on(moment: Moment) -> bool:
    """A key: `q` ends, `s` shows the state and asks again, any other goes on."""
    while key := os.read(sys.stdin.fileno(), 1):
        if key != b"s":
            return key not in (b"q", b"\x04")
        say_state(moment, {"fields": values(moment)}, [], {})
    return False


@contextlib.contextmanager
def _by_key() -> Iterator[None]:
    """The terminal gives keys at once, without a line's end."""
    import termios
    import tty

    stream = sys.stdin.fileno()
    before = termios.tcgetattr(stream)
    tty.setcbreak(stream, termios.TCSADRAIN)
    try:
        yield
    finally:
        termios.tcsetattr(stream, termios.TCSADRAIN, before)
