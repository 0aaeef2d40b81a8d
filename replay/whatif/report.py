"""What becomes of a recorded run under other parameters, and what that rests on.

    >>> asked = Asked(log)
    >>> answer = asked.answer(changed(asked.config, [("scheduler.rho_min", 0.3)]))
    >>> [(each.step, each.change_s) for each in answer.steps]

`Step.drawn` counts the executions of which something was drawn that could have mattered by then; where it is 0 everything that
the step waited for is in the recording. The world by itself (`answer.world_pct`) is measured beside it: played with the
recorded parameters from the same place on, it should give the recorded times again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from replay.debugging.citing import Cited, cite
from replay.debugging.difference import Side, account
from replay.logfile import BadLogFile, Log
from replay.whatif.continuation import Continuation, Parting
from replay.whatif.parameters import Change, differences
from replay.whatif.recording import Recording
from schemas.config import Config
from schemas.envelope import Event


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """When a training step was made, in seconds since the first event; None where one of both doesn't make it."""

    step: int
    recorded_s: float | None
    what_if_s: float | None
    world_s: float | None = None
    """When the world by itself makes it: with the recorded parameters, from where decisions part. None when it wasn't asked."""
    drawn: int
    """Executions of which something was drawn that could have mattered by then."""

    @property
    def change_s(self) -> float | None:
        return None if self.recorded_s is None or self.what_if_s is None else self.what_if_s - self.recorded_s


class Rests(msgspec.Struct, frozen=True, kw_only=True):
    """Part of the world after the parting: how many of it were answered in which way."""

    part: str
    counts: dict[str, int]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    changes: list[Change]
    parting: Parting | None
    """None: every decision is the recorded one, and so is every event."""
    input: Cited | None
    """On which decisions part."""
    events: int
    shared: int
    """Of the recording's, before they part."""
    recorded: Side
    what_if: Side
    steps: list[Step]
    rests: list[Rests]
    world_pct: float | None
    """Largest error of the world by itself over the times of steps; None when it wasn't asked."""
    untold: list[str]
    """What the recording can't tell."""


class Asked:
    """A recorded run, to be asked any number of times. Whatever is asked raises BadLogFile when the log can't be used."""

    def __init__(self, log: Iterable[Event]) -> None:
        self._log = log
        where = str(log.path) if isinstance(log, Log) else ""
        self.recording = Recording(log, where=where)
        self.config = self.recording.began.config
        self._side: Side | None = None
        self._worlds: dict[int, dict[int, float]] = {}

    def __repr__(self) -> str:
        return f"<Asked {self.recording!r}>"

    def play(self, config: Config, *, from_seq: int = 0) -> Continuation:
        """The whole log that comes out, in `events`. `from_seq`: the world takes over there at the latest."""
        continuation = Continuation(self.recording, config)
        continuation.run(self._log, from_seq=from_seq)
        return continuation

    def recorded(self) -> Side:
        if self._side is None:
            self._side = account(self._log)
        return self._side

    def world(self, seq: int) -> dict[int, float]:
        """When the world by itself makes each step, from this place on with the recorded parameters, in seconds."""
        if seq not in self._worlds:
            found = self.play(self.config, from_seq=seq)
            self._refuse(found)
            self._worlds[seq] = account(found.events).steps_s
        return self._worlds[seq]

    def _refuse(self, found: Continuation) -> None:
        """Raises BadLogFile where the recorded parameters don't lead to the recorded decisions."""
        parting = found.parting
        if parting is not None and parting.decider:
            raise BadLogFile(
                f"with its own parameters {parting.decider} decides otherwise on sequence {parting.seq} than was recorded",
                where=self.recording.run,
                remedy="see what differs with `gyre replay FILE`: only a log that replays can be asked",
            )

    def answer(self, config: Config, *, world: bool = True) -> Answer:
        """`world`: whether the world by itself is measured, which takes as long again."""
        found = self.play(config)
        recording, parting = self.recording, found.parting
        if config == self.config:
            self._refuse(found)
        recorded = self.recorded()
        what_if = recorded if parting is None else account(found.events)
        alone = self.world(parting.seq) if parting is not None and world else None
        return Answer(
            run=recording.run,
            changes=differences(self.config, config),
            parting=parting,
            input=_cited(found, parting),
            events=recording.messages,
            shared=found.shared,
            recorded=recorded,
            what_if=what_if,
            steps=_steps(found, recorded, what_if, alone),
            rests=_rests(found) if parting is not None else [],
            world_pct=error_pct(alone, recorded.steps_s) if alone is not None else None,
            untold=_untold(self, found, recorded, what_if) if parting is not None else [],
        )


