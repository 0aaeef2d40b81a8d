"""What a recorded run tells of its world: how long everything took, by the id of what took it.

One pass over the log. A duration is the time between two stored events: of an attempt from its start to its end, of a
micro-step from its claim to its gradient, of a phase since the phase before. What was cut off (by a cancellation, a loss, the
end of the log) is kept as far as it was seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from replay.logfile import BadLogFile
from replay.simulator.answers import Said
from replay.whatif.returns import Return, waits_of
from schemas import events as e
from schemas.envelope import Event
from schemas.ids import cell_id
from schemas.kinds import is_decision

FAILURES = (
    "execution.lost",
    "cell.lost",
    "checkpoint.restored",
    "batch.failed",
    "micro-step.released",
    "run.continued",
)
"""Kinds that tell of a failure, or of a restart."""
OUTSIDE = ("run.paused", "run.resumed", "run.config-changed", "cell.withdrawn", "cell.reinstated", "cell.added")
"""Kinds that an operator says."""


class Life(msgspec.Struct, kw_only=True):
    """One attempt of an execution, as far as it was recorded."""

    execution: str
    attempt: int
    placed_us: int
    start_us: int = -1
    """Microseconds from its placement to its start; -1 when it wasn't started."""
    ran_us: int = 0
    """From its start to its end, or as far as it was seen."""
    finished: e.ExecutionFinished | None = None
    """How it ended by itself; None when it was cut off."""
    sealed: Said | None = None
    frozen: Said | None = None
    claims: list[int] = []
    """Microseconds until each evaluation was claimed."""
    verdicts: list[Said] = []
    """Score or failure of each evaluation."""

    @property
    def whole(self) -> bool:
        """Whether everything about it is known."""
        return (
            self.finished is not None
            and self.sealed is not None
            and self.frozen is not None
            and len(self.claims) == len(self.verdicts)
        )


class MicroStep(msgspec.Struct, kw_only=True):
    enqueued: e.MicroStepEnqueued
    cell: str = ""
    claim_us: int = 0
    """From when it was there and the cell free until it was claimed."""
    trained: Said | None = None


class Passage(msgspec.Struct, frozen=True, kw_only=True):
    """A phase of a cell's change of role."""

    target: str
    phase: str
    after_us: int
    """Since the phase before."""
    seconds: float
    waited: bool
    """It ended when the weights were published, and may have been over before."""


