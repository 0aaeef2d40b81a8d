"""Data of every kind of event. The table that names owners and natures is in `schemas.kinds`.

No event holds text from policy, task, tests or judge, and no secret: a log can be shared. Checks that came with the flag
`reasons` are left out where there are none, so that a log without the flag goes on in the bytes that it has.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from schemas.config import Config
from schemas.ids import cell_id
from schemas.units import (
    CellRole,
    Check,
    Counters,
    FinishReason,
    GapStats,
    Outcome,
    Phase,
    Reward,
    RowPlan,
    RowRef,
    TaskRef,
    Value,
)

# run


class RunStarted(Value, frozen=True, kw_only=True):
    seed: int
    config: Config
    tasks: list[TaskRef]
    """In the order of their names; which task a group gets is drawn from the seed."""
    held_out: list[TaskRef] = []
    """Tasks that are measured on and never trained on; empty when nothing is measured."""
    code: str
    """Identity of the code: package version and, where known, the commit."""
    flags: list[str] = []
    """Decision flags (`schemas.flags`): a later version of a decider takes the old path for a log without its flag."""


class RunFinished(Value, frozen=True, kw_only=True, omit_defaults=True):
    steps: int
    reason: Literal["steps_done", "stopped"]
    checks: list[Check] = []
    """What made it the end; none where an operator stopped the run."""


class RunContinued(Value, frozen=True, kw_only=True):
    code: str
    """Identity of the code that goes on."""


class RunPaused(Value, frozen=True, kw_only=True):
    by: str


class RunResumed(Value, frozen=True, kw_only=True):
    by: str


# group

DispatchReason = Literal["initial", "boundary", "replacement", "refill"]
"""`refill` replaces a discarded group at once, because the burst cannot finish without it; `replacement` goes out with
the next publication."""


class GroupDispatched(Value, frozen=True, kw_only=True, omit_defaults=True):
    task: str
    task_digest: str
    reason: DispatchReason
    burst: str
    version: int
    """v_d: the version published last when the group was dispatched."""
    executions: list[str]
    checks: list[Check] = []
    """What there was room for: how far the dispatch is, or what was discarded and what the burst lacks."""


class GroupReady(Value, frozen=True, kw_only=True):
    rewards: list[Reward]
    """One for each of its executions, in the order of dispatch, but for the surplus."""
    mean: float
    std: float
    surplus: list[str] = []
    """Executions beyond the N that count: not valid when N others were, cancelled where they had not finished. They have no
    reward here, no advantage and no rows."""


class GroupMaterialized(Value, frozen=True, kw_only=True):
    rows: list[RowPlan]


class GroupClaimed(Value, frozen=True, kw_only=True):
    batch: str


class GroupConsumed(Value, frozen=True, kw_only=True, omit_defaults=True):
    batch: str
    version_dispatched: int
    version_trained: int
    staleness: int
    reason: list[Check] = []


class GroupDiscarded(Value, frozen=True, kw_only=True):
    reason: str
    valid: int
    """Rewards that would have been in the baseline; fewer than two cannot be compared."""


# execution


class ExecutionDispatched(Value, frozen=True, kw_only=True):
    group: str
    """Empty for a held-out execution."""
    member: int
    task: str
    measurement: str = ""
    """Of a held-out execution (`eval`): the measurement that it is part of. It counts in no group and not in d."""
    task_digest: str = ""
    """Of a held-out execution; a group's task has its digest in `group.dispatched`."""


class ExecutionPlaced(Value, frozen=True, kw_only=True):
    cell: str
    epoch: int
    attempt: int
    reason: list[Check] = []


class ExecutionStarted(Value, frozen=True, kw_only=True):
    attempt: int


class ExecutionLost(Value, frozen=True, kw_only=True):
    attempt: int
    reason: str
    """In our own words."""


class ExecutionFinished(Value, frozen=True, kw_only=True):
    attempt: int
    reason: FinishReason
    exit_code: int | None
    seconds: float
    workspace: str
    """Blob of the preserved workspace; empty when nothing is left to evaluate."""
    workspace_digest: str
    counters: Counters = Counters()
    detail: str = ""
    """Why it failed, in our own words, never the harness's output."""


class ExecutionCancelled(Value, frozen=True, kw_only=True):
    """It ends where it stands, queued, placed or running; what is still said of it counts for nothing."""

    reason: Literal["surplus"]
    checks: list[Check]
    """What made it superfluous."""


class ExecutionSealed(Value, frozen=True, kw_only=True):
    attempt: int
    records: int
    """Entries of this attempt in RECORDS."""
    last_record: int
    """Stream sequence of the last of them in RECORDS; 0 when there is none."""
    digest: str
    """blake2b over the entries' bytes in order."""


class ExecutionTreeFrozen(Value, frozen=True, kw_only=True):
    attempt: int
    blob: str
    digest: str
    parents: list[int]
    tokens: list[int]
    """Tokens that each node adds: new input and output."""
    trainable: list[int]
    """Tokens of each node that may become targets."""
    leaves: list[int]
    """Indices of the leaf nodes."""
    classes: list[int]
    """Class of each leaf in the order of equation (4): 0 main, 1 main-summary, 2 sub-agent, 3 sub-agent-summary."""


