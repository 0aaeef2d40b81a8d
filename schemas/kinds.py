"""The one table of kinds: who may say what, whether it decides or reports, and what it means.

Documents, permissions and the codec are made from this table; nothing else lists kinds.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from schemas import events as e
from schemas.units import Value

Nature = Literal["fact", "decision"]


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    """`entity.verb`."""
    owners: dict[str, Nature]
    """Services that may say it, and as what."""
    once: bool
    """Write-once: at most one event of this kind for an entity."""
    data: type[Value]
    meaning: str
    v: int = 1
    """Schema version of its data; `schemas.upcasting` makes earlier ones into it."""


def _kind(name: str, owners: dict[str, Nature], once: bool, data: type[Value], meaning: str, v: int = 1) -> Kind:
    return Kind(name=name, owners=owners, once=once, data=data, meaning=meaning, v=v)


_SERVICES = ("scheduler", "proxy", "harness", "rollout", "evaluator", "trajectories", "packer", "trainer")

_TABLE = [
    _kind("run.started", {"operator": "fact"}, True, e.RunStarted, "A run began with this configuration, seed and code."),
    _kind("run.finished", {"scheduler": "decision", "operator": "fact"}, True, e.RunFinished, "The run is over."),
    _kind("run.continued", {"operator": "fact"}, False, e.RunContinued, "All services were stopped and start again."),
    _kind("run.paused", {"operator": "fact"}, False, e.RunPaused, "Nothing is placed, no cell joins training, no burst ends."),
    _kind("run.resumed", {"operator": "fact"}, False, e.RunResumed, "The run goes on."),
    _kind("group.dispatched", {"scheduler": "decision"}, True, e.GroupDispatched, "A group takes a dispatch slot for a task."),
    _kind("group.ready", {"trajectories": "decision"}, True, e.GroupReady, "Every execution is settled; advantages are known."),
    _kind("group.materialized", {"trajectories": "decision"}, True, e.GroupMaterialized, "Admission drew these rows."),
    _kind("group.claimed", {"packer": "decision"}, False, e.GroupClaimed, "The packer pulled the group for a batch."),
    _kind("group.consumed", {"scheduler": "decision"}, False, e.GroupConsumed, "A step trained the group; its slot is free."),
    _kind("group.discarded", {"trajectories": "decision"}, True, e.GroupDiscarded, "Too few rewards to compare; the group is dropped."),
    _kind(
        "execution.dispatched",
        {"scheduler": "decision"},
        True,
        e.ExecutionDispatched,
        "An execution entered the queue; d rises unless it is held out.",
    ),
    _kind("execution.placed", {"scheduler": "decision"}, False, e.ExecutionPlaced, "Permission to start, and the engine that serves it."),
    _kind("execution.started", {"harness": "fact"}, False, e.ExecutionStarted, "The harness process runs; p rises."),
    _kind("execution.lost", {"harness": "fact"}, False, e.ExecutionLost, "The attempt is gone with its host; the next one starts."),
    _kind("execution.finished", {"harness": "fact"}, True, e.ExecutionFinished, "The execution terminated; f rises, once."),
    _kind(
        "execution.cancelled",
        {"trajectories": "decision"},
        True,
        e.ExecutionCancelled,
        "Its group has N valid ones without it; f rises, and its slot is free.",
    ),
    _kind("execution.sealed", {"proxy": "fact"}, True, e.ExecutionSealed, "No record will be added any more."),
    _kind("execution.tree-frozen", {"trajectories": "fact"}, True, e.ExecutionTreeFrozen, "The trajectory tree, in counts."),
    _kind("execution.settled", {"trajectories": "decision"}, True, e.ExecutionSettled, "The outcome for training is known."),
    _kind("measurement.opened", {"scheduler": "decision"}, True, e.MeasurementOpened, "A version is measured on held-out tasks."),
    _kind("measurement.closed", {"scheduler": "decision"}, True, e.MeasurementClosed, "All its executions are settled."),
    _kind("route.moved", {"scheduler": "decision"}, False, e.RouteMoved, "Calls of an execution go to another engine from now on."),
    _kind("evaluation.requested", {"trajectories": "decision"}, False, e.EvaluationRequested, "A preserved workspace is to be scored."),
    _kind("evaluation.claimed", {"evaluator": "fact"}, False, e.EvaluationClaimed, "An evaluator took it."),
    _kind("evaluation.scored", {"evaluator": "fact"}, True, e.EvaluationScored, "Score, validity and what was evaluated."),
    _kind("evaluation.failed", {"evaluator": "fact"}, False, e.EvaluationFailed, "The evaluator failed; the evaluation is pending."),
    _kind("cell.joined", {"rollout": "fact"}, False, e.CellJoined, "A cell's engine is up and serves at this version."),
    _kind(
        "cell.role-transition",
        {"scheduler": "decision", "rollout": "fact", "trainer": "fact"},
        False,
        e.CellRoleTransition,
        "One phase of a cell's change of role.",
    ),
    _kind("cell.held", {"scheduler": "decision"}, False, e.CellHeld, "What keeps the next cell from training has changed."),
    _kind("cell.withdrawn", {"operator": "fact"}, False, e.CellWithdrawn, "The cell is to be emptied and left out."),
    _kind("cell.reinstated", {"operator": "fact"}, False, e.CellReinstated, "The cell serves again."),
    _kind("cell.added", {"operator": "fact"}, True, e.CellAdded, "One more cell belongs to the run."),
    _kind(
        "cell.lost",
        {"scheduler": "fact", "trainer": "fact"},
        False,
        e.CellLost,
        "A process of the cell does not answer any more; nobody waits for it.",
    ),
    _kind("batch.opened", {"scheduler": "decision"}, True, e.BatchOpened, "A training step wants its B groups."),
    _kind("batch.stream-closed", {"packer": "decision"}, True, e.BatchStreamClosed, "All micro-steps of the batch are enqueued."),
    _kind("batch.join-closed", {"scheduler": "decision"}, False, e.BatchJoinClosed, "Its members are fixed; the update follows."),
    _kind("batch.stepped", {"trainer": "fact"}, True, e.BatchStepped, "One optimizer step was made."),
    _kind("batch.failed", {"trainer": "fact"}, False, e.BatchFailed, "The batch could not be trained."),
    _kind("micro-step.enqueued", {"packer": "decision"}, True, e.MicroStepEnqueued, "Packed rows wait for a cell."),
    _kind("micro-step.claimed", {"trainer": "fact"}, False, e.MicroStepClaimed, "A cell took the micro-step."),
    _kind("micro-step.done", {"trainer": "fact"}, False, e.MicroStepDone, "Its gradient is accumulated in that cell."),
    _kind("micro-step.released", {"trainer": "fact"}, False, e.MicroStepReleased, "It may be claimed again."),
    _kind("weights.exposed", {"trainer": "fact"}, False, e.WeightsExposed, "The core's weights can be pulled here."),
    _kind("weights.published", {"rollout": "fact"}, False, e.WeightsPublished, "An engine serves this version now."),
    _kind("burst.opened", {"scheduler": "decision"}, True, e.BurstOpened, "A burst of mu steps began."),
    _kind("burst.ended", {"scheduler": "decision"}, True, e.BurstEnded, "Its weights are published; the core stays or returns.", v=2),
    _kind("timer.set", {"scheduler": "decision", "trajectories": "decision"}, True, e.TimerSet, "A decider wants to be woken."),
    _kind("timer.fired", {"scheduler": "fact", "trajectories": "fact"}, True, e.TimerFired, "The time has come."),
    _kind("checkpoint.saved", {"trainer": "fact"}, False, e.CheckpointSaved, "A version is durable."),
    _kind("checkpoint.restored", {"trainer": "fact"}, False, e.CheckpointRestored, "The core began again with this version."),
    _kind("service.joined", dict.fromkeys(_SERVICES, "fact"), False, e.ServiceJoined, "A service answers at this address."),
    _kind("service.left", dict.fromkeys(_SERVICES, "fact"), False, e.ServiceLeft, "A service ends as asked."),
]

KINDS: dict[str, Kind] = {kind.name: kind for kind in _TABLE}


def is_decision(kind: str, owner: str) -> bool:
    """Whether `owner` decides when it says `kind`; False for kinds that this version does not know."""
    known = KINDS.get(kind)
    return known is not None and known.owners.get(owner) == "decision"
