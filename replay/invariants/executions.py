"""Invariants of executions: attempts, the order of their lives, outcomes."""

from __future__ import annotations

import math
from collections import Counter

from replay.invariants.base import Invariant, on
from schemas import events as e
from schemas.envelope import Event
from schemas.ids import evaluation_id

EXCLUDING = ("cancelled", "surplus", "overall_timeout")


class HarnessErrors(Invariant):
    """No harness met an answer that a correct endpoint wouldn't give. One that is cancelled meets a refusal.

    Source: section 'Black-box proxy' (requests are retried transparently); DESIGN section 6
    """

    name = "harness_errors"

    @on("execution.finished")
    def finished(self, event: Event) -> None:
        execution = self.scene.executions.get(event.entity)
        cancelled = execution is not None and execution.cancelled
        if (errors := event.data.counters.harness_errors) and not cancelled:
            self.violated(event, f"{errors} harness errors")


class Attempts(Invariant):
    """Attempts of an execution are numbered from 0 without a gap: the next is placed when the one before was lost, nothing
    of an old one counts, and what is sealed, settled and trained is the attempt that finished.

    Source: DESIGN section 4 (starts again as attempt k+1; tokens of old attempts are never targets)
    """

    name = "attempts"

    def begin(self) -> None:
        self._newest: dict[str, int] = {}
        self._lost: dict[str, int] = {}
        self._finished: dict[str, int] = {}

    @on("execution.placed")
    def placed(self, event: Event) -> None:
        attempt: int = event.data.attempt
        before = self._newest.get(event.entity, -1)
        if attempt != before + 1 or self._lost.get(event.entity, -1) != before:
            self.violated(event, f"attempt {attempt} placed after {before}, which was not lost")
        self._newest[event.entity] = attempt

    @on("execution.lost")
    def lost(self, event: Event) -> None:
        if event.entity in self._finished:
            self.violated(event, f"lost attempt {event.data.attempt} after it had finished")
        if event.data.attempt > self._newest.get(event.entity, -1):
            self.violated(event, f"lost attempt {event.data.attempt}, which was never placed")
        self._lost[event.entity] = max(self._lost.get(event.entity, -1), event.data.attempt)

    @on("execution.started", "execution.finished")
    def lived(self, event: Event) -> None:
        # One that the end of the run overtook may end before its next attempt is placed.
        current = max(self._newest.get(event.entity, 0), self._lost.get(event.entity, -1) + 1)
        verb = event.kind.partition(".")[2]
        if event.data.attempt != current:
            self.violated(event, f"{verb} attempt {event.data.attempt}, the newest is {current}")
        if verb == "finished":
            self._finished.setdefault(event.entity, event.data.attempt)

    @on("execution.sealed", "execution.tree-frozen", "execution.settled")
    def closed(self, event: Event) -> None:
        attempt: int = event.data.attempt
        if attempt != self._finished.get(event.entity, attempt):
            verb = event.kind.partition(".")[2]
            self.violated(event, f"{verb} attempt {attempt}, attempt {self._finished[event.entity]} finished")

    @on("group.materialized")
    def materialized(self, event: Event) -> None:
        for row in event.data.rows:
            ended = self._finished.get(row.execution, row.attempt)
            if row.attempt != ended:
                self.violated(event, f"a row of {row.execution} is of attempt {row.attempt}, attempt {ended} finished")


_BEFORE = {
    "execution.placed": ("execution.dispatched",),
    "execution.started": ("execution.placed",),
    "execution.lost": ("execution.placed",),
    "execution.finished": ("execution.dispatched",),
    "execution.cancelled": ("execution.dispatched",),
    "execution.sealed": ("execution.finished",),
    "execution.tree-frozen": ("execution.sealed",),
    "execution.settled": ("execution.finished",),
}
_ANSWERS = {"execution.sealed": "execution.finished", "execution.tree-frozen": "execution.sealed"}
_NEVER_AFTER = {
    "execution.placed": "execution.sealed",
    "execution.started": "execution.finished",
    "execution.lost": "execution.finished",
    "execution.cancelled": "execution.settled",
}


