"""A scripted world around the scheduler's decider: it answers decisions with facts, in any order a seed picks.

Nothing here decides: it holds what each other service would say next and lets the test choose who speaks.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from schemas import events as e
from schemas import ids
from schemas.config import Config
from schemas.config_file import from_tree
from schemas.envelope import Decision, Event
from schemas.flags import NEWEST
from schemas.units import Reward, TaskRef, check
from services.mesh.decider import Driver
from services.scheduler.decider import Scheduler
from tests.scheduler.training import TrainingSide

RUN = "r-test"
ONCE = ("micro-step.released", "service.joined")
"""What is never said again: it answers the newest event of its entity."""


def small_config(**overrides: Any) -> Config:
    tree: dict[str, Any] = {
        "name": "small",
        "steps": 8,
        "cells": {"count": 3, "capacity": 8, "trainable": 1},
        "scheduler": {"N": 4, "B": 2, "mu": 2, "phi": 0.5, "rho_min": 0.5, "tau_s": 1.0},
        "harness": {"command": ["true"]},
    }
    for key, value in overrides.items():
        section, _, name = key.partition("__")
        if name:
            tree.setdefault(section, {})[name] = value
        else:
            tree[section] = value
    return from_tree(tree, where="test")


class World(TrainingSide):
    """Feeds one scheduler. `pending` are facts that may be said next; `log` is everything said, in order."""

    def __init__(
        self,
        config: Config,
        *,
        seed: int = 0,
        fail_groups: float = 0.0,
        operator: float = 0.0,
        lose: float = 0.0,
        late: float = 0.0,
        lose_cells: float = 0.0,
        restore: float = 0.0,
        flags: Sequence[str] = NEWEST,
    ) -> None:
        super().__init__()
        self.config, self.flags = config, list(flags)
        self.lose, self.late = lose, late
        """How often an attempt is lost instead of going on, and how often what it would have said is still said later."""
        self.measuring: set[str] = set()
        """Held-out executions that are not finished."""
        self.lose_cells = lose_cells
        """How often a cell's process stops to answer; another one joins some time later."""
        self.restore = restore
        """How often the core's process starts again, from any version that isn't older than the exposed one."""
        self.attempts: dict[str, int] = {}
        """Execution to its newest attempt."""
        self.lost = 0
        self.operator = operator
        """How often somebody pauses the run or withdraws a cell; what is nobody's turn is undone in the end."""
        self.rng = random.Random(seed)
        self.fail_groups = fail_groups
        self.driver: Driver[Any] = Driver(Scheduler())
        self.seq = 0
        self.now_us = 1_000_000
        self.pending: list[tuple[str, str, str, Any]] = []
        self.log: list[Event] = []
        self.decisions: list[Decision] = []
        self.per_input: dict[int, list[Decision]] = {}
        self.members: dict[str, list[str]] = {}
        self.unfinished: dict[str, set[str]] = {}
        self.failing: set[str] = set()
        """Groups that will be discarded."""
        self.ready: list[str] = []
        self.finished = False

    @property
    def state(self) -> Any:
        return self.driver.state

    @property
    def busy(self) -> bool:
        """Whether somebody has something to say, without an operator."""
        return bool(self.pending or self.driver.decider.timers(self.state) or self._can_pack())

    def start(self) -> None:
        tasks = [TaskRef(name=f"task-{i}", digest=str(i)) for i in range(5)]
        held_out = [TaskRef(name=f"held-{i}", digest=f"h{i}") for i in range(3)] if self.config.eval.every else []
        data = e.RunStarted(
            seed=self.config.seed, config=self.config, tasks=tasks, held_out=held_out, code="test", flags=self.flags
        )
        self.say("operator", "run.started", RUN, data)
        cells = self.config.cells
        names = [*map(ids.cell_id, range(cells.count)), *map(ids.pool_id, range(cells.pool))]
        for name in names:
            self._join("rollout", name)
            if not ids.in_pool(name):
                self._join("trainer", name)
            self.pending.append(
                (
                    "rollout",
                    "cell.joined",
                    name,
                    e.CellJoined(
                        index=ids.cell_index(name),
                        capacity=cells.capacity_of(name),
                        url="",
                        engine="scripted",
                        version=0,
                        capabilities=[],
                    ),
                )
            )

    def say(self, owner: str, kind: str, entity: str, data: Any) -> list[Decision]:
        self.seq += 1
        self.now_us += self.rng.randrange(1, 400_000)
        event = Event(
            seq=self.seq,
            time_us=self.now_us,
            kind=kind,
            entity=entity,
            owner=owner,
            instance="",
            causation=0,
            id=f"{self.seq}",
            data=data,
        )
        self.log.append(event)
        decisions = self.driver.feed(event)
        self.decisions += decisions
        self.per_input[self.seq] = decisions
        for decision in decisions:
            self._answer(decision)
        return decisions

    def step(self) -> bool:
        """Let somebody speak; False when nobody has anything to say and no timer is due."""
        if self.rng.random() < self.operator and not self.finished:
            self._operate()
        if self.rng.random() < self.lose_cells and not self.finished and self.state.cells:
            self._lose_cell(self.rng.choice(list(self.state.cells)))
        if self.rng.random() < self.restore and not self.finished and self.state.version:
            self._restore(self.rng.randint(self.exposed, self.state.version))
        timers = self.driver.decider.timers(self.state)
        choices = len(self.pending) + (1 if timers else 0)
        if not self.finished and not choices and not self._can_pack():
            return self._undo()
        if self.finished:
            return False
        if not choices:
            self._pack()
            return True
        pick = self.rng.randrange(choices)
        if pick < len(self.pending):
            owner, kind, entity, data = self.pending.pop(pick)
            if owner == "harness" and self.rng.random() < self.lose and self._newest(entity, data.attempt):
                too_late = (owner, kind, entity, data)
                owner, kind, data = "harness", "execution.lost", e.ExecutionLost(attempt=data.attempt, reason="test")
                self.lost += 1
                if self.rng.random() < self.late:
                    self.pending.append(too_late)
            if kind == "micro-step.released" and (self.claims.get(entity) != data.reason or not self._open):
                return True
            if kind == "micro-step.done":
                self._trained(entity, data)
            newest = owner != "harness" or self._newest(entity, data.attempt)
            if kind == "execution.lost":
                self.attempts[entity] = data.attempt + 1
            self.say(owner, kind, entity, data)
            if newest:
                self._follow_up(owner, kind, entity, data)
            if self.rng.random() < 0.1 and kind not in ONCE:  # a fact may be read twice
                self.say(owner, kind, entity, data)
        else:
            timer, (purpose, due_us) = next(iter(timers.items()))
            self.now_us = max(self.now_us, due_us)
            self.say("scheduler", "timer.fired", timer, e.TimerFired(purpose=purpose))
        self._pack()
        return True

    def run(self, limit: int = 20_000) -> None:
        self.start()
        for _ in range(limit):
            if not self.step():
                return
        raise AssertionError(f"no end after {limit} steps: {self.state!r}")

    def _newest(self, execution: str, attempt: int) -> bool:
        return attempt == self.attempts.get(execution, 0)

    def _operate(self) -> None:
        kind, entity, data = self.rng.choice(
            [
                ("run.paused", RUN, e.RunPaused(by="test")),
                ("run.resumed", RUN, e.RunResumed(by="test")),
                *[("cell.withdrawn", name, e.CellWithdrawn(by="test")) for name in self.state.cells],
                *[("cell.reinstated", name, e.CellReinstated(by="test")) for name in self.state.cells],
            ]
        )
        self.say("operator", kind, entity, data)

    def _undo(self) -> bool:
        """True when there was something that an operator held up."""
        before = len(self.log)
        if self.state.paused:
            self.say("operator", "run.resumed", RUN, e.RunResumed(by="test"))
        for name, cell in list(self.state.cells.items()):
            if cell.withdrawn:
                self.say("operator", "cell.reinstated", name, e.CellReinstated(by="test"))
        return len(self.log) > before

    def _join(self, service: str, cell: str) -> None:
        self.say(service, "service.joined", f"{service}-{cell}", e.ServiceJoined(url="", pid=0))
        self.processes[f"{service}-{cell}"] = self.seq

    def _answer(self, decision: Decision) -> None:
        data = decision.data
        if decision.kind == "group.dispatched":
            self.members[decision.entity] = data.executions
            self.unfinished[decision.entity] = set(data.executions)
        elif decision.kind == "measurement.opened":
            self.measuring.update(data.executions)
        elif decision.kind == "execution.placed":
            started = e.ExecutionStarted(attempt=data.attempt)
            self.pending.append(("harness", "execution.started", decision.entity, started))
        elif decision.kind == "cell.role-transition" and data.phase == "decided":
            owner = "trainer" if data.target == "train" else "rollout"
            version = self.exposed if data.target == "rollout" else -1
            self.pending.append(
                (
                    owner,
                    "cell.role-transition",
                    decision.entity,
                    e.CellRoleTransition(
                        phase="acquired", source=data.source, target=data.target, epoch=data.epoch, version=version
                    ),
                )
            )
        elif decision.kind == "cell.role-transition" and data.phase == "failed":
            # The core hears of it: what the cell trained is free again, and the sum is made without it.
            mine = [name for name, by in self.claims.items() if by == decision.entity]
            for name in mine:
                self.held.pop(name, None)
                assert self.batch is not None
                released = e.MicroStepReleased(batch=self.batch[0], reason=decision.entity)
                self.pending.append(("trainer", "micro-step.released", name, released))
            if self.rng.random() < 0.5:
                self.pending = [each for each in self.pending if each[1] != "batch.stepped"]
        elif decision.kind == "batch.opened":
            self._batch_opened(decision)
        elif decision.kind == "batch.join-closed":
            self._join_closed(decision)
        elif decision.kind == "run.finished":
            self.finished = True

    def _follow_up(self, owner: str, kind: str, entity: str, data: Any) -> None:
        if kind == "execution.started":
            reason = self.rng.choice(["completed", "failed", "harness_timeout"])
            finished = e.ExecutionFinished(
                attempt=data.attempt, reason=reason, exit_code=0, seconds=1.0, workspace="w", workspace_digest="d"
            )
            self.pending.append(("harness", "execution.finished", entity, finished))
        elif kind == "execution.finished" and entity in self.measuring:
            self.measuring.remove(entity)
            outcome = self.rng.choice(["valid", "valid", "placeholder", "excluded"])
            reward = self.rng.choice([0.0, 0.5, 1.0]) if outcome == "valid" else 0.0
            settled = e.ExecutionSettled(attempt=data.attempt, outcome=outcome, reward=reward)
            self.pending.append(("trajectories", "execution.settled", entity, settled))
        elif kind == "execution.finished":
            group = ids.group_of(entity)
            if entity in self.unfinished.get(group, ()):
                self.unfinished[group].discard(entity)
                self._close(group)
        elif kind == "execution.cancelled":
            attempt = self.attempts.get(entity, 0)
            finished = e.ExecutionFinished(
                attempt=attempt, reason="surplus", exit_code=None, seconds=1.0, workspace="", workspace_digest=""
            )
            self.pending.append(("harness", "execution.finished", entity, finished))
        elif kind == "group.ready":
            self.ready.append(entity)
        elif kind == "batch.stepped" and entity in self.final:
            exposed = e.WeightsExposed(version=data.version, purpose="publish", address={}, bytes=1)
            self.pending.append(("trainer", "weights.exposed", "cell-0", exposed))
        elif kind == "service.joined":
            self.processes[entity] = self.seq
            if owner == "rollout":
                name = entity.removeprefix("rollout-")
                joined = e.CellJoined(
                    index=ids.cell_index(name),
                    capacity=self.config.cells.capacity_of(name),
                    url="",
                    engine="scripted",
                    version=self.exposed,
                    capabilities=[],
                )
                self.pending.append(("rollout", "cell.joined", name, joined))
        elif kind == "micro-step.done":
            self._step_again()
        elif kind == "micro-step.released" and self.batch is not None and data.batch == self.batch[0]:
            self._claim(entity)
        elif kind == "weights.exposed":
            self.exposed = max(self.exposed, data.version)
            for name, cell in self.state.cells.items():
                if cell.place in ("serving", "returning"):
                    published = e.WeightsPublished(version=data.version, bytes=1, seconds=0.1, transport="test")
                    self.pending.append(("rollout", "weights.published", name, published))

    def _close(self, group: str) -> None:
        """Of a good group every execution is valid, so it is complete with N of them; the others are cancelled, in any order
        with everything else, and some of them still end by themselves."""
        left, N = self.unfinished[group], self.config.scheduler.N
        ended = self.config.scheduler.group_size - len(left)
        if ended == N and self.rng.random() < self.fail_groups:
            self.failing.add(group)
        if left and (group in self.failing or ended < N):
            return
        for execution in sorted(left):
            checks = [check("valid executions N", N, ">=", N)]
            cancelled = e.ExecutionCancelled(reason="surplus", checks=checks)
            self.pending.append(("trajectories", "execution.cancelled", execution, cancelled))
        first = self.members.pop(group)[0]
        del self.unfinished[group]
        if group in self.failing:
            discarded = e.GroupDiscarded(reason="one reward", valid=1)
            self.pending.append(("trajectories", "group.discarded", group, discarded))
        else:
            reward = Reward(execution=first, attempt=0, outcome="valid", reward=1.0, advantage=0.0)
            ready = e.GroupReady(rewards=[reward], mean=1.0, std=0.0, surplus=sorted(left))
            self.pending.append(("trajectories", "group.ready", group, ready))
