"""Headroom: how far a run is from the time that its work needs if no node is ever without work.

    bound = (hours that executions ran / slots of a node + W steps) / nodes

Executions count in full for the groups that were consumed; work on groups that were dispatched and not consumed when the
run ended isn't needed for its steps. No strategy can be below the bound on these nodes with these slots.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from replay.simulator.account import Outcome
from replay.simulator.scenario import Scenario


class Headroom(msgspec.Struct, frozen=True, kw_only=True):
    hours: float
    bound_h: float
    above_pct: float
    """How far the run is above the bound."""
    rollout_pct: float
    """Node-time in which a slot's share of a node ran an execution, whether or not its group was consumed."""
    training_pct: float
    """Node-time in micro-steps."""
    waiting_pct: float
    """Node-time in the training role, or on the way to or from it, without a micro-step."""
    empty_pct: float
    """Node-time of slots that served nobody."""

    def __str__(self) -> str:
        return (
            f"{self.rollout_pct:.1f}% of node time rollout, {self.training_pct:.1f}% training, "
            f"{self.waiting_pct:.1f}% training cells that wait, {self.empty_pct:.1f}% empty slots"
        )


def headroom(scenario: Scenario, outcome: Outcome) -> Headroom:
    """Of one run. Slots per node are those of the whole."""
    slots_per_node = scenario.slots / scenario.nodes
    world = scenario.world
    factor = 1.0 if scenario.run.scheduler.strategy == "async" else world.shared_work
    work = outcome.executed_h / slots_per_node + world.work_node_h * factor * outcome.steps
    bound = work / scenario.nodes
    whole = outcome.hours * scenario.nodes
    rollout = outcome.running_h / slots_per_node
    waiting = outcome.training_node_h - outcome.trained_node_h
    return Headroom(
        hours=outcome.hours,
        bound_h=bound,
        above_pct=100 * (outcome.hours / bound - 1),
        rollout_pct=100 * rollout / whole,
        training_pct=100 * outcome.trained_node_h / whole,
        waiting_pct=100 * waiting / whole,
        empty_pct=100 * (whole - rollout - outcome.training_node_h) / whole,
    )


def mean_headroom(scenario: Scenario, outcomes: Sequence[Outcome]) -> Headroom:
    """Of several runs, field by field."""
    each = [headroom(scenario, outcome) for outcome in outcomes]
    return Headroom(**{name: statistics.fmean(getattr(one, name) for one in each) for name in Headroom.__struct_fields__})
