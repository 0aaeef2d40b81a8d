"""Group-relative advantages (paper, section 'Partial scoring'): rewards of one task's executions against their mean.

Invariants: equal rewards give advantages of exactly 0; the order of the executions doesn't matter for any of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

STD_FLOOR = 1e-4
"""Added to the standard deviation, so that a group of nearly equal rewards doesn't explode."""

Kind = Literal["mean_std", "mean"]


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """What the rewards of a group are compared with."""

    mean: float
    std: float
    """Population standard deviation."""


def baseline(rewards: Sequence[float]) -> Baseline:
    """Baseline of the rewards that count: valid ones and the zeros of total failures. `rewards` isn't empty."""
    if min(rewards) == max(rewards):
        return Baseline(mean=rewards[0], std=0.0)
    mean = math.fsum(rewards) / len(rewards)
    return Baseline(mean=mean, std=math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards)))


def advantage(reward: float, against: Baseline, kind: Kind) -> float:
    """Group-relative advantage of one execution in the baseline: `(r - mean) / (std + 1e-4)`, or `r - mean`."""
    difference = reward - against.mean
    return difference if kind == "mean" else difference / (against.std + STD_FLOOR)
