"""Invariants of evaluations: who asks, who claims, who answers."""

from __future__ import annotations

from collections import defaultdict

from replay.invariants.base import Invariant, names, on
from schemas import events as e
from schemas.envelope import Event


class Evaluations(Invariant):
    """An evaluation is asked for after its execution finished, tries numbered from 1; a try is claimed by one evaluator at a
    time, in answer to the request or to a claim that lapsed, and fails by one that claimed it; a score is of the evaluation,
    by one that claimed any of its tries. An evaluation is scored once and a try fails once, and where an evaluator that started
    again does both, the first counts. Only surplus may go without an answer.

    Source: DESIGN sections 3 (claims) and 7 (outcome)
    """

    name = "evaluations"

    def begin(self) -> None:
        self._tries: dict[str, tuple[int, int]] = {}
        """Evaluation to its newest try and the sequence of the request."""
        self._claims: dict[str, list[str]] = {}
        """Evaluation to those who claimed its newest try."""
        self._earlier: dict[str, list[str]] = defaultdict(list)
        """Evaluation to those who claimed a try before it."""
        self._claimed_at: dict[str, int] = {}
        self._answers: dict[str, set[tuple[str, int]]] = defaultdict(set)
        """Evaluation to what was answered: a score, or which try failed."""
        self._answered: dict[str, int] = {}
        """The newest try that failed; a large number after a score."""
        self._execution: dict[str, str] = {}
        self._surplus: set[str] = set()

    @on("group.ready")
    def ready(self, event: Event) -> None:
        self._surplus.update(event.data.surplus)

    @on("evaluation.requested")
    def requested(self, event: Event) -> None:
        data: e.EvaluationRequested = event.data
        self._execution[event.entity] = data.execution
        tries, _ = self._tries.get(event.entity, (0, 0))
        execution = self.scene.executions.get(data.execution)
        if execution is not None and execution.status != "finished":
            self.violated(event, f"asked for while {data.execution} is {execution.status}")
        if data.tries != tries + 1:
            self.violated(event, f"try {data.tries} follows try {tries}")
        elif tries and self._answered.get(event.entity, 0) != tries:
            self.violated(event, f"try {data.tries} is asked for and try {tries} did not fail")
        self._tries[event.entity] = (data.tries, event.seq)
        self._earlier[event.entity] += self._claims.get(event.entity, [])
        self._claims[event.entity], self._claimed_at[event.entity] = [], event.seq

    @on("evaluation.claimed")
    def claimed(self, event: Event) -> None:
        tries, asked = self._tries.get(event.entity, (0, 0))
        if not tries:
            self.violated(event, "claimed and was never asked for")
        elif self._answered.get(event.entity, 0) >= tries:
            self.violated(event, f"try {tries} claimed after it was answered")
        elif event.causation != self._claimed_at[event.entity]:
            last = self._claimed_at[event.entity]
            holders = self._claims[event.entity]
            what = f"{names(holders)} holds it since {last}" if holders else f"the request is at {asked}"
            self.violated(event, f"the claim answers {event.causation}, {what}")
        self._claims.setdefault(event.entity, []).append(event.data.evaluator)
        self._claimed_at[event.entity] = event.seq

    @on("evaluation.scored", "evaluation.failed")
    def answered(self, event: Event) -> None:
        tries, _ = self._tries.get(event.entity, (0, 0))
        claims, scored = self._claims.get(event.entity, []), event.kind == "evaluation.scored"
        answered = tries if scored else event.data.tries
        # A failure names its try. A score is of the same workspace, whichever try's tests gave it.
        claimants = [*self._earlier[event.entity], *claims] if scored or answered < tries else claims
        if not claimants:
            self.violated(event, f"try {tries} answered and nobody had claimed it")
        elif event.instance not in claimants:
            self.violated(event, f"answered by {event.instance}, claimed by {names(claimants)}")
        answer = (event.kind, 0 if scored else event.data.tries)
        if answer in self._answers[event.entity] and len(set(claims)) < 2:
            self.violated(event, f"try {tries} answered twice in the same way")
        self._answers[event.entity].add(answer)
        self._answered[event.entity] = 1 << 30 if scored else max(answered, self._answered.get(event.entity, 0))

    def end(self) -> None:
        for name, (tries, seq) in self._tries.items():
            wanted = self._execution[name] not in self._surplus and not self.scene.finished
            if self.evidence.complete and wanted and self._answered.get(name, 0) < tries:
                self.report(seq, name, f"try {tries} was never answered")
