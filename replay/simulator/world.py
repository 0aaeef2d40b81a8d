"""The world of a simulated run: what harness, evaluator, proxy, freezer, engines and trainers would say, and when.

It decides nothing and reads nothing but the log, as services do. How long things take it asks of its answers
(`replay.simulator.answers`): a scenario's, or those of a recorded run. Not modelled: what moving a call to another engine
costs, and every kind of failure but those that an execution ends in.

It can also listen to a recorded run: then it says nothing, and what it hears takes the place of what it would have said. From
`go_on` it speaks, about what was begun and not yet heard of.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

from replay.simulator.answers import Answers, Said
from replay.simulator.durations import Draw
from replay.simulator.pending import Pending
from replay.simulator.progress import Progress
from replay.simulator.training import Say, Training
from schemas import events as e
from schemas.config import Config
from schemas.envelope import Event


class Facts:
    """`answer` hears every event; `next_us` and `happen` are the clock's side."""

    def __init__(
        self, config: Config, answers: Answers, *, say: Say, timers: Callable[[str], dict[str, tuple[str, int]]]
    ) -> None:
        self._answers = answers
        self._say, self._timers = say, timers
        self._progress = Progress(answers.load_effect)
        self._pending = Pending()
        self._training = Training(answers, config.trainer.lr, say=say, tell=self._tell)
        self._listening = False
        self._at_once: dict[Hashable, Callable[[], None]] = {}
        """What would have been said at once, had it not been for listening."""
        self._now_us = 0
        self._placed: dict[str, Event] = {}
        """Execution that has not ended to the event that placed it last."""
        self._started: dict[str, int] = {}
        """Execution that runs to the time of its start."""
        self._cancelled: set[str] = set()
        """Surplus executions without an outcome."""
        self._ended: set[str] = set()
        """Executions that said their end and are without an outcome."""
        self._engines: dict[str, int] = {}
        """Every engine that has come up to its capacity."""
        self._serving: dict[str, int] = {}
        """Engine that serves to its capacity."""
        self._asked: dict[str, e.EvaluationRequested] = {}
        self._has: dict[str, int] = {}
        """Engine to the version that was published to it last."""
        self._others = 0
        self.lost: set[str] = set()
        """Cells that have not come back."""
        self._on: dict[str, Callable[[Event, Any], None]] = {
            **self._training.on,
            "execution.placed": self._execution_placed,
            "execution.started": self._execution_started,
            "execution.finished": self._execution_finished,
            "execution.lost": self._execution_lost,
            "execution.cancelled": self._execution_cancelled,
            "execution.settled": self._execution_settled,
            "execution.sealed": self._execution_sealed,
            "evaluation.requested": self._evaluation_requested,
            "evaluation.claimed": self._evaluation_claimed,
            "cell.joined": self._cell_joined,
            "cell.lost": self._cell_lost,
            "cell.role-transition": self._role_transition,
            "weights.exposed": self._weights_exposed,
            "weights.published": self._weights_published,
            "timer.set": self._timer_set,
        }

    def __repr__(self) -> str:
        return f"<Facts [{len(self._pending)} to come, {self._progress!r}]>"

    def begin(self, now_us: int) -> None:
        """Engines come up."""
        self._now_us = now_us
        for name, (after_us, joined) in self._answers.joins():
            self._tell(after_us, ("cell.joined", name), partial(self._join, name, joined))

    def listen(self) -> None:
        """What `answer` hears is recorded, from the beginning until `go_on`."""
        self._listening = self._training.held = True

    def go_on(self, now_us: int) -> None:
        """From here on nothing is recorded any more."""
        self._now_us = now_us
        self._listening = self._training.held = False
        self._training.claim()
        for what in self._at_once.values():
            what()
        self._at_once.clear()

    def heard(self, event: Event) -> None:
        """It was said by the recording: nobody else says it."""
        key = key_of(event)
        self._pending.drop(key)
        self._at_once.pop(key, None)

    def answer(self, event: Event) -> None:
        self._now_us = event.time_us
        handler = self._on.get(event.kind)
        if handler is not None:
            handler(event, event.data)

    def say_at(self, due_us: int, what: Callable[[], None]) -> None:
        """Something that no rule of the world brings about."""
        self._others += 1
        self._pending.add(due_us, self._others, what)

    def next_us(self) -> int | None:
        """When the next thing happens."""
        ends, others = self._progress.next_us(), self._pending.next_us()
        if others is None:
            return ends
        return others if ends is None else min(ends, others)

    def happen(self, now_us: int) -> None:
        """The one next thing, now."""
        self._now_us = now_us
        ends, others = self._progress.next_us(), self._pending.next_us()
        if ends is not None and (others is None or ends <= others):
            self._finish(*self._progress.end(now_us))
        else:
            self._pending.take()()

    def _tell(self, after_us: int, key: Hashable, what: Callable[[], None]) -> None:
        if after_us <= 0 and self._listening:
            self._at_once[key] = what
        elif after_us <= 0:
            what()
        else:
            self._pending.add(self._now_us + after_us, key, what)

    def _fact(self, owner: str, kind: str, entity: str, said: Said, event: Event, verb: str) -> None:
        self._tell(
            said.after_us,
            (kind, entity),
            lambda: self._say(owner, kind, entity, said.data, id=f"{event.id}.{verb}", cause=event.seq),
        )

    # --- executions and their evaluations

    def _execution_placed(self, event: Event, data: e.ExecutionPlaced) -> None:
        if event.entity in self._cancelled:
            return
        self._placed[event.entity] = event
        self._fact("harness", "execution.started", event.entity, self._answers.started(event), event, "started")

    def _execution_started(self, event: Event, data: e.ExecutionStarted) -> None:
        if event.entity in self._placed:
            self._started[event.entity] = event.time_us
            self._progress.start(event.time_us, event.entity, self._answers.run(event.entity, data.attempt))

    def _finish(self, execution: str, draw: Draw) -> None:
        placed = self._placed[execution]
        data = self._answers.finished(execution, placed.data.attempt, draw)
        self._started.pop(execution)
        self._say("harness", "execution.finished", execution, data, id=f"{placed.id}.finished", cause=placed.seq)

    def _stop(self, name: str, now_us: int) -> float:
        """It runs no more; seconds for which it did."""
        since_us = self._started.pop(name, None)
        self._pending.drop(("execution.started", name))
        self._at_once.pop(("execution.started", name), None)
        if since_us is None:
            return 0.0
        self._progress.drop(now_us, name)
        return (now_us - since_us) / 1e6

    def _execution_cancelled(self, event: Event, data: e.ExecutionCancelled) -> None:
        """It stops at once, if it has not ended while that was on its way."""
        name = event.entity
        if name in self._ended:
            return
        self._cancelled.add(name)
        placed = self._placed.pop(name, None)
        finished = e.ExecutionFinished(
            attempt=placed.data.attempt if placed is not None else 0,
            reason=data.reason,
            exit_code=None,
            seconds=self._stop(name, event.time_us),
            workspace="",
            workspace_digest="",
        )
        self._fact("harness", "execution.finished", name, Said(0, finished), event, "finished")

    def _execution_settled(self, event: Event, data: e.ExecutionSettled) -> None:
        self._cancelled.discard(event.entity)
        self._ended.discard(event.entity)

    def _execution_lost(self, event: Event, data: e.ExecutionLost) -> None:
        self._placed.pop(event.entity, None)
        self._stop(event.entity, event.time_us)

    def _execution_finished(self, event: Event, data: e.ExecutionFinished) -> None:
        self._ended.add(event.entity)
        self._placed.pop(event.entity, None)
        self._stop(event.entity, event.time_us)
        self._fact("proxy", "execution.sealed", event.entity, self._answers.sealed(event), event, "sealed")

    def _execution_sealed(self, event: Event, data: e.ExecutionSealed) -> None:
        self._fact("trajectories", "execution.tree-frozen", event.entity, self._answers.frozen(event), event, "frozen")

    def _evaluation_requested(self, event: Event, data: e.EvaluationRequested) -> None:
        self._asked[event.entity] = data
        said = self._answers.evaluation_claimed(event)
        self._fact("evaluator", "evaluation.claimed", event.entity, said, event, "claimed")

    def _evaluation_claimed(self, event: Event, data: e.EvaluationClaimed) -> None:
        asked = self._asked.get(event.entity)
        if asked is not None:
            said = self._answers.evaluated(event.entity, asked)
            verb = "scored" if isinstance(said.data, e.EvaluationScored) else "failed"
            self._fact("evaluator", f"evaluation.{verb}", event.entity, said, event, verb)

    # --- cells

    def _join(self, name: str, joined: e.CellJoined) -> None:
        self._say("rollout", "cell.joined", name, joined, id=f"{name}.joined", cause=0, instance=f"rollout-{name}")

    def _cell_joined(self, event: Event, data: e.CellJoined) -> None:
        self.lost.discard(event.entity)
        self._engines[event.entity] = data.capacity
        self._serve(event.entity, data.capacity)

    def _cell_lost(self, event: Event, data: e.CellLost) -> None:
        self.lost.add(event.entity)
        self._serve(event.entity, 0)
        self._training.leave(event.entity)

    def _serve(self, name: str, capacity: int) -> None:
        """`capacity` 0: it serves no more."""
        if capacity:
            self._serving[name] = capacity
        else:
            self._serving.pop(name, None)
        self._progress.serve(self._now_us, sum(self._serving.values()))

    def _role_transition(self, event: Event, data: e.CellRoleTransition) -> None:
        name = event.entity
        match (data.target, data.phase):
            case ("train", "decided"):
                self._serve(name, 0)
                self._phase(event, "rollout", "draining")
            case ("train", "draining"):
                self._phase(event, "rollout", "drained")
            case ("train", "drained"):
                self._phase(event, "rollout", "released")
            case ("train", "released"):
                self._phase(event, "trainer", "acquired")
            case ("train", "completed"):
                self._training.enter(name, data.epoch)
            case ("rollout", "decided"):
                self._training.leave(name)
                self._phase(event, "trainer", "released")
            case ("rollout", "released"):
                self._phase(event, "rollout", "acquired")
            case ("rollout", "completed"):
                self._serve(name, self._engines[name])

    def _phase(self, event: Event, owner: str, phase: Any) -> None:
        data: e.CellRoleTransition = event.data
        publication_us = max(0, self._training.publication_us - self._now_us)
        after_us, seconds = self._answers.phase(event, phase, publication_us)

        def say() -> None:
            said = e.CellRoleTransition(
                phase=phase,
                source=data.source,
                target=data.target,
                epoch=data.epoch,
                seconds=seconds,
                version=self._training.version if (data.target, phase) == ("rollout", "acquired") else -1,
            )
            name = event.entity
            self._say(
                owner,
                "cell.role-transition",
                name,
                said,
                id=f"{event.id}.{phase}",
                cause=event.seq,
                instance=f"{owner}-{name}",
            )

        self._tell(after_us, ("cell.role-transition", event.entity, data.epoch, phase), say)

    # --- weights and timers

    def _weights_exposed(self, event: Event, data: e.WeightsExposed) -> None:
        self._training.exposed(event, data)
        if data.purpose != "publish":
            return
        for after_us, engines, published in self._answers.published(data.version):

            def publish(engines: frozenset[str] | None = engines, published: e.WeightsPublished = published) -> None:
                for name in self._serving:
                    if self._has.get(name) == published.version or not (engines is None or name in engines):
                        continue
                    self._say(
                        "rollout",
                        "weights.published",
                        name,
                        published,
                        id=f"{event.id}.published.{name}",
                        cause=event.seq,
                        instance=f"rollout-{name}",
                    )

            self._tell(after_us, ("weights.published", data.version, engines), publish)

    def _weights_published(self, event: Event, data: e.WeightsPublished) -> None:
        self._has[event.entity] = data.version

    def _timer_set(self, event: Event, data: e.TimerSet) -> None:
        def fire() -> None:
            # One that its decider no longer wants is not fired, as in its shell.
            if event.entity in self._timers(event.owner):
                fired = e.TimerFired(purpose=data.purpose)
                self._say(event.owner, "timer.fired", event.entity, fired, id=f"{event.entity}.fired", cause=0)

        due_us = max(self._now_us, data.due_us) + self._answers.late(event.entity)
        self._pending.add(due_us, ("timer.fired", event.entity), fire)


def key_of(event: Event) -> Hashable:
    """Of the fact that waits until this is heard."""
    data = event.data
    match event.kind:
        case "cell.role-transition":
            return event.kind, event.entity, data.epoch, data.phase
        case "weights.exposed":
            return event.kind, data.version, data.purpose
        case _:
            return event.kind, event.entity
