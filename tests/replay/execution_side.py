"""The side of executions in a scripted mesh: agents, their model calls and records, seals, trees and evaluations."""

from __future__ import annotations

import random

from replay.invariants import Call, Evidence, Served
from schemas import events as e
from schemas import streams
from schemas.config import Config
from schemas.envelope import Event
from schemas.ids import call_id
from schemas.records import CallRecord, VersionSpan
from schemas.units import FinishReason
from services.mesh.bus import Stored
from services.mesh.tree_codec import digest_records, encode_record
from services.trajectories.tree import counts_of, freeze
from tests.replay.written_log import WrittenLog
from tests.scheduler.world import RUN


class ExecutionSide(WrittenLog):
    """`fail`: how often an evaluation fails. Executions end for one of `reasons`, and those that are scored get one of
    `scores`."""

    def __init__(
        self,
        rng: random.Random,
        config: Config,
        *,
        fail: float,
        scores: tuple[float, ...],
        reasons: tuple[FinishReason, ...],
    ) -> None:
        super().__init__(rng, config)
        self.fail, self.scores, self.reasons = fail, scores, reasons
        self.records: list[Stored] = []
        self.calls: list[Call] = []
        self.served: list[Served] = []
        self._attempts: dict[tuple[str, int], list[CallRecord]] = {}
        self._open: dict[str, int] = {}
        """Executions that run, and their attempts."""
        self._lost: dict[str, int] = {}
        """Executions whose attempt was lost, and the attempts that come next."""
        self._cancelled: dict[str, Event] = {}
        """Surplus executions, and what cancelled them."""
        self._ended: set[str] = set()
        self._asked: dict[str, e.EvaluationRequested] = {}

    @property
    def evidence(self) -> Evidence:
        return Evidence(records=self.records, calls=self.calls, served=self.served, complete=True)

    def _on_execution_placed(self, event: Event, data: e.ExecutionPlaced) -> None:
        if event.entity in self._cancelled:
            return
        if self._over:
            self._cancel(event.entity, data.attempt)
            return
        self._open[event.entity] = data.attempt
        self._lost.pop(event.entity, None)
        self._owe("harness", "execution.started", event.entity, e.ExecutionStarted(attempt=data.attempt), event)

    def _on_execution_started(self, event: Event, data: e.ExecutionStarted) -> None:
        self.served += [Served(cell=cell, epoch=epoch, log=event.seq) for cell, epoch in sorted(self._epochs.items())]
        self._call(event.entity, data.attempt)
        reason = self.rng.choice(self.reasons)
        scored = reason in ("completed", "failed", "harness_timeout")
        finished = e.ExecutionFinished(
            attempt=data.attempt,
            reason=reason,
            exit_code=0,
            seconds=1.0,
            workspace=f"workspace/{event.entity}" if scored else "",
            workspace_digest="w" if scored else "",
        )
        self._owe("harness", "execution.finished", event.entity, finished, event)

    def _on_execution_lost(self, event: Event, data: e.ExecutionLost) -> None:
        self._open.pop(event.entity, None)
        self._lost[event.entity] = data.attempt + 1
        if event.entity in self._cancelled:
            self._cancel(event.entity, data.attempt + 1)

    def _on_execution_cancelled(self, event: Event, data: e.ExecutionCancelled) -> None:
        """It ends soon, wherever it stands; meanwhile it may still end by itself."""
        self._cancelled[event.entity] = event
        if event.entity not in self._ended:
            self._cancel(event.entity, self._open.get(event.entity, self._lost.get(event.entity, 0)))

    def _on_execution_finished(self, event: Event, data: e.ExecutionFinished) -> None:
        self._open.pop(event.entity, None)
        self._lost.pop(event.entity, None)
        self._ended.add(event.entity)
        entries = [encode_record(each) for each in self._attempts.get((event.entity, data.attempt), [])]
        last = max(
            (s.seq for s in self.records if s.subject.startswith(self._under(event.entity, data.attempt))), default=0
        )
        sealed = e.ExecutionSealed(
            attempt=data.attempt, records=len(entries), last_record=last, digest=digest_records(entries)
        )
        self._owe("proxy", "execution.sealed", event.entity, sealed, event)

    def _on_execution_sealed(self, event: Event, data: e.ExecutionSealed) -> None:
        tree = freeze(event.entity, data.attempt, self._attempts.get((event.entity, data.attempt), []))
        frozen = counts_of(tree, blob=streams.tree_blob(event.entity, data.attempt), digest="d")
        self._owe("trajectories", "execution.tree-frozen", event.entity, frozen, event)

    def _on_evaluation_requested(self, event: Event, data: e.EvaluationRequested) -> None:
        who = f"evaluator-{self.rng.randrange(2)}"
        self._owe("evaluator", "evaluation.claimed", event.entity, e.EvaluationClaimed(evaluator=who), event, who)
        self._asked[event.entity] = data

    def _on_evaluation_claimed(self, event: Event, data: e.EvaluationClaimed) -> None:
        asked = self._asked[event.entity]
        if self.rng.random() < self.fail:
            failed = e.EvaluationFailed(
                execution=asked.execution, attempt=asked.attempt, reason="test", tries=asked.tries
            )
            self._owe("evaluator", "evaluation.failed", event.entity, failed, event, data.evaluator)
            return
        scored = e.EvaluationScored(
            execution=asked.execution,
            attempt=asked.attempt,
            score=self.rng.choice(self.scores),
            valid=True,
            workspace_digest=asked.workspace_digest,
            branch=-1,
            reference=asked.workspace,
            seconds=1.0,
        )
        self._owe("evaluator", "evaluation.scored", event.entity, scored, event, data.evaluator)

    def _on_run_finished(self, event: Event, data: e.RunFinished) -> None:
        """What runs is stopped, what is queued never starts; nothing is evaluated any more."""
        kept = ("execution.sealed", "execution.tree-frozen", "evaluation.scored", "evaluation.failed")
        self._owed = [each for each in self._owed if each.kind in kept]
        self._over = True
        for name, attempt in sorted({**self._lost, **self._open}.items()):
            self._cancel(name, attempt)

    def _cancel(self, name: str, attempt: int) -> None:
        reason: FinishReason = "surplus" if name in self._cancelled else "cancelled"
        finished = e.ExecutionFinished(
            attempt=attempt, reason=reason, exit_code=None, seconds=1.0, workspace="", workspace_digest=""
        )
        self._open[name] = attempt
        self._owe("harness", "execution.finished", name, finished, self._cancelled.get(name))

    def _under(self, execution: str, attempt: int) -> str:
        return streams.records_filter(RUN, execution, attempt).removesuffix(">")

    def _call(self, execution: str, attempt: int) -> None:
        """Its model calls: a chain, and sometimes a second root."""
        records: list[CallRecord] = []
        for index in range(self.rng.randrange(1, 4)):
            root = index == 0 or self.rng.random() < 0.3
            length = self.rng.randrange(1, 5)
            record = CallRecord(
                call=call_id(execution, attempt, index),
                execution=execution,
                attempt=attempt,
                index=index,
                parent=None if root else records[index - 1].call,
                input_ids=[1, 2, 3],
                output_ids=[7] * length,
                logprobs=[-0.5] * length,
                versions=[VersionSpan(version=0, start=0, end=length)],
                temperature=1.0,
                finish="stop",
                cell="cell-0",
                role="main",
                request=f"{execution}.{attempt}.{index}".ljust(32, "0"),
                prefix="",
                answer=b"[]",
            )
            records.append(record)
            self.records.append(
                Stored(
                    seq=len(self.records) + 1,
                    subject=streams.record_subject(RUN, execution, attempt, record.call),
                    time_us=self._now_us,
                    headers={},
                    data=encode_record(record),
                )
            )
            self.calls.append(
                Call(
                    execution=execution,
                    attempt=attempt,
                    request=f"msg_{record.request[:24]}",
                    answered=True,
                    answer="a",
                    records=len(self.records),
                )
            )
        self._attempts[execution, attempt] = records
