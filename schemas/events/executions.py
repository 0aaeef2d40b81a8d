"""Events of groups and their executions: dispatch, attempts, records, outcomes, held-out measurements."""

from __future__ import annotations

from typing import Literal

import msgspec

from schemas.units import Check, Counters, FinishReason, Outcome, Reward, RowPlan, Value

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
