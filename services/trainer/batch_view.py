"""What LOG says about the batch in hand, folded for one training cell. Pure.

A micro-step is free from `enqueued` (or `released`) until `claimed`; a claim answers the event at `free[id].seq`, which
is what the claim's expected last sequence names. `turn` is the one thing that this cell has to do next.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from schemas import events as e
from schemas.envelope import Event
from schemas.streams import micro_step_blob
from schemas.units import Outcome

Turn = Literal["", "acquire", "release", "claim", "step", "expose"]
_IN_BASELINE: tuple[Outcome, ...] = ("valid", "placeholder")


class Free(msgspec.Struct, frozen=True):
    """A micro-step that may be claimed, and the event that made it so."""

    seq: int
    id: str
    blob: str


class OpenBatch(msgspec.Struct, kw_only=True):
    id: str
    data: e.BatchOpened
    closed: int = -1
    """Number of its micro-steps, known once the stream is closed."""
    free: dict[str, Free] = {}
    claimed: dict[str, str] = {}
    """Micro-step to the cell that holds it."""
    done: dict[str, e.MicroStepDone] = {}
    rewards: list[float] = []
    """Of the executions in a baseline of the groups claimed for it."""


class BatchView(msgspec.Struct, kw_only=True):
    cell: str
    epoch: int = 0
    role: Literal["rollout", "entering", "train", "leaving"] = "rollout"
    cause: tuple[str, int] = ("", 0)
    """The event that the next change of role answers."""
    batch: OpenBatch | None = None
    stepped: int = 0
    """Version after the last step in LOG."""
    final: bool = False
    """That step was the last of its burst."""
    exposed: int = 0
    """Version exposed for publication last."""
    checkpoints: dict[int, str] = {}
    """Version to path of its newest checkpoint."""
    rewards: dict[str, list[float]] = {}
    """Of groups that are ready and not yet claimed."""
    over: bool = False

    @property
    def turn(self) -> Turn:
        """Numbered by urgency: 1. change of role, 2. publication, 3. the update, 4. work."""
        if self.over:
            return ""
        if self.role == "entering":
            return "acquire"
        if self.final and self.exposed < self.stepped:
            return "expose"
        if self.role == "leaving":
            return "release"
        batch = self.batch
        if self.role != "train" or batch is None:
            return ""
        if batch.closed == len(batch.done):
            return "step"
        return "claim" if batch.free else ""

    def fold(self, event: Event) -> None:
        """Apply one event of LOG."""
        data = event.data
        if isinstance(data, e.CellRoleTransition) and event.entity == self.cell:
            self._transition(event, data)
        elif isinstance(data, e.BatchOpened):
            self.batch = OpenBatch(id=event.entity, data=data)
        elif isinstance(data, e.GroupReady):
            self.rewards[event.entity] = [each.reward for each in data.rewards if each.outcome in _IN_BASELINE]
        elif isinstance(data, e.CheckpointSaved):
            self.checkpoints[data.version] = data.path
        elif isinstance(data, e.WeightsExposed) and data.purpose == "publish":
            self.exposed = max(self.exposed, data.version)
        elif isinstance(data, e.RunFinished):
            self.over = True
        elif self.batch is not None:
            self._batch(self.batch, event)

    def _transition(self, event: Event, data: e.CellRoleTransition) -> None:
        if data.phase == "decided":
            self.epoch = data.epoch
            if data.target == "rollout":
                self.role, self.cause = "leaving", (event.id, event.seq)
        elif data.epoch != self.epoch:
            return
        elif data.phase == "released" and event.owner == "rollout":
            self.role, self.cause = "entering", (event.id, event.seq)
        elif data.phase == "acquired" and event.owner == "trainer":
            self.role = "train"
        elif data.phase == "released" and event.owner == "trainer":
            self.role = "rollout"

    def _batch(self, batch: OpenBatch, event: Event) -> None:
        data, name = event.data, event.entity
        if isinstance(data, e.MicroStepEnqueued) and data.batch == batch.id:
            batch.free[name] = Free(event.seq, event.id, data.blob)
        elif isinstance(data, e.MicroStepClaimed) and data.batch == batch.id:
            batch.free.pop(name, None)
            batch.claimed[name] = data.cell
        elif isinstance(data, e.MicroStepDone) and data.batch == batch.id:
            batch.done[name] = data
        elif isinstance(data, e.MicroStepReleased) and data.batch == batch.id:
            batch.claimed.pop(name, None)
            batch.done.pop(name, None)
            batch.free[name] = Free(event.seq, event.id, micro_step_blob(name))
        elif isinstance(data, e.GroupClaimed) and data.batch == batch.id:
            batch.rewards += self.rewards.pop(name, [])
        elif isinstance(data, e.BatchStreamClosed) and name == batch.id:
            batch.closed = data.micro_steps
        elif isinstance(data, e.BatchStepped) and name == batch.id:
            self.stepped, self.final, self.batch = data.version, batch.data.final, None
