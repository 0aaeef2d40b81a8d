"""The world of a simulated run: what harness, evaluator, proxy, freezer, engines and trainers would say, and when.

It decides nothing and reads nothing but the log, as services do. Durations are the scenario's; who claims a micro-step is
the free training cell of lowest index; a cell's micro-step takes its share of W over the cell's nodes. Not modelled: the
time of a message, of a model call, of moving a call to another engine, and every kind of failure but time-outs.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from replay.simulator.durations import Draw, Durations
from replay.simulator.progress import Progress
from replay.simulator.scenario import Scenario
from schemas import events as e
from schemas import streams
from schemas.envelope import Event
from schemas.ids import cell_id, cell_index, pool_id
from schemas.units import GapStats

_GAP = GapStats()


class Say(Protocol):
    def __call__(
        self, owner: str, kind: str, entity: str, data: Any, *, id: str, cause: int, instance: str = ""
    ) -> None: ...


class Facts:
    """`answer` hears every event; `next_us` and `happen` are the clock's side."""

    def __init__(
        self, scenario: Scenario, seed: int, *, say: Say, timers: Callable[[str], dict[str, tuple[str, int]]]
    ) -> None:
        self._config, self._world = scenario.run, scenario.world
        self._say, self._timers = say, timers
        self._durations = Durations(scenario.world, seed)
        self._progress = Progress(scenario.world.load_effect)
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0
        self._now_us = 0
        s = scenario.run.scheduler
        world = scenario.world
        work = world.work_node_h * (1.0 if s.strategy == "async" else world.shared_work)
        self._s_per_token = work * 3600 / (s.B * s.N * world.execution_tokens)
        self._causes: dict[str, Event] = {}
        """Execution to the event that placed it."""
        self._started: dict[str, int] = {}
        """Execution that runs to the time of its start."""
        self._cancelled: set[str] = set()
        """Surplus executions without an outcome."""
        self._serving: dict[str, int] = {}
        """Engine that serves to its capacity."""
        self._training: dict[str, int] = {}
        """Cell that trains to its epoch."""
        self._idle: set[str] = set()
        """Training cells without a micro-step."""
        self._waiting: deque[tuple[Event, e.MicroStepEnqueued]] = deque()
        self._batch: e.BatchOpened | None = None
        self._done: list[e.MicroStepDone] = []
        self._exposed, self._published_us = 0, 0
        """Version exposed last, and when every engine has it."""
        self._on: dict[str, Callable[[Event, Any], None]] = {
            "execution.placed": self._execution_placed,
            "execution.started": self._execution_started,
            "execution.finished": self._execution_finished,
            "execution.cancelled": self._execution_cancelled,
            "execution.settled": self._execution_settled,
            "execution.sealed": self._execution_sealed,
            "evaluation.requested": self._evaluation_requested,
            "evaluation.claimed": self._evaluation_claimed,
            "cell.role-transition": self._role_transition,
            "burst.ended": self._burst_ended,
            "batch.opened": self._batch_opened,
            "batch.join-closed": self._join_closed,
            "batch.stepped": self._batch_stepped,
            "micro-step.enqueued": self._enqueued,
            "micro-step.claimed": self._claimed,
            "micro-step.done": self._micro_step_done,
            "weights.exposed": self._weights_exposed,
            "timer.set": self._timer_set,
        }
        self._asked: dict[str, e.EvaluationRequested] = {}
        self._claims: dict[str, tuple[float, e.MicroStepEnqueued]] = {}

    def __repr__(self) -> str:
        return f"<Facts [{len(self._heap)} to come, {self._progress!r}]>"

    def begin(self) -> None:
        """Engines are up."""
        cells = self._config.cells
        for index in range(cells.count):
            self._join(cell_id(index), index, cells.capacity)
        for index in range(cells.pool):
            self._join(pool_id(index), index, cells.pool_capacity)

    def answer(self, event: Event) -> None:
        self._now_us = event.time_us
        handler = self._on.get(event.kind)
        if handler is not None:
            handler(event, event.data)

    def next_us(self) -> int | None:
        """When the next thing happens."""
        ends = self._progress.next_us()
        if not self._heap:
            return ends
        return self._heap[0][0] if ends is None else min(ends, self._heap[0][0])

    def happen(self, now_us: int) -> None:
        """The one next thing, now."""
        self._now_us = now_us
        ends = self._progress.next_us()
        if ends is not None and (not self._heap or ends <= self._heap[0][0]):
            self._finish(*self._progress.end(now_us))
        else:
            heapq.heappop(self._heap)[2]()

    def _later(self, seconds: float, what: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (self._now_us + round(seconds * 1e6), self._count, what))

    # --- executions and their evaluations

    def _execution_placed(self, event: Event, data: e.ExecutionPlaced) -> None:
        if event.entity in self._cancelled:
            return
        self._causes[event.entity] = event
        started = e.ExecutionStarted(attempt=data.attempt)
        self._say("harness", "execution.started", event.entity, started, id=f"{event.id}.started", cause=event.seq)

    def _execution_started(self, event: Event, data: e.ExecutionStarted) -> None:
        self._started[event.entity] = event.time_us
        self._progress.start(event.time_us, event.entity, self._durations.draw(event.entity))

    def _finish(self, execution: str, draw: Draw) -> None:
        placed = self._causes.pop(execution)
        del self._started[execution]
        attempt: int = placed.data.attempt
        data = e.ExecutionFinished(
            attempt=attempt,
            reason=draw.reason,
            exit_code=0 if draw.reason == "completed" else None,
            seconds=draw.seconds,
            workspace=streams.workspace_blob(execution, attempt),
            workspace_digest="simulated",
        )
        self._say("harness", "execution.finished", execution, data, id=f"{placed.id}.finished", cause=placed.seq)

    def _execution_cancelled(self, event: Event, data: e.ExecutionCancelled) -> None:
        """It stops at once."""
        name = event.entity
        self._cancelled.add(name)
        self._causes.pop(name, None)
        since_us = self._started.pop(name, None)
        if since_us is not None:
            self._progress.drop(event.time_us, name)
        finished = e.ExecutionFinished(
            attempt=0,
            reason=data.reason,
            exit_code=None,
            seconds=0.0 if since_us is None else (event.time_us - since_us) / 1e6,
            workspace="",
            workspace_digest="",
        )
        self._say("harness", "execution.finished", name, finished, id=f"{event.id}.finished", cause=event.seq)

    def _execution_settled(self, event: Event, data: e.ExecutionSettled) -> None:
        self._cancelled.discard(event.entity)

    def _execution_finished(self, event: Event, data: e.ExecutionFinished) -> None:
        sealed = e.ExecutionSealed(attempt=data.attempt, records=1, last_record=0, digest="simulated")
        self._say("proxy", "execution.sealed", event.entity, sealed, id=f"{event.id}.sealed", cause=event.seq)

    def _execution_sealed(self, event: Event, data: e.ExecutionSealed) -> None:
        name, attempt, tokens = event.entity, data.attempt, self._world.execution_tokens
        frozen = e.ExecutionTreeFrozen(
            attempt=attempt,
            blob=streams.tree_blob(name, attempt),
            digest="simulated",
            parents=[-1],
            tokens=[tokens],
            trainable=[max(1, tokens // 2)],
            leaves=[0],
            classes=[0],
        )
        self._say("trajectories", "execution.tree-frozen", name, frozen, id=f"{event.id}.frozen", cause=event.seq)

    def _evaluation_requested(self, event: Event, data: e.EvaluationRequested) -> None:
        self._asked[event.entity] = data
        claimed = e.EvaluationClaimed(evaluator="evaluator")
        self._say("evaluator", "evaluation.claimed", event.entity, claimed, id=f"{event.id}.claimed", cause=event.seq)

    def _evaluation_claimed(self, event: Event, data: e.EvaluationClaimed) -> None:
        asked = self._asked.pop(event.entity)

        def score() -> None:
            scored = e.EvaluationScored(
                execution=asked.execution,
                attempt=asked.attempt,
                score=self._durations.draw(asked.execution).score,
                valid=True,
                workspace_digest=asked.workspace_digest,
                branch=-1,
                reference=asked.workspace,
                seconds=self._world.evaluate_s,
            )
            self._say("evaluator", "evaluation.scored", event.entity, scored, id=f"{event.id}.scored", cause=event.seq)

        self._later(self._world.evaluate_s, score)

    # --- cells

    def _join(self, name: str, index: int, capacity: int) -> None:
        joined = e.CellJoined(index=index, capacity=capacity, url="", engine="simulated", version=0, capabilities=[])
        self._say("rollout", "cell.joined", name, joined, id=f"{name}.joined", cause=0, instance=f"rollout-{name}")
        self._serve(name, capacity)

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
                self._phase(event, "rollout", "draining", 0.0)
            case ("train", "draining"):
                self._phase(event, "rollout", "drained", 0.0)
            case ("train", "drained"):
                self._phase(event, "rollout", "released", 0.0)
            case ("train", "released"):
                pull = self._world.pull_s if cell_index(name) else 0.0
                self._phase(event, "trainer", "acquired", self._world.to_train_s + pull)
            case ("train", "completed"):
                self._training[name] = data.epoch
                self._idle.add(name)
                self._claim()
            case ("rollout", "decided"):
                self._training.pop(name, None)
                self._idle.discard(name)
                self._phase(event, "trainer", "released", 0.0)
            case ("rollout", "released"):
                # The core has its weights; the others serve once they have been published.
                late = max(0, self._published_us - self._now_us) / 1e6 if cell_index(name) else 0.0
                self._phase(event, "rollout", "acquired", max(self._world.to_rollout_s, late))
            case ("rollout", "completed"):
                self._serve(name, self._config.cells.capacity)

    def _phase(self, event: Event, owner: str, phase: Any, seconds: float) -> None:
        data: e.CellRoleTransition = event.data

        def say() -> None:
            said = e.CellRoleTransition(
                phase=phase,
                source=data.source,
                target=data.target,
                epoch=data.epoch,
                seconds=seconds,
                version=self._exposed if (data.target, phase) == ("rollout", "acquired") else -1,
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

        if seconds:
            self._later(seconds, say)
        else:
            say()

    # --- training

    def _burst_ended(self, event: Event, data: e.BurstEnded) -> None:
        """Who goes back takes nothing any more."""
        staying = set(data.stays)
        self._training = {name: epoch for name, epoch in self._training.items() if name in staying}
        self._idle &= staying

    def _batch_opened(self, event: Event, data: e.BatchOpened) -> None:
        self._batch, self._done = data, []
        self._expose(event, data.version, "join")

    def _enqueued(self, event: Event, data: e.MicroStepEnqueued) -> None:
        self._waiting.append((event, data))
        self._claim()

    def _claim(self) -> None:
        while self._waiting and self._idle:
            event, data = self._waiting.popleft()
            name = min(self._idle, key=cell_index)
            self._idle.discard(name)
            claimed = e.MicroStepClaimed(batch=data.batch, cell=name, epoch=self._training[name])
            self._say(
                "trainer",
                "micro-step.claimed",
                event.entity,
                claimed,
                id=f"{event.id}.claimed.{name}",
                cause=event.seq,
                instance=f"trainer-{name}",
            )
            seconds = data.tokens * self._s_per_token / self._world.cell_nodes
            self._claims[event.entity] = (seconds, data)

    def _claimed(self, event: Event, data: e.MicroStepClaimed) -> None:
        seconds, enqueued = self._claims.pop(event.entity)
        done = e.MicroStepDone(
            batch=data.batch,
            cell=data.cell,
            loss=0.0,
            tokens=enqueued.tokens,
            targets=sum(row.targets for row in enqueued.rows),
            executions=len({row.execution for row in enqueued.rows}),
            masked=0,
            gap=_GAP,
            seconds=seconds,
        )
        self._later(
            seconds,
            lambda: self._say(
                "trainer",
                "micro-step.done",
                event.entity,
                done,
                id=f"{event.id}.done",
                cause=event.seq,
                instance=event.instance,
            ),
        )

    def _micro_step_done(self, event: Event, data: e.MicroStepDone) -> None:
        self._done.append(data)
        if data.cell in self._training:
            self._idle.add(data.cell)
        self._claim()

    def _join_closed(self, event: Event, data: e.BatchJoinClosed) -> None:
        assert self._batch is not None
        batch, done = self._batch, self._done
        whole = 0.0 if self._streams() else self._world.whole_batch_s
        seconds = self._world.step_s + whole

        def step() -> None:
            version = batch.version + 1
            saved = e.CheckpointSaved(
                version=version, path=f"checkpoints/v{version:06d}", digest="simulated", log_sequence=event.seq
            )
            self._trainer("checkpoint.saved", f"v{version:06d}", saved, event, "saved")
            stepped = e.BatchStepped(
                step=batch.step,
                version=version,
                members=data.members,
                loss=0.0,
                grad_norm=0.0,
                lr=self._config.trainer.lr,
                micro_steps=len(done),
                tokens=sum(each.tokens for each in done),
                targets=sum(each.targets for each in done),
                executions=sum(each.executions for each in done),
                masked=0,
                reward=0.0,
                gap=_GAP,
                seconds=seconds,
                as_of=event.seq,
            )
            self._trainer("batch.stepped", event.entity, stepped, event, "stepped")

        self._later(seconds, step)

    def _streams(self) -> bool:
        return self._config.scheduler.streaming

    def _batch_stepped(self, event: Event, data: e.BatchStepped) -> None:
        assert self._batch is not None
        if self._batch.final:
            self._expose(event, data.version, "publish")

    def _expose(self, event: Event, version: int, purpose: Any) -> None:
        exposed = e.WeightsExposed(version=version, purpose=purpose, address={}, bytes=0)
        self._trainer("weights.exposed", cell_id(0), exposed, event, f"exposed.{purpose}")

    def _weights_exposed(self, event: Event, data: e.WeightsExposed) -> None:
        if data.purpose != "publish":
            return
        self._exposed = data.version
        self._published_us = event.time_us + round(self._world.publish_s * 1e6)

        def publish() -> None:
            published = e.WeightsPublished(
                version=data.version, bytes=0, seconds=self._world.publish_s, transport="simulated"
            )
            for name in self._serving:
                self._say(
                    "rollout",
                    "weights.published",
                    name,
                    published,
                    id=f"{event.id}.published.{name}",
                    cause=event.seq,
                    instance=f"rollout-{name}",
                )

        self._later(self._world.publish_s, publish)

    def _trainer(self, kind: str, entity: str, data: Any, event: Event, verb: str) -> None:
        self._say("trainer", kind, entity, data, id=f"{event.id}.{verb}", cause=event.seq, instance="trainer-cell-0")

    # --- timers

    def _timer_set(self, event: Event, data: e.TimerSet) -> None:
        def fire() -> None:
            # One that its decider no longer wants is not fired, as in its shell.
            if event.entity in self._timers(event.owner):
                fired = e.TimerFired(purpose=data.purpose)
                self._say(event.owner, "timer.fired", event.entity, fired, id=f"{event.entity}.fired", cause=0)

        self._later(max(0.0, (data.due_us - self._now_us) / 1e6), fire)
