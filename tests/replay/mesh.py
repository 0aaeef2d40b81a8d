"""A run of the three real deciders in a scripted world, written down as one log with its RECORDS and calls.

Every decider reads the log at its own pace and says what it decides; the world says one of the facts that it owes. A seed
picks whose turn it is, so decisions lie behind facts that their decider had not read, as in a real log. No shell, no bus.
"""

from __future__ import annotations

import random
from typing import Any

from replay.invariants import Call, Evidence, Served
from schemas import events as e
from schemas import streams
from schemas.envelope import Event
from schemas.flags import NEWEST
from schemas.ids import call_id, decision_id
from schemas.records import CallRecord, VersionSpan
from schemas.units import FinishReason, GapStats, TaskRef
from services.mesh.bus import Stored
from services.mesh.decider import Driver
from services.mesh.tree_codec import digest_records, encode_record
from services.packer.core.packing import Packer
from services.scheduler.decider import Scheduler
from services.trajectories.core.outcome import Outcome
from services.trajectories.tree import counts_of, freeze
from tests.scheduler.world import RUN, small_config

_START_US = 1_000_000_000
_SLOW = {"execution.finished": 0.03, "timer.fired": 0.1}
"""How often these happen when they could: they take long beside everything else."""


class Mesh:
    """`log` is the run. `lose`, `fail`, `restart`: how often an attempt is lost, an evaluation fails, a trainer restarts."""

    def __init__(
        self,
        *,
        seed: int = 0,
        lose: float = 0.0,
        fail: float = 0.0,
        restart: float = 0.0,
        scores: tuple[float, ...] = (0.0, 0.5, 1.0),
        reasons: tuple[FinishReason, ...] = ("completed",),
        **overrides: Any,
    ) -> None:
        shape = {"eval__path": "held-out", "eval__every": 2, "eval__executions": 3, "steps": 6, "packer__T": 60}
        shape |= {"cells__trainable": 3, "cells__capacity": 6, "packer__ahead": 3}
        self.config = small_config(**{**shape, **overrides})
        self.lose, self.fail, self.restart, self.scores, self.reasons = lose, fail, restart, scores, reasons
        self.rng = random.Random(f"mesh:{seed}")
        self.log: list[Event] = []
        self.records: list[Stored] = []
        self.calls: list[Call] = []
        self.served: list[Served] = []
        self._owed: list[Event] = []
        """Facts that the world may say next; their place in the log is not known yet."""
        self._drivers = [Driver(each) for each in (Scheduler(), Outcome(), Packer())]
        self._read = [0 for _ in self._drivers]
        self._now_us = _START_US
        self._training: dict[str, int] = {}
        """Cells that train and their epochs, as the log says."""
        self._serving: set[str] = set()
        self._held: dict[str, tuple[str, Event]] = {}
        """Micro-steps of the open batch to who claimed them, and at which event they became free."""
        self._done: list[tuple[Event, e.MicroStepDone]] = []
        self._free: dict[str, Event] = {}
        self._opened: e.BatchOpened | None = None
        self._members: list[str] | None = None
        self._exposed = 0
        self._attempts: dict[tuple[str, int], list[CallRecord]] = {}
        self._open: dict[str, int] = {}
        """Executions that run, and their attempts."""
        self._lost: dict[str, int] = {}
        """Executions whose attempt was lost, and the attempts that come next."""
        self._over = False
        self._cancelled: dict[str, Event] = {}
        """Surplus executions, and what cancelled them."""
        self._ended: set[str] = set()
        self._epochs: dict[str, int] = {}
        self._due: dict[str, int] = {}
        """Timers to their time."""
        self._asked: dict[str, e.EvaluationRequested] = {}
        self._rows: dict[str, e.MicroStepEnqueued] = {}

    @property
    def evidence(self) -> Evidence:
        return Evidence(records=self.records, calls=self.calls, served=self.served, complete=True)

    def run(self, limit: int = 60_000) -> list[Event]:
        """The whole log, from run.started to what follows run.finished."""
        tasks = [TaskRef(name=f"task-{index}", digest=str(index)) for index in range(5)]
        held_out = [TaskRef(name=f"held-{index}", digest=f"h{index}") for index in range(3)]
        started = e.RunStarted(seed=1, config=self.config, tasks=tasks, held_out=held_out, code="test", flags=NEWEST)
        self._say("operator", "run.started", RUN, started)
        for index in range(self.config.cells.count):
            joined = e.CellJoined(
                index=index,
                capacity=self.config.cells.capacity,
                url="",
                engine="scripted",
                version=0,
                capabilities=[],
            )
            self._owe("rollout", "cell.joined", f"cell-{index}", joined)
        for _ in range(limit):
            if not self._turn():
                return self.log
        raise AssertionError(f"no end after {limit} turns: {self._drivers[0].state!r}")

    def _turn(self) -> bool:
        behind = [index for index, read in enumerate(self._read) if read < len(self.log)]
        claimable = self._claimable()
        choices: list[Any] = [*behind, *behind, *self._owed, *claimable]
        if not choices:
            return False
        chosen = self.rng.choice(choices)
        if isinstance(chosen, int):
            self._decide(chosen)
        elif isinstance(chosen, str):
            self._claim(chosen)
        elif chosen.kind not in _SLOW or self.rng.random() < _SLOW[chosen.kind]:
            self._owed.remove(chosen)
            self._fact(chosen)
        return True

    def _decide(self, index: int) -> None:
        driver = self._drivers[index]
        event = self.log[self._read[index]]
        self._read[index] += 1
        if not driver.is_input(event):
            return
        name = driver.decider.name
        for number, decision in enumerate(driver.feed(event)):
            id = decision_id(RUN, name, event.seq, number)
            self._say(name, decision.kind, decision.entity, decision.data, cause=event, id=id)

    def _say(
        self,
        owner: str,
        kind: str,
        entity: str,
        data: Any,
        *,
        cause: Event | None = None,
        id: str = "",
        instance: str = "",
    ) -> Event:
        self._now_us += self.rng.randrange(1, 200_000)
        seq = len(self.log) + 1
        event = Event(
            seq=seq,
            time_us=self._now_us,
            kind=kind,
            entity=entity,
            owner=owner,
            instance=instance or owner,
            causation=cause.seq if cause else 0,
            id=id or f"{cause.id if cause else RUN}.{entity}.{kind}.{seq}",
            data=data,
        )
        self.log.append(event)
        self._answer(event)
        return event

    def _owe(
        self, owner: str, kind: str, entity: str, data: Any, cause: Event | None = None, instance: str = ""
    ) -> None:
        self._owed.append(
            Event(
                seq=0,
                time_us=0,
                kind=kind,
                entity=entity,
                owner=owner,
                instance=instance or owner,
                causation=cause.seq if cause else 0,
                id=cause.id if cause else RUN,
                data=data,
            )
        )

    def _fact(self, owed: Event) -> None:
        data = owed.data
        if owed.kind == "timer.fired":
            self._now_us = max(self._now_us, self._due[owed.entity])
        elif owed.kind in ("execution.started", "execution.finished") and self._open.get(owed.entity) != data.attempt:
            return
        elif owed.kind == "execution.finished" and not self._over and self.rng.random() < self.lose:
            owed = self._instead(owed, "execution.lost", e.ExecutionLost(attempt=data.attempt, reason="test"))
        elif owed.kind == "micro-step.done" and self.rng.random() < self.restart:
            self._restart(data.cell)
            return
        elif owed.kind == "micro-step.done" and self._held.get(owed.entity, ("", None))[0] != data.cell:
            return
        elif owed.kind == "weights.published" and owed.entity not in self._serving:
            return
        cause = self.log[owed.causation - 1] if owed.causation else None
        self._say(owed.owner, owed.kind, owed.entity, owed.data, cause=cause, instance=owed.instance)

    def _instead(self, owed: Event, kind: str, data: Any) -> Event:
        return Event(
            seq=0,
            time_us=0,
            kind=kind,
            entity=owed.entity,
            owner=owed.owner,
            instance=owed.instance,
            causation=owed.causation,
            id=owed.id,
            data=data,
        )

    # --- what the world owes after an event

    def _answer(self, event: Event) -> None:
        answer = getattr(self, "_on_" + event.kind.replace(".", "_").replace("-", "_"), None)
        if answer is not None:
            answer(event, event.data)

    def _on_cell_joined(self, event: Event, data: e.CellJoined) -> None:
        self._serving.add(event.entity)

    def _on_timer_set(self, event: Event, data: e.TimerSet) -> None:
        self._due[event.entity] = data.due_us
        self._owe("scheduler", "timer.fired", event.entity, e.TimerFired(purpose=data.purpose), event)

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

    def _on_cell_role_transition(self, event: Event, data: e.CellRoleTransition) -> None:
        name, target = event.entity, data.target
        follows = {
            ("train", "decided"): ("rollout", "draining"),
            ("train", "draining"): ("rollout", "drained"),
            ("train", "drained"): ("rollout", "released"),
            ("train", "released"): ("trainer", "acquired"),
            ("rollout", "decided"): ("trainer", "released"),
            ("rollout", "released"): ("rollout", "acquired"),
        }
        if data.phase == "decided":
            self._epochs[name] = data.epoch
            self._serving.discard(name)
            self._training.pop(name, None)
        elif data.phase == "completed" and target == "train":
            self._training[name] = data.epoch
        elif data.phase == "completed":
            self._serving.add(name)
        found = follows.get((target, data.phase))
        if found is not None:
            owner, phase = found
            version = self._exposed if (target, phase) == ("rollout", "acquired") else -1
            said: Any = e.CellRoleTransition(
                phase=phase,
                source=data.source,
                target=target,
                epoch=data.epoch,
                version=version,  # type: ignore[arg-type]
            )
            self._owe(owner, "cell.role-transition", name, said, event)

    def _on_burst_ended(self, event: Event, data: e.BurstEnded) -> None:
        # Satellites are on their way back from now on.
        self._training = {name: epoch for name, epoch in self._training.items() if name == "cell-0"}

    def _on_batch_opened(self, event: Event, data: e.BatchOpened) -> None:
        self._opened, self._members = data, None
        self._held, self._free, self._done = {}, {}, []

    def _on_micro_step_enqueued(self, event: Event, data: e.MicroStepEnqueued) -> None:
        self._free[event.entity] = event
        self._rows[event.entity] = data

    def _on_micro_step_released(self, event: Event, data: e.MicroStepReleased) -> None:
        self._free[event.entity] = event
        self._held.pop(event.entity, None)
        self._done = [each for each in self._done if each[0].entity != event.entity]

    def _on_micro_step_done(self, event: Event, data: e.MicroStepDone) -> None:
        self._done.append((event, data))

    def _on_batch_join_closed(self, event: Event, data: e.BatchJoinClosed) -> None:
        self._members = data.members
        assert self._opened is not None
        version = self._opened.version + 1
        saved = e.CheckpointSaved(version=version, path="p", digest="d", log_sequence=len(self.log) - 1)
        self._owe("trainer", "checkpoint.saved", f"v{version:06d}", saved, event)

    def _on_checkpoint_saved(self, event: Event, data: e.CheckpointSaved) -> None:
        assert self._opened is not None and self._members is not None
        done = [each for _, each in self._done]
        stepped = e.BatchStepped(
            step=self._opened.step,
            version=data.version,
            members=self._members,
            loss=0.0,
            grad_norm=0.0,
            lr=0.0,
            micro_steps=len(done),
            tokens=sum(each.tokens for each in done),
            targets=sum(each.targets for each in done),
            executions=sum(each.executions for each in done),
            masked=0,
            reward=0.0,
            gap=GapStats(),
            seconds=0.1,
        )
        self._owe("trainer", "batch.stepped", f"b-{self._opened.step:06d}", stepped, event)

    def _on_batch_stepped(self, event: Event, data: e.BatchStepped) -> None:
        assert self._opened is not None
        if self._opened.final:
            exposed = e.WeightsExposed(version=data.version, purpose="publish", address={}, bytes=1)
            self._owe("trainer", "weights.exposed", "cell-0", exposed, event)

    def _on_weights_exposed(self, event: Event, data: e.WeightsExposed) -> None:
        self._exposed = data.version
        for name in sorted(self._serving):
            published = e.WeightsPublished(version=data.version, bytes=1, seconds=0.1, transport="test")
            self._owe("rollout", "weights.published", name, published, event)

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

    # --- micro-steps and calls

    def _claimable(self) -> list[str]:
        if self._opened is None or not self._free:
            return []
        return [cell for cell in self._training if self._members is None or cell in self._members]

    def _claim(self, cell: str) -> None:
        name, free = min(self._free.items(), key=lambda item: item[1].seq)
        del self._free[name]
        batch = self._rows[name].batch
        self._held[name] = (cell, free)
        claimed = e.MicroStepClaimed(batch=batch, cell=cell, epoch=self._training[cell])
        event = self._say("trainer", "micro-step.claimed", name, claimed, cause=free, instance=f"trainer-{cell}")
        rows = self._rows[name].rows
        done = e.MicroStepDone(
            batch=batch,
            cell=cell,
            loss=0.0,
            tokens=sum(row.tokens for row in rows),
            targets=sum(row.targets for row in rows),
            executions=len({row.execution for row in rows}),
            masked=0,
            gap=GapStats(),
            seconds=0.1,
        )
        self._owe("trainer", "micro-step.done", name, done, event, f"trainer-{cell}")

    def _restart(self, cell: str) -> None:
        """A trainer's process ends and starts again: what it had claimed in the batch is released, done or not."""
        joined = e.ServiceJoined(url="", pid=1)
        self._say("trainer", "service.joined", f"trainer-{cell}", joined, instance=f"trainer-{cell}")
        self._owed = [each for each in self._owed if not (each.kind == "micro-step.done" and each.data.cell == cell)]
        for name in sorted(name for name, (holder, _) in self._held.items() if holder == cell):
            released = e.MicroStepReleased(batch=self._rows[name].batch, reason="test")
            self._say("trainer", "micro-step.released", name, released, instance=f"trainer-{cell}")

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
