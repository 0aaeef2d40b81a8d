"""A scripted world around the packer's decider: groups, batches, and cells that take micro-steps."""

from __future__ import annotations

from typing import Any

from schemas import events as e
from schemas.envelope import Decision, Event
from schemas.ids import batch_id, execution_id, group_id, group_of
from schemas.units import GapStats, RowPlan
from services.mesh.decider import Driver
from services.packer.core.packing import Packer
from services.packer.core.state import State
from tests.facts import fact
from tests.trajectories.trees import config

RUN = "r-test"


class World:
    """Feeds one driver; `log` is every input, `decisions` everything decided."""

    def __init__(self, *, T: int = 100, reorder_groups: int = 2, ahead: int = 2, **scheduler: Any) -> None:
        self.driver: Driver[State] = Driver(Packer())
        self.seq = 0
        self.log: list[Event] = []
        self.decisions: list[Decision] = []
        self.ready_groups: list[str] = []
        packer = {"T": T, "reorder_groups": reorder_groups, "ahead": ahead}
        data = e.RunStarted(seed=0, config=config(packer=packer, scheduler=scheduler), tasks=[], code="test")
        self.say("operator", "run.started", RUN, data)

    @property
    def state(self) -> State:
        return self.driver.state

    def say(self, owner: str, kind: str, entity: str, data: Any) -> list[Decision]:
        self.seq += 1
        event = fact(self.seq, owner, kind, entity, data)
        self.log.append(event)
        decided = self.driver.feed(event)
        self.decisions += decided
        self.seq += len(decided)
        return decided

    def dispatch(self, index: int, version: int = 0, count: int = 4) -> str:
        data = e.GroupDispatched(
            task="t",
            task_digest="d",
            reason="initial",
            burst="u-1",
            version=version,
            executions=[execution_id(index, member) for member in range(count)],
        )
        self.say("scheduler", "group.dispatched", group_id(index), data)
        return group_id(index)

    def ready(self, index: int, rows: list[list[int]]) -> list[Decision]:
        """The group gets ready with these row lengths, by execution."""
        plans = [
            RowPlan(
                execution=execution_id(index, member),
                attempt=1,
                draw=draw,
                leaf=0,
                tokens=tokens,
                targets=1,
                target_nodes=[0],
            )
            for member, lengths in enumerate(rows)
            for draw, tokens in enumerate(lengths)
        ]
        decided = self.say("trajectories", "group.ready", group_id(index), e.GroupReady(rewards=[], mean=0.0, std=0.0))
        return decided + self.say(
            "trajectories", "group.materialized", group_id(index), e.GroupMaterialized(rows=plans)
        )

    def open(self, step: int, groups: int, version: int = 0) -> list[Decision]:
        data = e.BatchOpened(step=step, version=version, burst="u-1", final=False, groups=groups, members=["cell-0"])
        return self.say("scheduler", "batch.opened", batch_id(step), data)

    def publish(self, version: int) -> list[Decision]:
        data = e.WeightsExposed(version=version, purpose="publish", address={}, bytes=1)
        return self.say("trainer", "weights.exposed", "cell-0", data)

    def restore(self, version: int) -> list[Decision]:
        data = e.CheckpointRestored(version=version, log_sequence=0)
        return self.say("trainer", "checkpoint.restored", f"v{version}", data)

    def step(self, step: int, version: int | None = None) -> list[Decision]:
        data = e.BatchStepped(
            step=step,
            version=step if version is None else version,
            members=["cell-0"],
            loss=0.0,
            grad_norm=0.0,
            lr=0.0,
            micro_steps=0,
            tokens=0,
            targets=0,
            executions=0,
            masked=0,
            reward=0.0,
            gap=GapStats(),
            seconds=0.0,
        )
        return self.say("trainer", "batch.stepped", batch_id(step), data)

    def waiting(self) -> list[str]:
        return [name for batch in self.state.batches for name in batch.unclaimed]

    def claim(self, micro_step: str, batch: str) -> list[Decision]:
        data = e.MicroStepClaimed(batch=batch, cell="cell-0", epoch=1)
        return self.say("trainer", "micro-step.claimed", micro_step, data)

    def release(self, micro_step: str, batch: str) -> list[Decision]:
        data = e.MicroStepReleased(batch=batch, reason="the cell is gone")
        return self.say("trainer", "micro-step.released", micro_step, data)

    def of(self, kind: str) -> list[Decision]:
        return [decision for decision in self.decisions if decision.kind == kind]


def groups_of(decision: Decision) -> set[str]:
    return {group_of(row.execution) for row in decision.data.rows}
