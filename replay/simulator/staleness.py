"""Mean staleness in simulated steady states beside `E[d] = phi + (mu - 1)/2`, and continuous dispatch beside boundary dispatch.

The identity counts groups and knows no time, so any world must show it: over whole bursts, once the groups of the initial
dispatch are consumed, and while no group is discarded (a replacement is dispatched at another boundary than the group that it
replaces).
"""

from __future__ import annotations

import heapq
import math
import random
import statistics
from collections import deque
from collections.abc import Sequence

import msgspec

from replay.simulator.account import Outcome
from replay.simulator.durations import Durations
from replay.simulator.pool import play
from replay.simulator.scenario import Scenario, changed, load
from schemas.ids import execution_id
from services.scheduler.core.equations import mean_staleness

PHI = (0.0, 0.5, 1.0, 1.5, 2.5)
MU = (1, 2, 3, 4)
TOLERANCE = 0.02
"""A group that is late for the window's first or last step moves a mean over some hundred groups by that much."""
MEASURED_BURSTS = 24


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One (phi, mu)."""

    phi: float
    mu: int
    expected: float
    measured: float
    groups: int
    """That were measured."""

    @property
    def ok(self) -> bool:
        return abs(self.measured - self.expected) < TOLERANCE


class Dispatch(msgspec.Struct, frozen=True, kw_only=True):
    """Boundary against continuous dispatch at one phi, mu = 1."""

    phi: float
    in_rollout: int
    """R: groups that continuous dispatch keeps in rollout."""
    boundary: float
    continuous: float
    expected: float
    """1 + R/B."""

    @property
    def ok(self) -> bool:
        return abs(self.continuous - self.boundary - self.expected) < 2 * TOLERANCE


def warm_up_bursts(phi: float, mu: int) -> int:
    """Bursts until the last group of the initial dispatch is consumed, and one more."""
    return math.ceil((phi + mu) / mu) + 1


def steady(outcome: Outcome, phi: float, mu: int) -> list[float]:
    """Mean staleness of each step after the warm-up."""
    return outcome.staleness[warm_up_bursts(phi, mu) * mu :]


def grid(
    *,
    seed: int = 0,
    jobs: int = 1,
    base: str = "small",
    phis: Sequence[float] = PHI,
    mus: Sequence[int] = MU,
    bursts: int = MEASURED_BURSTS,
) -> list[Point]:
    """Every phi with every mu, over whole bursts after the warm-up. Executions always earn a score here."""
    scenario = changed(load(base), world={"ceiling_h": 1000.0})
    pairs = [(phi, mu) for phi in phis for mu in mus]
    outcomes = play([(_at(scenario, phi, mu, bursts), seed) for phi, mu in pairs], jobs=jobs)
    return [
        Point(
            phi=phi,
            mu=mu,
            expected=mean_staleness(phi=phi, mu=mu),
            measured=statistics.fmean(steady(outcome, phi, mu)),
            groups=len(steady(outcome, phi, mu)) * scenario.run.scheduler.B,
        )
        for (phi, mu), outcome in zip(pairs, outcomes, strict=True)
    ]


def dispatches(
    *,
    seed: int = 0,
    jobs: int = 1,
    base: str = "small",
    phis: Sequence[float] = (0.5, 1.5),
    shares: Sequence[float] = (0.5, 1.0, 2.0),
) -> list[Dispatch]:
    """E_c[d] - E_b[d] for R = share * B. Boundary dispatch is the scheduler's; continuous dispatch is `continuous`."""
    scenario = changed(load(base), world={"ceiling_h": 1000.0})
    B = scenario.run.scheduler.B
    outcomes = play([(_at(scenario, phi, 1, MEASURED_BURSTS), seed) for phi in phis], jobs=jobs)
    found = []
    for phi, outcome in zip(phis, outcomes, strict=True):
        boundary = statistics.fmean(steady(outcome, phi, 1))
        for share in shares:
            R = round(share * B)
            found.append(
                Dispatch(
                    phi=phi,
                    in_rollout=R,
                    boundary=boundary,
                    continuous=continuous(scenario, phi=phi, in_rollout=R, seed=seed),
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


def _at(scenario: Scenario, phi: float, mu: int, bursts: int) -> Scenario:
    steps = mu * (warm_up_bursts(phi, mu) + bursts)
    return changed(scenario, scheduler={"phi": phi, "mu": mu}, steps=steps)
