"""Scenarios that play in a fraction of a second."""

from __future__ import annotations

from replay.simulator.scenario import Scenario, load


def small(*overrides: str) -> Scenario:
    return load("small", ["run.steps=6", *overrides])
