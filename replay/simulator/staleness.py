"""Mean staleness in simulated steady states beside `E[d] = phi + (mu - 1)/2`, and continuous dispatch beside boundary dispatch.

The identity counts groups and knows no time, so any world must show it, and exactly. Let A(b) be the ages, in versions, of
the groups that publication b finds waiting or in rollout, together. A burst adds `A(b) - A(b + 1) + mu B (phi + (mu - 1)/2)`
to the staleness of what is consumed: what it leaves behind is phi B groups, all mu versions older than before. Over n groups
of whole bursts therefore

    mean staleness = phi + (mu - 1)/2 + (A(first) - A(last)) / n

and the last term, `carried`, is what the window's ends make of it: groups that are later or earlier there than on average.
Two conditions: the window begins once the groups of the initial dispatch are consumed, and no group is discarded (its
replacement is dispatched at another boundary).
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import statistics
from collections import deque
from collections.abc import Sequence

import msgspec

from replay.simulator.account import Outcome
from replay.simulator.durations import Durations
from replay.simulator.pool import ALONE, Runs, over_seeds
from replay.simulator.scenario import Scenario, changed, load
from schemas.ids import execution_id
from services.scheduler.core.equations import mean_staleness

PHI = (0.0, 0.5, 1.0, 1.5, 2.5)
MU = (1, 2, 3, 4)
EXACT = 1e-9
"""The identity is one of whole numbers; this is what dividing them costs."""
TOLERANCE = 0.04
"""For continuous dispatch, whose mean is that of a random process over some hundred groups."""
MEASURED_BURSTS = 12


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One (phi, mu), over seeds."""

    phi: float
    mu: int
    expected: float
    measured: float
    """Mean over all groups of all seeds."""
    carried: float
    """What groups that were carried over the ends of the windows add to it, by the ages at the windows' ends."""
    groups: int
    """That were measured."""

    @property
    def error(self) -> float:
        """What neither the identity nor the windows' ends explain."""
        return self.measured - self.carried - self.expected

    @property
    def ok(self) -> bool:
        return abs(self.error) < EXACT


class Dispatch(msgspec.Struct, frozen=True, kw_only=True):
    """Boundary against continuous dispatch at one phi, mu = 1; means over seeds."""

    phi: float
    in_rollout: int
    """R: groups that continuous dispatch keeps in rollout."""
    boundary: float
    """By the identity, which `grid` shows to hold."""
    continuous: float
    sd: float
    """Of one seed's `continuous`; 0 with one seed."""
    expected: float
    """1 + R/B."""

    @property
    def error(self) -> float:
        return self.continuous - self.boundary - self.expected

    @property
    def ok(self) -> bool:
        return abs(self.error) < TOLERANCE


def warm_up_bursts(phi: float, mu: int) -> int:
    """Bursts until the last group of the initial dispatch is consumed, and one more."""
    return math.ceil((phi + mu) / mu) + 1


def steady(outcome: Outcome, phi: float, mu: int) -> tuple[list[float], int]:
    """Mean staleness of each step after the warm-up, and A(first) - A(last) of these steps."""
    first = warm_up_bursts(phi, mu)
    return outcome.staleness[first * mu :], outcome.ages[first] - outcome.ages[-1]


def grid(
    *,
    seeds: Sequence[int] = (0,),
    runs: Runs = ALONE,
    base: str = "small",
    phis: Sequence[float] = PHI,
    mus: Sequence[int] = MU,
    bursts: int = MEASURED_BURSTS,
) -> list[Point]:
    """Every phi with every mu, over whole bursts after the warm-up. Executions always earn a score here."""
    scenario = _endless(base)
    B = scenario.run.scheduler.B
    pairs = [(phi, mu) for phi in phis for mu in mus]
    outcomes = over_seeds([_at(scenario, phi, mu, bursts) for phi, mu in pairs], seeds, runs=runs)
    found = []
    for (phi, mu), each in zip(pairs, outcomes, strict=True):
        windows = [steady(outcome, phi, mu) for outcome in each]
        steps = [step for window, _ in windows for step in window]
        groups = B * len(steps)
        found.append(
            Point(
                phi=phi,
                mu=mu,
                expected=mean_staleness(phi=phi, mu=mu),
                measured=statistics.fmean(steps),
                carried=sum(carried for _, carried in windows) / groups,
                groups=groups,
            )
        )
    return found


