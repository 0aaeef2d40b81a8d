"""When the world answers, and what: the numbers behind `replay.simulator.world`.

`Facts` knows who says what after whom; how long that takes, and what can't be known from the log, it asks for here. Two give
it: `Modelled` from a scenario's parameters and a seed, and `replay.whatif.answers` from a recorded run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from replay.simulator.durations import Draw, Durations
from replay.simulator.scenario import Scenario
from schemas import events as e
from schemas import streams
from schemas.envelope import Event
from schemas.ids import cell_id, cell_index, pool_id
from schemas.units import GapStats

_GAP = GapStats()


class Said(NamedTuple):
    """A fact to come: so many microseconds after what it answers, and its data."""

    after_us: int
    data: Any


class Answers(Protocol):
    """Every method is a function of what it is given and of ids, never of when or how often it is asked."""

    load_effect: float

    def joins(self) -> Sequence[tuple[str, Said]]:
        """Engines that come up after the beginning of the run."""

    def started(self, placed: Event) -> Said: ...

    def run(self, execution: str, attempt: int) -> Draw:
        """What the attempt will do once it is started."""

    def finished(self, execution: str, attempt: int, draw: Draw) -> e.ExecutionFinished: ...

    def sealed(self, finished: Event) -> Said: ...

    def frozen(self, sealed: Event) -> Said: ...

    def evaluation_claimed(self, requested: Event) -> Said: ...

    def evaluated(self, evaluation: str, asked: e.EvaluationRequested) -> Said:
        """A score, or that there is none."""

    def phase(self, event: Event, phase: str, publication_us: int) -> tuple[int, float]:
        """Microseconds until a cell says its next phase after `event`, and the seconds that it states. `publication_us`: until
        all engines have the weights that are on their way; 0 when none are."""

    def claimed(self, micro_step: str, cell: str) -> int:
        """Microseconds until a free cell has claimed what is there for it."""

    def trained(self, micro_step: str, enqueued: e.MicroStepEnqueued, cell: str) -> Said: ...

    def stepped(self, proposed: e.BatchStepped) -> Said:
        """The update of a batch, of which `proposed` holds what follows from its micro-steps."""

    def exposed(self, version: int, purpose: str) -> int: ...

    def published(self, version: int) -> Sequence[tuple[int, frozenset[str] | None, e.WeightsPublished]]:
        """Microseconds until these engines, or all, serve the version."""

    def late(self, timer: str) -> int:
        """Microseconds between a timer's due time and its firing."""


class Modelled:
    """The answers of a scenario's world."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self._config, self._world = scenario.run, scenario.world
        self.load_effect = scenario.world.load_effect
        self._durations = Durations(scenario.world, seed)
        s, world = scenario.run.scheduler, scenario.world
        work = world.work_node_h * (1.0 if s.strategy == "async" else world.shared_work)
        self._s_per_token = work * 3600 / (s.B * s.N * world.execution_tokens)

    def __repr__(self) -> str:
        return f"<Modelled {self._durations!r}>"

    def joins(self) -> list[tuple[str, Said]]:
        cells = self._config.cells
        engines = [(cell_id(index), index, cells.capacity) for index in range(cells.count)]
        engines += [(pool_id(index), index, cells.pool_capacity) for index in range(cells.pool)]
        return [
            (
                name,
                Said(
                    0,
                    e.CellJoined(
                        index=index, capacity=capacity, url="", engine="simulated", version=0, capabilities=[]
                    ),
                ),
            )
            for name, index, capacity in engines
        ]

    def started(self, placed: Event) -> Said:
        return Said(0, e.ExecutionStarted(attempt=placed.data.attempt))

    def run(self, execution: str, attempt: int) -> Draw:
        return self._durations.draw(execution)

    def finished(self, execution: str, attempt: int, draw: Draw) -> e.ExecutionFinished:
        return e.ExecutionFinished(
            attempt=attempt,
            reason=draw.reason,
            exit_code=0 if draw.reason == "completed" else None,
            seconds=draw.seconds,
            workspace=streams.workspace_blob(execution, attempt),
            workspace_digest="simulated",
        )

    def sealed(self, finished: Event) -> Said:
        data: e.ExecutionFinished = finished.data
        return Said(0, e.ExecutionSealed(attempt=data.attempt, records=1, last_record=0, digest="simulated"))

    def frozen(self, sealed: Event) -> Said:
        attempt, tokens = sealed.data.attempt, self._world.execution_tokens
        frozen = e.ExecutionTreeFrozen(
            attempt=attempt,
            blob=streams.tree_blob(sealed.entity, attempt),
            digest="simulated",
            parents=[-1],
            tokens=[tokens],
            trainable=[max(1, tokens // 2)],
            leaves=[0],
            classes=[0],
        )
        return Said(0, frozen)

    def evaluation_claimed(self, requested: Event) -> Said:
        return Said(0, e.EvaluationClaimed(evaluator="evaluator"))

    def evaluated(self, evaluation: str, asked: e.EvaluationRequested) -> Said:
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
        return Said(_us(self._world.evaluate_s), scored)

    def phase(self, event: Event, phase: str, publication_us: int) -> tuple[int, float]:
        satellite, seconds = cell_index(event.entity) > 0, 0.0
        if phase == "acquired" and event.data.target == "train":
            seconds = self._world.to_train_s + (self._world.pull_s if satellite else 0.0)
        elif phase == "acquired":
            # The core has its weights; the others serve once they have been published.
            seconds = max(self._world.to_rollout_s, publication_us / 1e6 if satellite else 0.0)
        return _us(seconds), seconds

    def claimed(self, micro_step: str, cell: str) -> int:
        return 0

    def trained(self, micro_step: str, enqueued: e.MicroStepEnqueued, cell: str) -> Said:
        seconds = enqueued.tokens * self._s_per_token / self._world.cell_nodes
        return Said(_us(seconds), micro_step_done(enqueued, cell, seconds))

    def stepped(self, proposed: e.BatchStepped) -> Said:
        seconds = self._world.step_s + (0.0 if self._config.scheduler.streaming else self._world.whole_batch_s)
        return Said(_us(seconds), msgspec.structs.replace(proposed, seconds=seconds))

    def exposed(self, version: int, purpose: str) -> int:
        return 0

    def published(self, version: int) -> list[tuple[int, frozenset[str] | None, e.WeightsPublished]]:
        seconds = self._world.publish_s
        published = e.WeightsPublished(version=version, bytes=0, seconds=seconds, transport="simulated")
        return [(_us(seconds), None, published)]

    def late(self, timer: str) -> int:
        return 0


def micro_step_done(enqueued: e.MicroStepEnqueued, cell: str, seconds: float) -> e.MicroStepDone:
    """A micro-step that nobody has trained: what follows from its rows, and no loss."""
    return e.MicroStepDone(
        batch=enqueued.batch,
        cell=cell,
        loss=0.0,
        tokens=enqueued.tokens,
        targets=sum(row.targets for row in enqueued.rows),
        executions=len({row.execution for row in enqueued.rows}),
        masked=0,
        gap=_GAP,
        seconds=seconds,
    )


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
