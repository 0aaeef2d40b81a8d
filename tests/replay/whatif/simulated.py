"""Small simulated runs, recorded, and the same under other parameters."""

from __future__ import annotations

import functools

from replay.simulator.run import Simulation
from replay.whatif.report import Asked
from schemas.config import Config
from schemas.envelope import Event
from tests.replay.simulator.small import small

WAYS: dict[str, tuple[str, ...]] = {
    "elastic": (),
    "pool": ("run.cells.pool=1", "run.cells.pool_capacity=18", "world.pool_nodes=4"),
    "colocate": ("run.scheduler.strategy=colocate", "run.scheduler.streaming=false", "run.cells.trainable=3"),
    "async": ("run.scheduler.strategy=async", "run.cells.trainable=2"),
    "oversampled": ("run.scheduler.oversample=2",),
    "loaded": ("run.scheduler.oversample=2", "world.load_effect=0.4"),
}


@functools.cache
def simulated(*overrides: str, seed: int = 3) -> Simulation:
    simulation = Simulation(small(*overrides), seed=seed, keep=True)
    simulation.run()
    return simulation


def recorded(*overrides: str, seed: int = 3) -> tuple[list[Event], Asked]:
    events = simulated(*overrides, seed=seed).events
    return events, Asked(events)


def configured(*overrides: str) -> Config:
    return small(*overrides).run


def step_hours(events: list[Event]) -> list[float]:
    return [(each.time_us - events[0].time_us) / 3.6e9 for each in events if each.kind == "batch.stepped"]
