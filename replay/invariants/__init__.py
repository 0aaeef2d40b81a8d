"""What must hold in every run, one small class a law; `docs/invariants.md` is made from their docstrings.

Used over recorded logs (`gyre check`) and over every run of the fault simulation. All are incremental: one pass, whatever
the log's length, whole or unfinished.
"""

from __future__ import annotations

from replay.invariants.base import Call, Evidence, Invariant, Served, Violation
from replay.invariants.batches import BatchOrder, Bursts, BurstWhole, Claims, JoinClosed
from replay.invariants.evaluations import Evaluations
from replay.invariants.executions import Attempts, HarnessErrors, LifeCycle, OneOutcome, OutcomeRule
from replay.invariants.groups import Admission, Advantages, Groups, OldestFirst, Oversampling, RowsDisjoint
from replay.invariants.held_out import HeldOutApart, HeldOutMeasured
from replay.invariants.ledger import BoundaryDispatch, Ledger, QueueDepth, Staleness, StalenessSaid, Waterlevel
from replay.invariants.placements import Capacity, Paused, RoutesToServing, StartRule
from replay.invariants.protocol import Causes, Decisions, SaidOnce, Timers
from replay.invariants.reasons import Reasons
from replay.invariants.recorded import (
    AnswersRecorded,
    CallsAnswered,
    GateHolds,
    Projections,
    RecordsWhole,
    Replays,
    Seals,
    TreesRecorded,
)
from replay.invariants.targets import NothingLost, StepIsBGroups, TargetsOnce
from replay.invariants.transitions import (
    CoreRetention,
    Epochs,
    SupplyGate,
    TrainingPrefix,
    TransitionPhases,
    TransitionsSerial,
    WaterlevelGate,
)
from replay.invariants.weights import DurableBeforePublished, WeightsInOrder

_ORDER: tuple[type[Invariant], ...] = (
    SaidOnce,
    Decisions,
    Causes,
    Timers,
    Ledger,
    BoundaryDispatch,
    Waterlevel,
    QueueDepth,
    Staleness,
    StalenessSaid,
    Capacity,
    StartRule,
    RoutesToServing,
    Paused,
    TransitionsSerial,
    TrainingPrefix,
    TransitionPhases,
    Epochs,
    WaterlevelGate,
    SupplyGate,
    CoreRetention,
    Reasons,
    Attempts,
    LifeCycle,
    OneOutcome,
    OutcomeRule,
    Evaluations,
    HarnessErrors,
    Groups,
    OldestFirst,
    Oversampling,
    Advantages,
    RowsDisjoint,
    Admission,
    BatchOrder,
    Bursts,
    BurstWhole,
    JoinClosed,
    Claims,
    StepIsBGroups,
    TargetsOnce,
    NothingLost,
    DurableBeforePublished,
    WeightsInOrder,
    HeldOutMeasured,
    HeldOutApart,
    Seals,
    RecordsWhole,
    TreesRecorded,
    CallsAnswered,
    AnswersRecorded,
    GateHolds,
    Projections,
    Replays,
)

ALL: dict[str, type[Invariant]] = {each.name: each for each in _ORDER}
"""By name, in the order in which they are reported."""


def markdown() -> str:
    """The table of `docs/invariants.md`: name, law, source of each."""
    rows = [f"| `{each.name}` | {each.law()} | {each.source()} |" for each in _ORDER]
    return "\n".join(["| invariant | law | source |", "| --- | --- | --- |", *rows]) + "\n"


__all__ = ["ALL", "Call", "Evidence", "Invariant", "Served", "Violation", "markdown"]