def _cited(found: Continuation, parting: Parting | None) -> Cited | None:
    return (
        None
        if parting is None
        else cite(msgspec.structs.replace(found.events[found.shared - 1], seq=parting.seq), found.start_us)
    )


def _steps(found: Continuation, recorded: Side, what_if: Side, alone: dict[int, float] | None) -> list[Step]:
    times = sorted(_drawn_us(found))
    steps = []
    for step in sorted({*recorded.steps_s, *what_if.steps_s}):
        at_s = what_if.steps_s.get(step)
        drawn = sum(each <= found.start_us + at_s * 1e6 for each in times) if at_s is not None else 0
        steps.append(
            Step(
                step=step,
                recorded_s=recorded.steps_s.get(step),
                what_if_s=at_s,
                world_s=alone.get(step) if alone is not None else None,
                drawn=drawn,
            )
        )
    return steps


def error_pct(found: dict[int, float], recorded: dict[int, float]) -> float:
    """Largest, in percent of the recorded times."""
    return max((100 * abs(found[step] / at_s - 1) for step, at_s in recorded.items() if step in found), default=0.0)


def _drawn_us(found: Continuation) -> list[int]:
    """When something drawn began to matter: an execution that isn't recorded was started, or one that was cut off in the
    recording ran longer than it was seen to."""
    times = []
    started: dict[str, tuple[int, int]] = {}
    for event in found.events[found.shared :] if found.parting is not None else []:
        if event.kind == "execution.started":
            started[event.entity] = event.time_us, event.data.attempt
    ended = {event.entity: event.time_us for event in found.events if event.kind == "execution.finished"}
    for event in found.events[: found.shared]:
        if event.kind == "execution.started" and event.entity not in ended:
            started[event.entity] = event.time_us, event.data.attempt
    for execution, how in found.answers.told.get("executions", {}).items():
        if how == "recorded" or execution not in started:
            continue
        start_us, attempt = started[execution]
        life = found.recording.lives.get((execution, attempt))
        begins_us = start_us + (life.ran_us if life is not None and how == "prolonged" else 0)
        if ended.get(execution, found.events[-1].time_us) > begins_us or how == "drawn":
            times.append(begins_us)
    return times


def _rests(found: Continuation) -> list[Rests]:
    after = {event.entity for event in found.events[found.shared :]}
    rests = []
    for part, told in found.answers.told.items():
        names = {each: how for each, how in told.items() if not isinstance(each, str) or each in after}
        if part == "executions":
            names = {each: how for each, how in told.items() if each in after}
        counts = Counter(names.values())
        if counts:
            rests.append(Rests(part=part, counts=dict(sorted(counts.items()))))
    return rests


def _untold(asked: Asked, found: Continuation, recorded: Side, what_if: Side) -> list[str]:
    config, was = found.config, asked.config
    told = [
        "how engines slow each other down: an execution lasts as long as it did, whatever load it meets now",
        f"what moving a call costs: {what_if.figures['routes_moved']} moves here, {recorded.figures['routes_moved']} there, "
        "and each execution's own are in its duration",
        "what is learned: scores and lengths are those of the recorded policy",
    ]
    strategies = {was.scheduler.strategy, config.scheduler.strategy}
    if len(strategies) > 1 and "async" in strategies:
        told.append(
            "whether a micro-step costs the same in cells that do not change their role: it takes the time that it took"
        )
    if was.scheduler.streaming != config.scheduler.streaming:
        told.append("whether a batch that is not streamed costs more: updates take the time that they took")
    after = found.parting.seq if found.parting is not None else 0
    missed = Counter(kind for seq, kind in found.recording.failures if seq > after)
    if missed:
        said = ", ".join(f"{count} {kind}" for kind, count in sorted(missed.items()))
        told.append(f"failures: the recording has {said} after the parting, and none happens here")
    else:
        told.append("failures: the recording has none after the parting, and none happens here")
    return told
