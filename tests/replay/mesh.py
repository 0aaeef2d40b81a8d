"""A run of the three real deciders in a scripted world, written down as one log with its RECORDS and calls.

Every decider reads the log at its own pace and says what it decides; the world says one of the facts that it owes. A seed
picks whose turn it is, so decisions lie behind facts that their decider had not read, as in a real log. No shell, no bus.
"""

from __future__ import annotations

import random
from typing import Any

from schemas import events as e
from schemas.envelope import Event
from schemas.flags import NEWEST
from schemas.ids import decision_id
from schemas.units import FinishReason, TaskRef
from services.mesh.decider import Driver
from services.packer.core.packing import Packer
from services.scheduler.decider import Scheduler
from services.trajectories.core.outcome import Outcome
from tests.replay.execution_side import ExecutionSide
from tests.replay.training_side import TrainingSide
from tests.scheduler.world import RUN, small_config

_SLOW = {"execution.finished": 0.03, "timer.fired": 0.1}
"""How often these happen when they could: they take long beside everything else."""


class Mesh(TrainingSide, ExecutionSide):
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
        config = small_config(**{**shape, **overrides})
        super().__init__(random.Random(f"mesh:{seed}"), config, fail=fail, scores=scores, reasons=reasons)
        self.lose, self.restart = lose, restart
        self._drivers = [Driver(each) for each in (Scheduler(), Outcome(), Packer())]
        self._read = [0 for _ in self._drivers]
        self._due: dict[str, int] = {}
        """Timers to their time."""

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

    def _on_timer_set(self, event: Event, data: e.TimerSet) -> None:
        self._due[event.entity] = data.due_us
        self._owe("scheduler", "timer.fired", event.entity, e.TimerFired(purpose=data.purpose), event)
