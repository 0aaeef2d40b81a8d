"""A recorded run under another configuration: the recording, up to where decisions part, and from there the recorded world.

    recorded inputs ──> the three deciders, configured otherwise ──> decisions, the same as recorded: the next input
                                                                └──> another one: from here the world answers

Up to the parting every fact is the recorded one, at its stored time. What has begun by then and isn't over ends when it did in
the recording; what begins later takes as long as there (`replay.whatif.answers`). So what comes out is a log like any other: it
holds the laws, and replays.

Decisions are the same when they say the same but for the numbers of the checks behind them; `cell.held`, which tells why
nothing is decided, parts nothing. Where the cells themselves are configured otherwise, nothing of the recording can be
followed: the world answers from the first event on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import Any

import msgspec

from replay.logfile import BadLogFile
from replay.simulator.play import Play, Watcher
from replay.whatif.answers import Recorded
from replay.whatif.recording import Recording
from schemas.config import Config
from schemas.envelope import Decision, Event
from schemas.ids import decision_id
from schemas.kinds import is_decision
from schemas.units import Check
from services.mesh.decider import Driver
from services.mesh.shell import as_decision

_HELD = "cell.held"
_SEQUENCES = ("process", "as_of", "log_sequence")
"""Fields that hold the sequence of another event."""


class Parting(msgspec.Struct, frozen=True, kw_only=True):
    """Where the world takes over."""

    seq: int
    """Of the input on which decisions part, in the recording."""
    time_s: float
    """Since the first event."""
    decider: str
    """Empty where it was not a decision: the world answers from the beginning, or from a place that was asked for."""
    recorded: Decision | None
    """The first that isn't taken any more; None where one is taken that was not."""
    taken: Decision | None


