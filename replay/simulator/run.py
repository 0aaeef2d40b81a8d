"""One simulated run: a scenario's world, played by the loop of `replay.simulator.play`, and counted."""

from __future__ import annotations

from collections.abc import Sequence

from replay.simulator.account import Account, Outcome
from replay.simulator.answers import Modelled
from replay.simulator.play import Play, Watcher
from replay.simulator.scenario import Scenario
from schemas import events as e
from schemas.flags import NEWEST
from schemas.units import TaskRef

START_US = 1_767_225_600_000_000
"""2026-01-01 00:00 UTC: where virtual clocks begin."""
_TASKS = 64


class Simulation(Play):
    """`run` plays the scenario to its end. `events` is the log where `keep` is set; `watchers` see every event.

    >>> outcome = Simulation(load("E0"), seed=1).run()
    >>> round(outcome.hours, 1)
    """

    def __init__(
        self, scenario: Scenario, *, seed: int = 0, keep: bool = False, watchers: Sequence[Watcher] = ()
    ) -> None:
        self.scenario, self.seed = scenario, seed
        self._account = Account(scenario)
        super().__init__(
            scenario.run,
            Modelled(scenario, seed),
            name=f"r-simulated-{seed:04d}",
            start_us=START_US,
            keep=keep,
            watchers=[self._account.see, *watchers],
        )

    def run(self, *, limit: int = 50_000_000) -> Outcome:
        """Raises GyreError when nothing is left to happen although the run is not over, or after `limit` events."""
        tasks = [TaskRef(name=f"task-{index:03d}", digest=f"{index:016x}") for index in range(_TASKS)]
        config = self.scenario.run
        started = e.RunStarted(seed=self.seed, config=config, tasks=tasks, code="simulated", flags=NEWEST)
        self._say("operator", "run.started", self.name, started, id=f"{self.name}.started", cause=0)
        self._facts.begin(self._now_us)
        self.play(limit=limit)
        return self._account.outcome(self.seed, self.count)


def simulate(scenario: Scenario, *, seed: int = 0) -> Outcome:
    """One run, nothing kept but its account."""
    return Simulation(scenario, seed=seed).run()
