"""`gyre simulate`: a scenario played by the real deciders in a modelled world, or a suite of them beside the paper's numbers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from schemas.errors import ConfigError
from services.cli.output import say, say_json, table

if TYPE_CHECKING:
    from replay.simulator.account import Outcome
    from replay.simulator.scenario import Scenario


def simulate_command(
    file: str, overrides: list[str], *, seed: int, output: Path | None, timeline: Path | None, json: bool
) -> int:
    """0: the run came to its end. 2: the scenario is none."""
    from replay.simulator.bounds import Headroom, headroom
    from replay.simulator.run import Simulation
    from replay.simulator.scenario import load
    from replay.timeline import Tracks, write, written_as

    scenario = load(file, overrides)
    picture = Tracks(f"{scenario.title}; seed {seed}")
    if timeline is not None:
        written_as(timeline)
    began = time.perf_counter()
    simulation = Simulation(scenario, seed=seed, keep=output is not None, watchers=[picture.see] if timeline else [])
    outcome = simulation.run()
    took = time.perf_counter() - began
    if output is not None:
        simulation.write(output)
    if timeline is not None:
        write(picture.take(), timeline)
    bound: Headroom = headroom(scenario, outcome)
    if json:
        say_json(
            {"outcome": outcome, "headroom": bound, "log": str(output or ""), "wall_s": took, "world": _world(scenario)}
        )
        return 0
    say(f"{scenario.title}; seed {seed}")
    for line in table(_told(scenario, outcome)):
        say(f"  {line}")
    say(f"  lower bound {bound.bound_h:.2f} h, {bound.above_pct:.1f}% above it: {bound}")
    say(f"{outcome.events} events in {took:.1f} s" + (f"; log in {output}" if output is not None else ""))
    return 0


def parameters_command(file: str, overrides: list[str], *, json: bool) -> int:
    """Every number of the scenario's world, and where it comes from."""
    from replay.simulator.scenario import load

    scenario = load(file, overrides)
    if json:
        say_json(_world(scenario))
        return 0
    say(scenario.title)
    rows = [(key, f"{entry['value']:g}", str(entry["origin"])) for key, entry in _world(scenario).items()]
    for line in table([("parameter", "value", "origin"), *rows]):
        say(f"  {line}")
    return 0


def _world(scenario: Scenario) -> dict[str, dict[str, float | str]]:
    world = scenario.world
    return {key: {"value": getattr(world, key), "origin": scenario.origin_of(key)} for key in world.__struct_fields__}


def _told(scenario: Scenario, outcome: Outcome) -> list[tuple[str, ...]]:
    paper = scenario.paper
    rows: list[tuple[str, ...]] = [("hours", f"{outcome.hours:.2f}", f"for {outcome.steps} steps")]
    if paper.hours:
        error = 100 * (outcome.hours / paper.hours - 1)
        rows.append(("paper", f"{paper.hours:.2f}", f"{error:+.1f}%"))
    rows.append(("staleness", f"{sum(outcome.staleness) / len(outcome.staleness):.3f}", "mean over all groups"))
    rows.append(("transitions", str(outcome.transitions), f"{outcome.routes_moved} executions moved"))
    rows.append(("excluded", str(outcome.excluded), f"executions, {outcome.discarded} groups discarded"))
    if outcome.surplus:
        rows.append(("surplus", str(outcome.surplus), "executions given up"))
    return rows


def one_of(**given: object) -> str:
    """The name of the one thing that is asked for. Raises ConfigError for none or several."""
    names = [name for name, value in given.items() if value]
    if len(names) != 1:
        raise ConfigError(
            f"{' and '.join(names) or 'nothing'} given",
            remedy=f"give one of {', '.join(given)}; see gyre simulate --help",
        )
    return names[0]
