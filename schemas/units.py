"""Values that several kinds of event share."""

from __future__ import annotations

import operator
from typing import Literal

import msgspec

CellRole = Literal["rollout", "train"]
Phase = Literal["decided", "draining", "drained", "rerouted", "released", "acquired", "completed", "failed"]
FinishReason = Literal[
    "completed", "failed", "harness_timeout", "overall_timeout", "cancelled", "surplus", "total_failure"
]
Outcome = Literal["valid", "placeholder", "excluded"]


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """Base of event data."""


class Check(Value, frozen=True, kw_only=True):
    """One inequality of a rule, as it stood: `left op right`."""

    rule: str
    """Name of the rule or equation, for example `waterlevel (2)`."""
    left: float
    op: Literal["<=", ">=", "<", ">", "=="]
    right: float
    holds: bool


def check(rule: str, left: float, op: Literal["<=", ">=", "<", ">", "=="], right: float) -> Check:
    return Check(rule=rule, left=float(left), op=op, right=float(right), holds=_COMPARE[op](left, right))


_COMPARE = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt, "==": operator.eq}


class TaskRef(Value, frozen=True, kw_only=True):
    """A task of the run: its folder's name, a digest of its content, its own time-outs in seconds (0: the run's)."""

    name: str
    digest: str
    agent_timeout_s: float = 0.0
    verifier_timeout_s: float = 0.0


class Counters(Value, frozen=True, kw_only=True):
    """What a harness says of its own model calls."""

    calls: int = 0
    reconnects: int = 0
    harness_errors: int = 0


class Reward(Value, frozen=True, kw_only=True):
    """Outcome of one execution inside a ready group."""

    execution: str
    attempt: int
    outcome: Outcome
    reward: float
    advantage: float
    """0 for an excluded execution, which is in no baseline either."""


class RowPlan(Value, frozen=True, kw_only=True):
    """One admitted trajectory: a root-to-leaf path of a frozen tree with the targets frozen at its draw."""

    execution: str
    attempt: int
    draw: int
    """Order of admission inside the execution, from 0."""
    leaf: int
    """Index of the leaf node in the frozen tree."""
    tokens: int
    """Row length: all tokens root to leaf."""
    targets: int
    """L_r: targets that this row trains."""
    target_nodes: list[int]
    """Nodes of the path whose outputs are this row's targets."""


class GapStats(Value, frozen=True, kw_only=True):
    """Engine against trainer log-probabilities over target tokens sampled at the version being trained."""

    sum_abs: float = 0.0
    max_abs: float = 0.0
    count: int = 0


class RowRef(Value, frozen=True, kw_only=True):
    """A packed row: which draw of which execution."""

    execution: str
    draw: int
    tokens: int
    targets: int