class LifeCycle(Invariant):
    """An execution is dispatched, placed, started, finished, sealed, frozen and settled in this order; one that no placement
    allowed to start ends only with the run, or cancelled. A seal answers the end, a frozen tree the seal. What is cancelled
    ends.

    Source: DESIGN sections 3, 6 and 7
    """

    name = "life_cycle"

    def begin(self) -> None:
        self._said: dict[tuple[str, str], int] = {}

    @on("execution.dispatched", *_BEFORE)
    def said(self, event: Event) -> None:
        kind, name, said = event.kind, event.entity, self._said
        verb = kind.partition(".")[2]
        for before in _BEFORE.get(kind, ()):
            if (before, name) not in said:
                self.violated(event, f"{verb} before it was {before.partition('.')[2]}")
        # The scheduler places what it has not read to be cancelled.
        late = kind == "execution.placed" and ("execution.cancelled", name) in said
        if kind in _NEVER_AFTER and (_NEVER_AFTER[kind], name) in said and not late:
            self.violated(event, f"{verb} after it was {_NEVER_AFTER[kind].partition('.')[2]}")
        if kind in _ANSWERS and event.causation and said.get((_ANSWERS[kind], name)) not in (None, event.causation):
            self.violated(event, f"{verb} answers {event.causation}, not what it follows from")
        unplaced = kind == "execution.finished" and ("execution.placed", name) not in said
        if unplaced and not self.scene.finished and ("execution.cancelled", name) not in said:
            self.violated(event, "finished and was never placed")
        said.setdefault((kind, name), event.seq)

    def end(self) -> None:
        if not self.evidence.complete:
            return
        said = self._said
        for (kind, name), seq in list(said.items()):
            if kind == "execution.placed" and ("execution.finished", name) not in said:
                self.report(seq, name, "placed and never finished")
            if kind == "execution.cancelled" and ("execution.finished", name) not in said:
                self.report(seq, name, "cancelled and never finished")
            if kind == "execution.finished" and ("execution.sealed", name) not in said:
                self.report(seq, name, "finished and never sealed")
            if kind == "execution.sealed" and ("execution.tree-frozen", name) not in said:
                self.report(seq, name, "sealed and never frozen")
            # After the run's end nobody evaluates what is left.
            if kind == "execution.finished" and not self.scene.finished and ("execution.settled", name) not in said:
                self.report(seq, name, "finished and never settled")


class OneOutcome(Invariant):
    """Every execution of a group that is ready, consumed or discarded ended in exactly one outcome, or was cancelled, and the
    group's rewards are those outcomes, but for its surplus. An execution without one is open only because the run ended before.

    Source: section 'Partial scoring'; DESIGN section 4
    """

    name = "one_outcome"

    def begin(self) -> None:
        self._settled: dict[str, e.ExecutionSettled] = {}
        self._cancelled: set[str] = set()

    @on("execution.cancelled")
    def cancelled(self, event: Event) -> None:
        if event.entity in self._settled:
            self.violated(event, "cancelled and has an outcome")
        self._cancelled.add(event.entity)

    @on("execution.settled")
    def settled(self, event: Event) -> None:
        execution = self.scene.executions.get(event.entity)
        if event.entity in self._settled:
            self.violated(event, "settled twice")
        if execution is not None and execution.status != "finished":
            self.violated(event, "settled and not finished")
        self._settled[event.entity] = event.data

    @on("group.ready")
    def ready(self, event: Event) -> None:
        data: e.GroupReady = event.data
        members = self._closes(event)
        for reward in data.rewards:
            known = self._settled.get(reward.execution)
            if known and (known.outcome, known.reward) != (reward.outcome, reward.reward):
                said, right = f"{reward.outcome} {reward.reward}", f"{known.outcome} {known.reward}"
                self.violated(event, f"{reward.execution} has {said}, settled {right}")
        if sorted([*(reward.execution for reward in data.rewards), *data.surplus]) != sorted(members):
            self.violated(event, "its rewards and its surplus are not one for each of its executions")

    @on("group.discarded")
    def discarded(self, event: Event) -> None:
        members = self._closes(event)
        outcomes = [self._settled[name] for name in members if name in self._settled]
        counted = sum(each.outcome != "excluded" for each in outcomes)
        if counted >= 2:
            self.violated(event, f"discarded with {counted} rewards to compare")

    def _closes(self, event: Event) -> list[str]:
        group = self.scene.groups.get(event.entity)
        members = group.executions if group else []
        for name in members:
            if name not in self._settled and name not in self._cancelled:
                self.violated(event, f"{name} has no outcome yet")
        return members