class Continuation(Play):
    """`run` gives the place of the parting, or None when there is none; `events` is the log that comes out."""

    def __init__(self, recording: Recording, config: Config, *, watchers: tuple[Watcher, ...] = ()) -> None:
        self.recording, self.config = recording, config
        self.answers = Recorded(recording, config)
        super().__init__(
            config,
            self.answers,
            name=recording.run,
            start_us=recording.start_us,
            keep=True,
            watchers=watchers,
            unheard={},
        )
        self.parting: Parting | None = None
        self.shared = 0
        """Events before the world took over."""
        self._by_name: dict[str, Driver[Any]] = {each.decider.name: each for each in self._drivers}
        self._outstanding: dict[str, deque[tuple[int, int, Decision]]] = {name: deque() for name in self._by_name}
        """Decisions that are taken and not in the log yet: the input's sequence here, their number, what they say."""
        self._stored_us: dict[str, int] = {}
        """Decider to when the last of its decisions is in the log."""
        self._here: dict[int, int] = {}
        """Sequence in the recording to the sequence here."""

    def run(self, log: Iterable[Event], *, from_seq: int = 0) -> Parting | None:
        """`from_seq`: the world takes over there at the latest."""
        self._facts.listen()
        self._facts.begin(self.start_us)
        cells = self.recording.began.config.cells
        if self.config.cells != cells and not from_seq:
            from_seq = 1
        for event in log:
            self._seq = self._seq or event.seq - 1
            if event.owner in self._by_name and is_decision(event.kind, event.owner):
                self._recorded_decision(event)
            else:
                self._fact(event, last=0 < from_seq <= event.seq)
            if self.parting is not None:
                self.play()
                break
        else:
            self.shared = self.count
        return self.parting

    def _over(self, event: Event) -> bool:
        if event.kind == "run.finished":
            return True
        return (
            not self.recording.finished
            and event.kind == "batch.stepped"
            and event.data.step >= self.recording.step_count
        )

    # --- the recording, as long as it is followed

    def _fact(self, event: Event, *, last: bool) -> None:
        data = self._translated(event.data)
        if event.kind == "run.started":
            data = msgspec.structs.replace(data, config=self.config)
        here = self._enter(event, data, cause=self._here.get(event.causation, 0), id=event.id)
        for driver in [each for each in self._drivers if each.is_input(here)]:
            name = driver.decider.name
            decisions = driver.feed(here)
            self._outstanding[name].extend((here.seq, index, each) for index, each in enumerate(decisions))
            recorded = [as_decision(each) for each in self.recording.decisions.get((name, event.seq), ())]
            if self.parting is None and (decisions or recorded):
                self._compare(event, name, recorded, decisions)
        if self.parting is None and last:
            self.parting = self._part(event, "", None, None)
        self._see(event, here)

    def _compare(self, event: Event, name: str, recorded: list[Decision], taken: list[Decision]) -> None:
        ours = [each for each in taken if each.kind != _HELD]
        theirs = [each for each in recorded if each.kind != _HELD]
        for index in range(max(len(ours), len(theirs))):
            was = theirs[index] if index < len(theirs) else None
            now = ours[index] if index < len(ours) else None
            if was is None and event.seq >= self.recording.answered.get(name, 0):
                # The log ends before the answers.
                return
            if was is None or now is None or _substance(now) != _substance(self._translated_decision(was)):
                self.parting = self._part(event, name, was, now)
                return

    def _part(self, event: Event, name: str, was: Decision | None, now: Decision | None) -> Parting:
        time_s = (event.time_us - self.start_us) / 1e6
        return Parting(seq=event.seq, time_s=time_s, decider=name, recorded=was, taken=now)

    def _recorded_decision(self, event: Event) -> None:
        """Ours takes its place in the log, and those that say why nothing is decided go with it."""
        waiting = self._outstanding[event.owner]
        if event.kind == _HELD:
            if waiting and waiting[0][2].kind == _HELD:
                self._say_decision(event, waiting.popleft())
            return
        while waiting and waiting[0][2].kind == _HELD:
            self._say_decision(event, waiting.popleft(), follows=False)
        if not waiting:
            raise BadLogFile(
                f"{event.kind} of {event.entity} was decided at sequence {event.seq}, and this code doesn't decide it",
                where=self.recording.run,
                remedy="see where they differ with `gyre replay FILE`: what if needs a log that replays",
            )
        self._say_decision(event, waiting.popleft())

    def _say_decision(self, event: Event, found: tuple[int, int, Decision], *, follows: bool = True) -> None:
        cause, index, decision = found
        name = event.owner
        as_ours = msgspec.structs.replace(
            event, kind=decision.kind, entity=decision.entity, seq=event.seq if follows else -1
        )
        here = self._enter(as_ours, decision.data, cause=cause, id=decision_id(self.name, name, cause, index))
        for driver in [each for each in self._drivers if each.is_input(here)]:
            other = driver.decider.name
            decisions = driver.feed(here)
            self._outstanding[other].extend((here.seq, number, each) for number, each in enumerate(decisions))
            recorded = (
                [as_decision(each) for each in self.recording.decisions.get((other, event.seq), ())] if follows else []
            )
            if self.parting is None and (decisions or recorded):
                self._compare(event, other, recorded, decisions)
        self._see(event, here)

    def _enter(self, event: Event, data: Any, *, cause: int, id: str) -> Event:
        self._seq += 1
        if event.seq > 0:
            self._here[event.seq] = self._seq
        self._now_us = max(self._now_us, event.time_us)
        self.count += 1
        here = msgspec.structs.replace(event, seq=self._seq, causation=cause, id=id, data=data)
        self.events.append(here)
        return here

    def _see(self, event: Event, here: Event) -> None:
        for watcher in self._watchers:
            watcher(here)
        self._facts.heard(here)
        if self.parting is not None:
            self._take_over(event)
        self._facts.answer(here)

    def _translated(self, data: Any) -> Any:
        changed = {}
        for name in _SEQUENCES:
            seq = getattr(data, name, 0)
            if seq and self._here.get(seq, seq) != seq:
                changed[name] = self._here[seq]
        return msgspec.structs.replace(data, **changed) if changed else data

    def _translated_decision(self, decision: Decision) -> Decision:
        return msgspec.structs.replace(decision, data=self._translated(decision.data))

    # --- from where they part

    def _take_over(self, event: Event) -> None:
        """The world goes on, and everything that is decided gets into the log."""
        self.shared = self.count
        joined = {each.entity for each in self.events if each.kind == "service.joined"}
        for outside in self.recording.outside:
            if outside.seq <= event.seq or (outside.kind == "service.joined" and outside.entity in joined):
                continue
            if outside.kind == "cell.joined":
                if outside.entity not in self._facts.lost:
                    continue
                self._facts.lost.discard(outside.entity)
            self._facts.say_at(outside.time_us, partial(self._again, outside))
        self._facts.go_on(self._now_us)
        for name, waiting in self._outstanding.items():
            for cause, index, decision in waiting:
                self._publish_one(name, cause, index, decision)
            waiting.clear()

    def _again(self, outside: Event) -> None:
        """What nothing in the log causes is said as it was."""
        self._say(
            outside.owner,
            outside.kind,
            outside.entity,
            self._translated(outside.data),
            id=outside.id,
            cause=0,
            instance=outside.instance,
        )

    def _publish_one(self, name: str, cause: int, index: int, decision: Decision) -> None:
        """In the log once the decider's decisions before it are, and as much later as such decisions were recorded to be."""
        due_us = max(self._now_us, self._stored_us.get(name, 0)) + self.answers.gaps.get((name, decision.kind), 0)
        self._stored_us[name] = due_us
        if due_us <= self._now_us:
            super()._publish_one(name, cause, index, decision)
        else:
            self._facts.say_at(due_us, lambda: super(Continuation, self)._publish_one(name, cause, index, decision))


def _substance(decision: Decision) -> tuple[str, str, Any]:
    """What a decision says, without the checks behind it."""
    data = decision.data
    bare: dict[str, Any] = {
        name: []
        for name in data.__struct_fields__
        if isinstance(value := getattr(data, name), list) and value and isinstance(value[0], Check)
    }
    return decision.kind, decision.entity, msgspec.structs.replace(data, **bare) if bare else data
