"""The side of training in a scripted mesh: cells and their roles, batches, micro-steps, checkpoints and weights."""

from __future__ import annotations

import random
from typing import Any

from schemas import events as e
from schemas.config import Config
from schemas.envelope import Event
from schemas.units import GapStats
from tests.replay.written_log import WrittenLog


class TrainingSide(WrittenLog):
    """Cells that train take micro-steps and are done with them; the core makes the updates."""

    def __init__(self, rng: random.Random, config: Config, **others: Any) -> None:
        super().__init__(rng, config, **others)
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
        self._rows: dict[str, e.MicroStepEnqueued] = {}

    def _on_cell_joined(self, event: Event, data: e.CellJoined) -> None:
        self._serving.add(event.entity)

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
                phase=phase,  # type: ignore[arg-type]
                source=data.source,
                target=target,
                epoch=data.epoch,
                version=version,
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