def dispatches(
    *,
    seeds: Sequence[int] = (0,),
    base: str = "small",
    phis: Sequence[float] = (0.5, 1.5),
    shares: Sequence[float] = (0.5, 1.0, 2.0),
) -> list[Dispatch]:
    """E_c[d] - E_b[d] for R = share * B: continuous dispatch is `continuous`, boundary dispatch is the scheduler's."""
    scenario = _endless(base)
    B = scenario.run.scheduler.B
    found = []
    for phi, share in itertools.product(phis, shares):
        R = round(share * B)
        means = [continuous(scenario, phi=phi, in_rollout=R, seed=seed) for seed in seeds]
        found.append(
            Dispatch(
                phi=phi,
                in_rollout=R,
                boundary=mean_staleness(phi=phi, mu=1),
                continuous=statistics.fmean(means),
                sd=statistics.stdev(means) if len(means) > 1 else 0.0,
                expected=1 + R / B,
            )
        )
    return found


def continuous(scenario: Scenario, *, phi: float, in_rollout: int, seed: int, steps: int = 80) -> float:
    """Mean staleness under continuous dispatch, which the scheduler does not have: a queue of its own, for comparison.

    R groups are always in rollout; whoever ends it waits in a buffer of the depth that boundary dispatch has,
    `Q_b = (phi + 1) B`, and another one is dispatched at once, at the version published last. Training takes groups one
    by one, B a step, oldest version first, and is what the system waits for (otherwise the buffer isn't full and less is
    stale). Boundary dispatch holds the groups in rollout inside Q_b and dispatches after a publication only, so
    continuous dispatch is `1 + R/B` steps staler.
    """
    B, N = scenario.run.scheduler.B, scenario.run.scheduler.N
    depth = round((phi + 1) * B)
    durations = Durations(scenario.world, seed)
    shuffle = random.Random(f"{seed}:continuous")
    count, version, now = 0, 0, 0.0
    running: list[tuple[float, int, int]] = []
    blocked: deque[tuple[int, int]] = deque()
    buffer: list[tuple[int, int]] = []

    def start(at: float) -> None:
        nonlocal count
        longest = max(durations.draw(execution_id(count, member)).seconds for member in range(N))
        heapq.heappush(running, (at + longest * shuffle.uniform(0.9, 1.1), version, count))
        count += 1

    def settle(until: float) -> None:
        """Rollouts that end by then go to the buffer while it has room; each makes place for another."""
        while running and running[0][0] <= until:
            ended, dispatched, group = heapq.heappop(running)
            if len(buffer) < depth:
                heapq.heappush(buffer, (dispatched, group))
                start(ended)
            else:
                blocked.append((dispatched, group))

    for _ in range(in_rollout):
        start(0.0)
    mean_s = sum(durations.draw(execution_id(group, 0)).seconds for group in range(64)) / 64
    # Slow enough that R rollouts keep the buffer full.
    pace = 4.0 * mean_s / in_rollout
    found: list[int] = []
    warm = steps // 2
    while version < steps:
        for _ in range(B):
            now += pace
            settle(now)
            while not buffer:
                now = running[0][0]
                settle(now)
            dispatched, _ = heapq.heappop(buffer)
            if version >= warm:
                found.append(version - dispatched)
            if blocked:
                heapq.heappush(buffer, blocked.popleft())
                start(now)
        version += 1
    return statistics.fmean(found)


def _endless(base: str) -> Scenario:
    return changed(load(base), world={"ceiling_h": 1000.0})


def _at(scenario: Scenario, phi: float, mu: int, bursts: int) -> Scenario:
    steps = mu * (warm_up_bursts(phi, mu) + bursts)
    return changed(scenario, scheduler={"phi": phi, "mu": mu}, steps=steps)
