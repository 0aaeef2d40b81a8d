"""The loop of a run on a virtual clock: a log, the three real deciders, and the facts of a world that answers them.

    log ──> scheduler, trajectories, packer (services/mesh/decider.Driver) ──> decisions ──┐
     ^└───> world ──> facts, at a time to come ──────────────────────────────────────────┐ │
     └───────────────────────────────────────────────────────────────────────────────────┴─┘

Every event goes through the log: it gets the next sequence and the clock as its stored time, is fed to the deciders in
that order, and what they decide follows in the log with the ids and causation that their shells give it. So a simulated
log is a log: it is written in the same format, and replayed and checked by the same code. What is not modelled is the
time that services take to hear of each other.

In a scenario a decider is not fed kinds that change nothing for it there (`UNHEARD`): that a replay, which feeds everything, takes the same
decisions is the proof that this leaves nothing out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from replay.logfile import Manifest
from replay.logwriter import LogWriter
from replay.simulator.answers import Answers
from replay.simulator.world import Facts
from schemas.config import Config
from schemas.envelope import Decision, Event
from schemas.errors import GyreError
from schemas.ids import decision_id
from services.mesh import codec
from services.mesh.decider import Driver
from services.packer.core.packing import Packer
from services.scheduler.decider import Scheduler
from services.trajectories.core.outcome import Outcome as Outcomes

Watcher = Callable[[Event], None]

UNHEARD: dict[str, frozenset[str]] = {
    "scheduler": frozenset(
        {
            "execution.sealed",
            "execution.tree-frozen",
            "evaluation.requested",
            "evaluation.claimed",
            "evaluation.scored",
            "execution.settled",
            "group.materialized",
            "micro-step.enqueued",
            "checkpoint.saved",
        }
    ),
    "trajectories": frozenset(
        {
            "execution.dispatched",
            "execution.placed",
            "execution.sealed",
            "evaluation.claimed",
            "group.claimed",
            "group.consumed",
            "route.moved",
            "cell.role-transition",
            "micro-step.enqueued",
            "micro-step.claimed",
            "micro-step.done",
            "timer.set",
            "timer.fired",
        }
    ),
    "packer": frozenset(
        {
            "execution.dispatched",
            "execution.placed",
            "execution.started",
            "execution.finished",
            "execution.sealed",
            "execution.tree-frozen",
            "execution.settled",
            "execution.cancelled",
            "evaluation.requested",
            "evaluation.claimed",
            "evaluation.scored",
            "route.moved",
            "cell.role-transition",
            "timer.set",
            "timer.fired",
        }
    ),
}


class Stalled(GyreError):
    """A run that comes to no end."""


class Play:
    """`play` goes on to the end of the run. `events` is the log where `keep` is set; `watchers` see every event."""

    def __init__(
        self,
        config: Config,
        answers: Answers,
        *,
        name: str,
        start_us: int,
        keep: bool = False,
        watchers: Sequence[Watcher] = (),
        unheard: Mapping[str, frozenset[str]] = UNHEARD,
    ) -> None:
        self.name, self.start_us = name, start_us
        self.events: list[Event] = []
        self.count = 0
        self._keep, self._watchers, self._unheard = keep, watchers, unheard
        self._now_us = start_us
        self._queue: deque[Event] = deque()
        self._seq = 0
        self._facts = Facts(config, answers, say=self._say, timers=self._timers)
        self._drivers: list[Driver[Any]] = [Driver(Scheduler()), Driver(Outcomes()), Driver(Packer())]
        self._hearers: dict[tuple[str, str], list[Driver[Any]]] = {}
        """Kind and owner to who is fed with it: asked for once, as there are few of them and many events."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} [{self.count} events, {self.hours:.2f} h]>"

    @property
    def hours(self) -> float:
        """Virtual hours since the start."""
        return (self._now_us - self.start_us) / 3.6e9

    def play(self, *, limit: int = 50_000_000) -> None:
        """Raises Stalled when nothing is left to happen although the run is not over, or after `limit` events."""
        facts, queue = self._facts, self._queue
        while True:
            while queue:
                event = queue.popleft()
                self._take(event)
                if self._over(event):
                    return
            if self.count > limit:
                raise Stalled(f"no end after {limit} events", where=repr(self), remedy="give the run fewer steps")
            due_us = facts.next_us()
            if due_us is None:
                raise Stalled(
                    "nothing is left to happen and the run is not over",
                    where=f"{self!r} {self._drivers[0].state!r}",
                    remedy="its strategy cannot go on with these cells and groups: give it others",
                )
            self._now_us = max(self._now_us, due_us)
            facts.happen(self._now_us)

    def _over(self, event: Event) -> bool:
        return event.kind == "run.finished"

    def write(self, path: Path) -> Manifest:
        """The log as a file, which `gyre check` and `gyre replay` read. Needs `keep`."""
        with LogWriter(path) as writer:
            for event in self.events:
                writer.add(codec.stored(event, run=self.name))
            return writer.finish()

    def _take(self, event: Event) -> None:
        self.count += 1
        if self._keep:
            self.events.append(event)
        hearers = self._hearers.get((event.kind, event.owner))
        if hearers is None:
            hearers = self._hearers[event.kind, event.owner] = self._who_hears(event)
        for driver in hearers:
            decisions = driver.feed(event)
            if decisions:
                self._publish(driver.decider.name, event.seq, decisions)
        for watcher in self._watchers:
            watcher(event)
        self._facts.answer(event)

    def _who_hears(self, event: Event) -> list[Driver[Any]]:
        """What a decider decides itself it has applied already."""
        return [
            driver
            for driver in self._drivers
            if event.kind not in self._unheard.get(driver.decider.name, ()) and driver.is_input(event)
        ]

    def _publish(self, name: str, cause: int, decisions: Sequence[Decision]) -> None:
        for index, decision in enumerate(decisions):
            self._publish_one(name, cause, index, decision)

    def _publish_one(self, name: str, cause: int, index: int, decision: Decision) -> None:
        self._seq += 1
        self._queue.append(
            Event(
                seq=self._seq,
                time_us=self._now_us,
                kind=decision.kind,
                entity=decision.entity,
                owner=name,
                instance=name,
                causation=cause,
                id=decision_id(self.name, name, cause, index),
                data=decision.data,
            )
        )

    def _say(self, owner: str, kind: str, entity: str, data: Any, *, id: str, cause: int, instance: str = "") -> None:
        self._seq += 1
        self._queue.append(
            Event(
                seq=self._seq,
                time_us=self._now_us,
                kind=kind,
                entity=entity,
                owner=owner,
                instance=instance or owner,
                causation=cause,
                id=id,
                data=data,
            )
        )

    def _timers(self, owner: str) -> dict[str, tuple[str, int]]:
        return next(each.decider.timers(each.state) for each in self._drivers if each.decider.name == owner)
