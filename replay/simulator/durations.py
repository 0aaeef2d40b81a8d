"""How long executions last, how they end, and what they earn: drawn from seed and ids, so a draw does not depend on when
an execution runs or under which strategy. Two scenarios with one seed therefore meet the same executions.

Duration of member i of group g: `min(ceiling, m exp(s_g z_g + s_e z_gi))`. The group's factor is why executions finish in
clusters; the ceiling is where the overall time-out gathers them.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable

import msgspec

from replay.simulator.scenario import World
from schemas.ids import group_of
from schemas.units import FinishReason

_KEPT_GROUPS = 4096


class Draw(msgspec.Struct, frozen=True):
    """What one execution will do."""

    seconds: float
    """From its start to its end, on an engine of rate 1."""
    reason: FinishReason
    score: float


class Durations:
    """Draws of one run. Members beyond N (oversampling) follow in the same sequence."""

    def __init__(self, world: World, seed: int) -> None:
        self._world, self._seed = world, seed
        self._groups: dict[str, tuple[random.Random, float, list[Draw]]] = {}

    def __repr__(self) -> str:
        return f"<Durations seed {self._seed} [{len(self._groups)} groups]>"

    def draw(self, execution: str) -> Draw:
        group, member = group_of(execution), int(execution.rpartition(".")[2])
        known = self._groups.get(group)
        if known is None:
            if len(self._groups) >= _KEPT_GROUPS:
                self._groups.pop(next(iter(self._groups)))
            rng = random.Random(f"{self._seed}:{group}")
            known = self._groups[group] = (rng, rng.gauss(0.0, 1.0), [])
        rng, z, drawn = known
        while len(drawn) <= member:
            drawn.append(self._next(rng, z))
        return drawn[member]

    def _next(self, rng: random.Random, z: float) -> Draw:
        world = self._world
        hours = (
            world.duration_scale
            * world.median_h
            * math.exp(world.group_sigma * z + world.execution_sigma * rng.gauss(0.0, 1.0))
        )
        score = round(rng.random(), 3)
        if hours >= world.ceiling_h:
            return Draw(3600.0 * world.ceiling_h, "overall_timeout", score)
        return Draw(3600.0 * hours, "harness_timeout" if hours > world.harness_h else "completed", score)


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """What the paper publishes of a workload's durations, as a world gives it."""

    mean_h: float
    """Of executions."""
    group_max_h: float
    """Mean over groups of their longest execution."""
    over_four_hours_pct: float
    """Groups whose longest execution takes more than four hours."""
    harness_timeout_pct: float
    overall_timeout_pct: float
    longest_at_ceiling_pct: float
    """Groups whose longest execution ends in the overall time-out."""


def profile(world: World, *, N: int, groups: int = 4000, seed: int = 0) -> Profile:
    """Estimated from that many groups."""
    durations = Durations(world, seed)
    drawn = [[durations.draw(f"e-{group:06d}.{member:02d}") for member in range(N)] for group in range(groups)]
    every = [each for members in drawn for each in members]
    longest = [max(members, key=lambda each: each.seconds) for members in drawn]
    return Profile(
        mean_h=statistics.fmean(each.seconds for each in every) / 3600,
        group_max_h=statistics.fmean(each.seconds for each in longest) / 3600,
        over_four_hours_pct=_percent(each.seconds > 4 * 3600 for each in longest),
        harness_timeout_pct=_percent(each.reason == "harness_timeout" for each in every),
        overall_timeout_pct=_percent(each.reason == "overall_timeout" for each in every),
        longest_at_ceiling_pct=_percent(each.reason == "overall_timeout" for each in longest),
    )


def _percent(found: Iterable[bool]) -> float:
    kept = list(found)
    return 100.0 * sum(kept) / len(kept)
