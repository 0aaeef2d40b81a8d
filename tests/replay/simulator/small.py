"""Scenarios that play in a fraction of a second."""

from __future__ import annotations

from replay.simulator.scenario import Scenario, load

SMALL = (
    "run.steps=6",
    "run.scheduler.N=4",
    "run.scheduler.B=8",
    "run.cells.count=4",
    "run.cells.trainable=4",
    "run.cells.capacity=18",
    "run.packer.T=2000",
    "world.work_node_h=3.0",
)


def small(*overrides: str, name: str = "E0") -> Scenario:
    return load(name, [*SMALL, *overrides])
