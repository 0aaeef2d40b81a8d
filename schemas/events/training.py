"""Events of training: bursts, batches, micro-steps, checkpoints."""

from __future__ import annotations

from schemas.ids import cell_id
from schemas.units import Check, GapStats, RowRef, Value

# burst


class BurstOpened(Value, frozen=True, kw_only=True, omit_defaults=True):
    index: int
    """From 1."""
    steps: int
    first_step: int
    version: int
    reason: list[Check] = []


class BurstEnded(Value, frozen=True, kw_only=True, omit_defaults=True):
    version: int
    reason: list[Check]
    """Why these cells stay, or don't."""
    stays: list[str]
    """Cells that go on training, the core first."""
    checks: list[Check] = []
    """Why the burst ends now."""

    @property
    def core_stays(self) -> bool:
        return cell_id(0) in self.stays


# batch


class BatchOpened(Value, frozen=True, kw_only=True, omit_defaults=True):
    step: int
    """Training step that the batch feeds, from 1."""
    version: int
    """v_t: training version immediately before the step."""
    burst: str
    final: bool
    """The burst's last step: weights are published after it."""
    groups: int
    members: list[str]
    reason: list[Check] = []


class BatchStreamClosed(Value, frozen=True, kw_only=True):
    micro_steps: int
    groups: list[str]


class BatchJoinClosed(Value, frozen=True, kw_only=True, omit_defaults=True):
    """No cell joins this batch any more: its members reduce their gradients and the core makes the update."""

    members: list[str]
    """The prefix that trained it, the core first."""
    epochs: list[int]
    """Epoch of each member: with `members` the key of their communication group."""
    reason: list[Check] = []


class BatchStepped(Value, frozen=True, kw_only=True):
    step: int
    version: int
    """Version after the step."""
    members: list[str]
    loss: float
    grad_norm: float
    lr: float
    micro_steps: int
    tokens: int
    targets: int
    executions: int
    masked: int
    """Executions whose clip mask m_i was zero."""
    reward: float
    """Mean reward of the batch's executions in a baseline."""
    gap: GapStats
    seconds: float
    as_of: int = 0
    """Sequence up to which LOG says whose gradients were added up: what is said of its micro-steps later changes
    nothing any more. 0 in logs of before: the event's own."""


class BatchFailed(Value, frozen=True, kw_only=True):
    reason: str


# micro-step


class MicroStepEnqueued(Value, frozen=True, kw_only=True):
    batch: str
    index: int
    blob: str
    tokens: int
    rows: list[RowRef]


class MicroStepClaimed(Value, frozen=True, kw_only=True):
    batch: str
    cell: str
    epoch: int
    process: int = 0
    """Sequence at which the process that claims it joined; 0 where it isn't known."""


class MicroStepDone(Value, frozen=True, kw_only=True):
    batch: str
    cell: str
    loss: float
    tokens: int
    targets: int
    executions: int
    masked: int
    gap: GapStats
    seconds: float


class MicroStepReleased(Value, frozen=True, kw_only=True):
    batch: str
    reason: str


# checkpoint


class CheckpointSaved(Value, frozen=True, kw_only=True):
    version: int
    path: str
    """Relative to the run's folder."""
    digest: str
    log_sequence: int


class CheckpointRestored(Value, frozen=True, kw_only=True):
    """The core's process began with this version. Batches that made later ones count no more: their groups are ready
    again, and are trained in other batches."""

    version: int
    log_sequence: int
    """Sequence of the `batch.stepped` that made the version; 0 for the starting policy."""
