"""Makes the simulated logs that are kept here: every shipped scenario, made small, played with seed 0.

    make golden                   # those that are missing; the table of all that are kept
    make golden ARGS=--anew       # all of them, by the code as it is

A log that is kept is worth something because older code recorded it, so making all of them anew is for a scenario that
changed, or for a flag that every new run records.
"""

from __future__ import annotations

import sys
from pathlib import Path

from replay.logfile import Manifest, read
from replay.simulator.run import Simulation
from replay.simulator.scenario import FOLDER, Scenario, load
from services.cli.output import say

KEPT = Path(__file__).parent
README = KEPT / "README.md"
TABLE = "| log |"
"""Where the table begins, the last thing in the README."""
SIMULATED = KEPT / "simulated"
SCENARIOS = sorted(path.stem for path in FOLDER.rglob("*.toml"))
N, B, BURSTS = 4, 4, 2


def small(name: str) -> Scenario:
    """The scenario with 4 executions a group, 4 groups a step and two bursts; slots in the same proportion to them."""
    run = load(name).run
    share = N * B / (run.scheduler.N * run.scheduler.B)
    return load(
        name,
        [
            f"run.steps={BURSTS * run.scheduler.mu}",
            f"run.scheduler.N={N}",
            f"run.scheduler.B={B}",
            f"run.cells.capacity={max(1, round(run.cells.capacity * share))}",
            f"run.cells.pool_capacity={max(1, round(run.cells.pool_capacity * share))}",
        ],
    )


def make(name: str) -> Manifest:
    simulation = Simulation(small(name), seed=0, keep=True)
    simulation.run()
    return simulation.write(SIMULATED / f"{name}.gyre")


def table() -> str:
    """Of all logs that are kept, as the README has it."""
    lines = ["| log | strategy | flags | events | bytes | digest |", "| --- | --- | --- | --- | --- | --- |"]
    total = 0
    for path in sorted(KEPT.rglob("*.gyre")):
        log, size = read(path), path.stat().st_size
        total += size
        # The first logs' manifests lack the configuration.
        strategy, flags = next(iter(log)).data.config.scheduler.strategy, ", ".join(log.manifest.flags)
        name = path.relative_to(KEPT)
        lines.append(f"| `{name}` | {strategy} | {flags} | {len(log)} | {size} | `{log.manifest.digest}` |")
    return "\n".join([*lines, f"| together | | | | {total} | |"]) + "\n"


def main(*, anew: bool) -> None:
    for name in SCENARIOS:
        if anew or not (SIMULATED / f"{name}.gyre").is_file():
            make(name)
    text = README.read_text()
    README.write_text(text[: text.index(TABLE)] + table())
    say(table())


if __name__ == "__main__":
    main(anew="--anew" in sys.argv[1:])