class OutcomeRule(Invariant):
    """An outcome follows from how the execution ended and from what its tests said, from nothing else: cancelled, surplus
    (its group has N valid ones) and overall time-out are excluded; a total failure, or nothing to score, is a placeholder of
    reward 0; a valid score of what was preserved is the reward, after a harness time-out too; everything else is excluded.

    Source: section 'Partial scoring'; DESIGN sections 4 and 7
    """

    name = "outcome_rule"

    def begin(self) -> None:
        self._finished: dict[str, e.ExecutionFinished] = {}
        self._scored: dict[str, tuple[int, e.EvaluationScored]] = {}
        self._failed: set[str] = set()
        self._trees: dict[str, e.ExecutionTreeFrozen] = {}
        self._valid: Counter[str] = Counter()
        """Group to how many of its executions are valid."""

    @on("execution.finished")
    def finished(self, event: Event) -> None:
        self._finished.setdefault(event.entity, event.data)

    @on("evaluation.scored")
    def scored(self, event: Event) -> None:
        self._scored.setdefault(event.data.execution, (event.seq, event.data))

    @on("evaluation.failed")
    def failed(self, event: Event) -> None:
        self._failed.add(event.data.execution)

    @on("execution.tree-frozen")
    def frozen(self, event: Event) -> None:
        self._trees.setdefault(event.entity, event.data)

    @on("execution.settled")
    def settled(self, event: Event) -> None:
        data: e.ExecutionSettled = event.data
        ended = self._finished.get(event.entity)
        if ended is None:
            return
        execution = self.scene.executions.get(event.entity)
        group = execution.group if execution is not None else ""
        full = group != "" and self._valid[group] >= self.scene.rules.scheduler.N
        right = [("excluded", 0.0)] if full else self._right(event, ended)
        self._valid[group] += data.outcome == "valid"
        if right is not None and (data.outcome, data.reward) not in right:
            expected = " or ".join(f"{outcome} {reward:g}" for outcome, reward in right) or "none yet"
            self.violated(event, f"{data.outcome} {data.reward:g} after {ended.reason}, expected {expected}")
        if data.outcome == "valid" and data.evaluation != evaluation_id(event.entity, data.attempt):
            self.violated(event, f"names the evaluation {data.evaluation!r}")

    def _right(self, event: Event, ended: e.ExecutionFinished) -> list[tuple[str, float]] | None:
        if ended.reason in EXCLUDING:
            return [("excluded", 0.0)]
        if ended.reason == "total_failure" or not ended.workspace:
            return [("placeholder", 0.0)]
        tree = self._trees.get(event.entity)
        if tree is not None and (not tree.blob or tree.attempt != ended.attempt):
            return [("excluded", 0.0)]
        seq, scored = self._scored.get(event.entity, (0, None))
        given_up = [("excluded", 0.0)] if event.entity in self._failed else []
        if scored is None or (event.causation and seq > event.causation):
            return given_up
        same = scored.workspace_digest == ended.workspace_digest and scored.branch == -1
        if not same or not scored.valid or not math.isfinite(scored.score) or scored.attempt != ended.attempt:
            return [("excluded", 0.0)]
        return [("valid", scored.score), *given_up]
