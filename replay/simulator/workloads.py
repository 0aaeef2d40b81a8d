"""The paper's workloads: elastic against async and colocate at one staleness, and how far each is from its bound.

Means over seeds with their spread. Speedups are taken seed by seed, as all strategies meet the same executions there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from replay.simulator.account import Outcome
from replay.simulator.bounds import mean_headroom
from replay.simulator.durations import profile
from replay.simulator.pool import ALONE, Runs, Spread, over_seeds, spread, spread_of
from replay.simulator.scenario import ABLATION, Scenario, changed, load

Strategy = Literal["elastic", "async", "colocate"]
STRATEGIES: tuple[Strategy, ...] = ("elastic", "async", "colocate")


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    scenario: str
    staleness: float
    paper_async: tuple[float, float]
    """Least and greatest speedup that the paper reports: a range, or one number twice."""
    paper_colocate: tuple[float, float]
    reading: str = ""
    """What is assumed where the paper leaves it open."""
    predicted: bool = False
    """Whether these speedups must be in the paper's range: they have the numbers that predict the rows of the ablation."""


def _single(scenario: str, staleness: float, *, over_async: float, over_colocate: float, reading: str) -> Workload:
    """One for which the paper reports a number, no range."""
    return Workload(
        scenario=scenario,
        staleness=staleness,
        paper_async=(over_async, over_async),
        paper_colocate=(over_colocate, over_colocate),
        reading=reading,
    )


_ASSUMED = "durations and W assumed"
WORKLOADS = (
    *(
        Workload(
            scenario=scenario,
            staleness=staleness,
            paper_async=(1.42, 1.53),
            paper_colocate=(1.36, 1.47),
            reading=reading,
            predicted=scenario == "nl2repobench-122b-three",
        )
        for scenario, reading in (
            ("nl2repobench-122b-three", "fitted on A0, C0, E0 alone"),
            ("nl2repobench-122b", "fitted on all rows"),
            ("nl2repobench-122b-mean", "durations of the whole run's mean"),
        )
        for staleness in (1.0, 1.5)
    ),
    _single("deepswe-122b", 1.0, over_async=1.569, over_colocate=1.610, reading=_ASSUMED),
    _single("deepswe-122b", 1.5, over_async=1.572, over_colocate=1.824, reading=_ASSUMED),
    _single("terminalbench-122b", 1.0, over_async=1.383, over_colocate=1.809, reading=_ASSUMED),
    _single("terminalbench-122b", 1.5, over_async=1.430, over_colocate=1.849, reading=_ASSUMED),
    _single("nl2repobench-2.4t", 1.5, over_async=1.78, over_colocate=1.21, reading="384 executions a cell"),
    _single("nl2repobench-2.4t-total", 1.5, over_async=1.78, over_colocate=1.21, reading="384 executions in total"),
)

NOTES = (
    "each strategy is balanced to the staleness: elastic (0.5, 2 E[d]), async (E[d], 1) with half of the nodes training, "
    "colocate (0, 2 E[d] + 1); neither baseline streams",
    "2.4T: 384 concurrent executions in total cannot serve 512 executions a step of some 2.8 h in the 1.57 h a step that "
    "the paper reports (512 x 2.8 h / 384 = 3.7 h), so 384 a cell is played beside it; the split of the paper's async "
    "baseline is not published, here it is half",
)


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """One strategy on one workload."""

    hours: Spread
    bound_h: float
    """All work over all capacity."""
    above_pct: float
    """How far its hours are above that."""


class Speedup(msgspec.Struct, frozen=True, kw_only=True):
    """One workload at one staleness target: the paper's strategy against both baselines."""

    workload: str
    reading: str
    staleness: float
    elastic: Played
    split: Played
    """Async, half of the nodes train."""
    together: Played
    """Colocate."""
    over_async: Spread
    over_colocate: Spread
    paper_async: tuple[float, float]
    paper_colocate: tuple[float, float]
    predicted: bool

    @property
    def outside(self) -> list[str]:
        """Speedups whose mean is not in the paper's range."""
        found = []
        for name, ours, (low, high) in (
            ("async", self.over_async, self.paper_async),
            ("colocate", self.over_colocate, self.paper_colocate),
        ):
            if not low <= ours.mean <= high:
                ours_is = f"{ours.mean:.3f} ±{ours.sd:.3f} over {name}"
                found.append(
                    f"{self.workload} at E[d] = {self.staleness:g}: {ours_is}, the paper has {low:g}-{high:g}"
                )
        return found