class Recording:
    """`Recording(log)`. Raises BadLogFile when no run begins in the log."""

    def __init__(self, log: Iterable[Event], *, where: str = "") -> None:
        self.lives: dict[tuple[str, int], Life] = {}
        self.joins: dict[str, Said] = {}
        """Engine to when it came up first, since the beginning."""
        self.passages: dict[tuple[str, int, str], Passage] = {}
        """By cell, epoch, phase."""
        self.micro_steps: dict[str, MicroStep] = {}
        self.steps: dict[int, Said] = {}
        self.exposed: dict[tuple[int, str], int] = {}
        self.published: dict[int, dict[str, Said]] = {}
        self.publication_us: dict[int, int]
        """Version to when satellites that waited for it had it, since its exposure."""
        self.returns_early: bool
        """Whether a satellite came back with a version that had not been published yet."""
        self.late: dict[str, int] = {}
        self.outside: list[Event] = []
        """What an operator did, and services that came."""
        self.failures: list[tuple[int, str]] = []
        """Sequence and kind of each event that tells of one."""
        self.decisions: dict[tuple[str, int], list[Event]] = {}
        """Decider and input to what it decided."""
        self.answered: dict[str, int] = {}
        """Decider to its last input that it is known to have decided something on."""
        self.gaps: dict[tuple[str, str], list[int]] = {}
        """Decider and kind to microseconds until a decision is stored, from its input or the decision before."""
        self.finished = False
        self.step_count = 0
        self.messages = 0
        self.start_us = self.end_us = 0
        self._began: e.RunStarted | None = None
        self.run = ""
        self._attempt: dict[str, int] = {}
        self._running: dict[str, tuple[Life, int]] = {}
        self._sealing: dict[str, int] = {}
        self._evaluating: dict[str, tuple[Life, int]] = {}
        self._phase_us: dict[tuple[str, int], int] = {}
        self._free_us: dict[str, int] = {}
        self._claimed_us: dict[str, int] = {}
        self._times: dict[tuple[str, Any], int] = {}
        self._returns: list[Return] = []
        self._ended: dict[str, int] = {}
        on = _HANDLERS
        times: list[int] = []
        times_from = 0
        decided: dict[str, int] = {}
        for event in log:
            times_from = times_from or event.seq
            times.append(event.time_us)
            self.start_us = self.start_us or event.time_us
            self.end_us = max(self.end_us, event.time_us)
            self.messages += 1
            handler = on.get(event.kind)
            if handler is not None:
                handler(self, event, event.data)
            if event.causation and is_decision(event.kind, event.owner):
                self.decisions.setdefault((event.owner, event.causation), []).append(event)
                since_us = max(times[event.causation - times_from], decided.get(event.owner, 0))
                self.gaps.setdefault((event.owner, event.kind), []).append(max(0, event.time_us - since_us))
                decided[event.owner] = event.time_us
                self.answered[event.owner] = max(self.answered.get(event.owner, 0), event.causation)
            if event.kind in FAILURES:
                self.failures.append((event.seq, event.kind))
            if event.kind in OUTSIDE or event.kind == "service.joined":
                self.outside.append(event)
        waits = waits_of(self._returns, self.published)
        for key in waits.waited:
            self.passages[key] = msgspec.structs.replace(self.passages[key], waited=True)
        self.publication_us, self.returns_early = waits.publication_us, waits.early
        for life, started_us in self._running.values():
            life.ran_us = self.end_us - started_us
        if self._began is None:
            raise BadLogFile("no run begins in it", where=where, remedy="export the run again, from its first event on")

    def __repr__(self) -> str:
        return f"<Recording {self.run} [{len(self.lives)} attempts, {self.step_count} steps]>"

    @property
    def began(self) -> e.RunStarted:
        assert self._began is not None
        return self._began

    # --- the run

    def _run_started(self, event: Event, data: e.RunStarted) -> None:
        if self._began is None:
            self._began, self.run = data, event.entity

    def _run_finished(self, event: Event, data: e.RunFinished) -> None:
        self.finished = event.owner == "scheduler"

    def _timer_set(self, event: Event, data: e.TimerSet) -> None:
        self._times["timer", event.entity] = max(event.time_us, data.due_us)

    def _timer_fired(self, event: Event, data: e.TimerFired) -> None:
        due_us = self._times.pop(("timer", event.entity), event.time_us)
        self.late[event.entity] = max(0, event.time_us - due_us)

    # --- executions

    def _placed(self, event: Event, data: e.ExecutionPlaced) -> None:
        key = event.entity, data.attempt
        self._attempt[event.entity] = data.attempt
        if key not in self.lives:
            self.lives[key] = Life(execution=event.entity, attempt=data.attempt, placed_us=event.time_us)

    def _started(self, event: Event, data: e.ExecutionStarted) -> None:
        life = self.lives.get((event.entity, data.attempt))
        if life is not None and life.start_us < 0:
            life.start_us = max(0, event.time_us - life.placed_us)
            self._running[event.entity] = life, event.time_us

    def _cut(self, event: Event, data: Any) -> None:
        life, started_us = self._running.pop(event.entity, (None, 0))
        if life is not None:
            life.ran_us = event.time_us - started_us

    def _finished(self, event: Event, data: e.ExecutionFinished) -> None:
        self._ended[event.entity] = event.time_us
        life = self._running.get(event.entity, (None, 0))[0]
        self._cut(event, data)
        if life is not None and data.reason not in ("surplus", "cancelled"):
            life.finished = data

    def _sealed(self, event: Event, data: e.ExecutionSealed) -> None:
        life = self.lives.get((event.entity, data.attempt))
        if life is not None:
            life.sealed = Said(event.time_us - self._ended.get(event.entity, event.time_us), data)
            self._sealing[event.entity] = event.time_us

    def _frozen(self, event: Event, data: e.ExecutionTreeFrozen) -> None:
        life = self.lives.get((event.entity, data.attempt))
        if life is not None:
            life.frozen = Said(event.time_us - self._sealing.pop(event.entity, event.time_us), data)

    def _evaluation_requested(self, event: Event, data: e.EvaluationRequested) -> None:
        life = self.lives.get((data.execution, data.attempt))
        if life is not None:
            self._evaluating[event.entity] = life, event.time_us

    def _evaluation_claimed(self, event: Event, data: e.EvaluationClaimed) -> None:
        life, since_us = self._evaluating.get(event.entity, (None, 0))
        if life is not None:
            if len(life.claims) > len(life.verdicts):
                life.claims.pop()
            life.claims.append(event.time_us - since_us)
            self._evaluating[event.entity] = life, event.time_us

    def _evaluated(self, event: Event, data: e.EvaluationScored | e.EvaluationFailed) -> None:
        life, since_us = self._evaluating.get(event.entity, (None, 0))
        if life is not None and len(life.claims) > len(life.verdicts):
            life.verdicts.append(Said(event.time_us - since_us, data))

    # --- cells

    def _joined(self, event: Event, data: e.CellJoined) -> None:
        if event.entity in self.joins:
            self.outside.append(event)
        else:
            self.joins[event.entity] = Said(event.time_us - self.start_us, data)

    def _role_transition(self, event: Event, data: e.CellRoleTransition) -> None:
        key = event.entity, data.epoch
        since_us = self._phase_us.get(key)
        if data.phase == "completed":
            if data.target == "train":
                self._free_us[event.entity] = event.time_us
        elif data.phase != "decided" and since_us is not None:
            passage = Passage(
                target=data.target,
                phase=data.phase,
                after_us=event.time_us - since_us,
                seconds=data.seconds,
                waited=False,
            )
            self.passages[*key, data.phase] = passage
            if (data.target, data.phase) == ("rollout", "acquired"):
                self._returns.append(
                    Return(
                        key=(*key, "acquired"),
                        satellite=event.entity != cell_id(0),
                        version=data.version,
                        after_us=event.time_us - since_us,
                        since_us=event.time_us - self._times.get(("out", data.version), since_us),
                    )
                )
        self._phase_us[key] = event.time_us

    # --- training

    def _batch_opened(self, event: Event, data: e.BatchOpened) -> None:
        self._times["join", data.version] = event.time_us

    def _enqueued(self, event: Event, data: e.MicroStepEnqueued) -> None:
        self.micro_steps[event.entity] = MicroStep(enqueued=data)
        self._times["enqueued", event.entity] = event.time_us

    def _claimed(self, event: Event, data: e.MicroStepClaimed) -> None:
        step = self.micro_steps.get(event.entity)
        if step is not None:
            since_us = max(self._times.get(("enqueued", event.entity), 0), self._free_us.get(data.cell, 0))
            step.cell, step.claim_us = data.cell, max(0, event.time_us - since_us)
            self._claimed_us[event.entity] = event.time_us

    def _done(self, event: Event, data: e.MicroStepDone) -> None:
        step = self.micro_steps.get(event.entity)
        self._free_us[data.cell] = event.time_us
        if step is not None and event.entity in self._claimed_us:
            step.trained = Said(event.time_us - self._claimed_us.pop(event.entity), data)

    def _join_closed(self, event: Event, data: e.BatchJoinClosed) -> None:
        self._times["closed", event.entity] = event.time_us

    def _stepped(self, event: Event, data: e.BatchStepped) -> None:
        self.step_count = max(self.step_count, data.step)
        self._times["publish", data.version] = event.time_us
        closed_us = self._times.get(("closed", event.entity))
        if closed_us is not None:
            self.steps.setdefault(data.step, Said(event.time_us - closed_us, data))

    def _exposed(self, event: Event, data: e.WeightsExposed) -> None:
        key = data.version, data.purpose
        since_us = self._times.get((data.purpose, data.version), event.time_us)
        self.exposed.setdefault(key, max(0, event.time_us - since_us))
        if data.purpose == "publish":
            self._times.setdefault(("out", data.version), event.time_us)

    def _published(self, event: Event, data: e.WeightsPublished) -> None:
        out_us = self._times.get(("out", data.version))
        if out_us is not None:
            said = Said(event.time_us - out_us, data)
            self.published.setdefault(data.version, {}).setdefault(event.entity, said)


_HANDLERS: dict[str, Callable[[Recording, Event, Any], None]] = {
    "run.started": Recording._run_started,
    "run.finished": Recording._run_finished,
    "timer.set": Recording._timer_set,
    "timer.fired": Recording._timer_fired,
    "execution.placed": Recording._placed,
    "execution.started": Recording._started,
    "execution.finished": Recording._finished,
    "execution.lost": Recording._cut,
    "execution.cancelled": Recording._cut,
    "execution.sealed": Recording._sealed,
    "execution.tree-frozen": Recording._frozen,
    "evaluation.requested": Recording._evaluation_requested,
    "evaluation.claimed": Recording._evaluation_claimed,
    "evaluation.scored": Recording._evaluated,
    "evaluation.failed": Recording._evaluated,
    "cell.joined": Recording._joined,
    "cell.role-transition": Recording._role_transition,
    "batch.opened": Recording._batch_opened,
    "batch.join-closed": Recording._join_closed,
    "batch.stepped": Recording._stepped,
    "micro-step.enqueued": Recording._enqueued,
    "micro-step.claimed": Recording._claimed,
    "micro-step.done": Recording._done,
    "weights.exposed": Recording._exposed,
    "weights.published": Recording._published,
}