class ExecutionSettled(Value, frozen=True, kw_only=True):
    attempt: int
    outcome: Outcome
    reward: float
    evaluation: str = ""
    reason: str = ""


# route


RouteReason = Literal["", "transition", "withdrawn", "lost"]
"""What takes the source away: it leaves for training, an operator withdrew it, its engine doesn't answer. Empty in logs of
before."""


class RouteMoved(Value, frozen=True, kw_only=True, omit_defaults=True):
    """New calls of an execution go to another engine. `entity` is the execution."""

    source: str
    target: str
    epoch: int
    """Epoch of the target."""
    kv: Literal["moved", "recomputed"]
    reason: RouteReason = ""
    checks: list[Check] = []
    """Why this target."""


# evaluation


class EvaluationRequested(Value, frozen=True, kw_only=True):
    execution: str
    attempt: int
    task: str
    task_digest: str
    workspace: str
    workspace_digest: str
    branch: int = -1
    """Leaf that the artifact belongs to; -1 is the execution as a whole."""
    tries: int = 1
    held_out: bool = False
    """Whether the task is one of the held-out set."""


class EvaluationClaimed(Value, frozen=True, kw_only=True):
    evaluator: str
    process: int = 0
    """Sequence at which the process that claims it joined; 0 where it isn't known."""


class EvaluationScored(Value, frozen=True, kw_only=True):
    execution: str
    attempt: int
    score: float
    """In [0, 1] as the task's tests wrote it."""
    valid: bool
    workspace_digest: str
    branch: int
    reference: str
    """What was evaluated: the blob of the workspace."""
    seconds: float


class EvaluationFailed(Value, frozen=True, kw_only=True):
    execution: str
    attempt: int
    reason: str
    tries: int


# cell


class CellJoined(Value, frozen=True, kw_only=True):
    index: int
    capacity: int
    url: str
    """Adapter that the proxy calls."""
    engine: str
    version: int
    capabilities: list[str]


class CellRoleTransition(Value, frozen=True, kw_only=True):
    phase: Phase
    source: CellRole
    target: CellRole
    epoch: int
    reason: list[Check] = []
    seconds: float = 0.0
    """Since the phase before, as the one who says it measured; 0 in decisions."""
    version: int = -1
    """Policy version that the engine holds, where the phase sets one."""


class CellHeld(Value, frozen=True, kw_only=True):
    """Why the next cell doesn't join training yet. Said when the first check that fails is another one than before."""

    reason: list[Check]
    """All checks that it needs, as they stand."""


class CellWithdrawn(Value, frozen=True, kw_only=True):
    by: str


class CellReinstated(Value, frozen=True, kw_only=True):
    by: str


class CellAdded(Value, frozen=True, kw_only=True):
    by: str


class CellLost(Value, frozen=True, kw_only=True):
    """A cell's process doesn't answer any more. It counts again once another process of the service joins."""

    service: Literal["rollout", "trainer"]
    process: int
    """Sequence of the `service.joined` of the process that doesn't answer."""
    reason: str
    """In our own words."""


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


# weights


class WeightsExposed(Value, frozen=True, kw_only=True):
    version: int
    purpose: Literal["join", "publish"]
    address: dict[str, Any]
    """A `services.mesh.weights` address."""
    bytes: int
    rendezvous: str = ""
    """For joiners: `host:port` of the store on which the prefix groups meet."""


class WeightsPublished(Value, frozen=True, kw_only=True):
    version: int
    bytes: int
    seconds: float
    transport: str


# measurement


class MeasurementOpened(Value, frozen=True, kw_only=True, omit_defaults=True):
    version: int
    """Policy version that every serving engine has."""
    executions: list[str]
    reason: list[Check] = []


class MeasurementClosed(Value, frozen=True, kw_only=True, omit_defaults=True):
    version: int
    mean: float | None
    """Reward over valid and placeholder outcomes; None where there is none."""
    std: float | None
    """Population standard deviation of the same."""
    valid: int
    placeholder: int
    excluded: int
    steps: int
    """Training steps since the measurement before."""
    # Said where it is 0 too, as it always was: `omit_defaults` leaves no default out that a factory makes.
    late: int = msgspec.field(default_factory=int)
    """Executions that ended after an engine had a newer version: some of their calls may have been answered by it."""
    reason: list[Check] = []


# burst, timer, checkpoint, service


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


class TimerSet(Value, frozen=True, kw_only=True, omit_defaults=True):
    purpose: str
    due_us: int
    reason: list[Check] = []


class TimerFired(Value, frozen=True, kw_only=True):
    purpose: str


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


class ServiceJoined(Value, frozen=True, kw_only=True):
    url: str
    """Where the service answers HTTP: health, readiness, metrics and what else it serves."""
    pid: int


class ServiceLeft(Value, frozen=True, kw_only=True):
    reason: str