def strategy_at(scenario: Scenario, strategy: Strategy, staleness: float) -> Scenario:
    """The strategy at this mean staleness, as the paper balances them: elastic (0.5, 2 E[d]), async (E[d], 1) with half
    of the cells training, colocate (0, 2 E[d] + 1); neither baseline streams."""
    whole = round(2 * staleness)
    phi, mu = {"elastic": (0.5, whole), "async": (staleness, 1), "colocate": (0.0, whole + 1)}[strategy]
    cells = scenario.run.cells
    return changed(
        scenario,
        name=f"{scenario.name}-{strategy}-{staleness:g}",
        scheduler={"strategy": strategy, "phi": phi, "mu": mu, "streaming": strategy == "elastic"},
        cells={"trainable": cells.count // 2 if strategy == "async" else cells.count},
    )


def chosen(only: str = "") -> list[Workload]:
    """All workloads, or those whose scenario's name begins so."""
    return [each for each in WORKLOADS if each.scenario.startswith(only)]


def speedups(*, seeds: Sequence[int], runs: Runs = ALONE, only: str = "", steps: int = 0) -> list[Speedup]:
    """Of the chosen workloads, with their own number of steps or with `steps`."""
    workloads = chosen(only)
    scenarios = []
    for each in workloads:
        base = load(each.scenario)
        base = changed(base, steps=steps or base.run.steps)
        scenarios += [strategy_at(base, strategy, each.staleness) for strategy in STRATEGIES]
    outcomes = over_seeds(scenarios, seeds, runs=runs)
    found = []
    for index, each in enumerate(workloads):
        three = slice(3 * index, 3 * index + 3)
        elastic, split, together = outcomes[three]
        played = [_played(scenario, over) for scenario, over in zip(scenarios[three], outcomes[three], strict=True)]
        found.append(
            Speedup(
                workload=each.scenario,
                reading=each.reading,
                staleness=each.staleness,
                elastic=played[0],
                split=played[1],
                together=played[2],
                over_async=_ratio(split, elastic),
                over_colocate=_ratio(together, elastic),
                paper_async=each.paper_async,
                paper_colocate=each.paper_colocate,
                predicted=each.predicted,
            )
        )
    return found


def assumptions(only: str = "") -> list[str]:
    """What is assumed of the workloads whose durations the paper does not give, in words, one line a scenario."""
    found = []
    for name in dict.fromkeys(each.scenario for each in chosen(only) if each.reading == _ASSUMED):
        scenario = load(name)
        world = scenario.world
        drawn = profile(world, N=scenario.run.scheduler.N, groups=1000)
        found.append(
            f"{name}, assumed: an execution takes {drawn.mean_h:.2f} h in the mean, the longest of a group {drawn.group_max_h:.2f} h, "
            f"at most {world.ceiling_h:g} h; W {world.work_node_h:g} node-h. The paper gives neither, so its speedups cannot be tested here"
        )
    return found


def _played(scenario: Scenario, outcomes: Sequence[Outcome]) -> Played:
    room = mean_headroom(scenario, outcomes)
    return Played(hours=spread(outcomes), bound_h=room.bound_h, above_pct=room.above_pct)


def _ratio(slower: Sequence[Outcome], faster: Sequence[Outcome]) -> Spread:
    """Seed by seed."""
    return spread_of([a.hours / b.hours for a, b in zip(slower, faster, strict=True)])


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """How far a scenario's strategy is from the time that its work needs."""

    scenario: str
    title: str
    hours: Spread
    bound_h: float
    above_pct: float
    rollout_pct: float
    training_pct: float
    waiting_pct: float
    empty_pct: float


def every_scenario() -> list[Scenario]:
    """The rows of the ablation, and each workload with each strategy."""
    rows = [load(name) for name in ABLATION]
    return rows + [
        strategy_at(load(each.scenario), strategy, each.staleness) for each in WORKLOADS for strategy in STRATEGIES
    ]


def gaps(scenarios: Sequence[Scenario], *, seeds: Sequence[int], runs: Runs = ALONE) -> list[Gap]:
    """Headroom, as means over seeds."""
    found = []
    for scenario, outcomes in zip(scenarios, over_seeds(scenarios, seeds, runs=runs), strict=True):
        room = mean_headroom(scenario, outcomes)
        found.append(
            Gap(
                scenario=scenario.name,
                title=scenario.title,
                hours=spread(outcomes),
                bound_h=room.bound_h,
                above_pct=room.above_pct,
                rollout_pct=room.rollout_pct,
                training_pct=room.training_pct,
                waiting_pct=room.waiting_pct,
                empty_pct=room.empty_pct,
            )
        )
    return found
