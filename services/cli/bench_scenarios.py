"""`gyre bench scenarios`: every shipped scenario at full size, simulated to a file, and the file decided again.

One run after the other; what is told of each is how long it lasted on its virtual clock, how many events that are, and the
processor's seconds that making and replaying them took.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from replay.logfile import read
from replay.logwriter import LogWriter
from replay.replayer import Replayer
from replay.simulator.run import Simulation
from replay.simulator.scenario import FOLDER, find, load
from schemas.envelope import Event
from services.cli.figures import machine
from services.cli.output import say, say_json, table
from services.mesh import codec

HOURS_A_SECOND = 1.0
"""Virtual hours that are replayed in a second of a processor, at least."""


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """One scenario."""

    scenario: str
    strategy: str
    hours: float
    """Of its virtual clock."""
    events: int
    simulate_s: float
    """Writing the file included."""
    replay_s: float
    decisions: int
    same: int
    ok: bool


def scenarios_bench(names: Sequence[str], *, seed: int, folder: Path | None, json: bool) -> int:
    """0 when every log replays the same, and fast. Logs stay in `folder`, or are removed where none is given.

    Raises ConfigError when a scenario is not known."""
    chosen = names or sorted(path.stem for path in FOLDER.rglob("*.toml"))
    for name in chosen:
        load(name)
    if folder is None:
        with TemporaryDirectory(prefix="gyre-bench-") as own:
            return _bench(chosen, seed, Path(own), json=json)
    return _bench(chosen, seed, folder, json=json)


def _bench(names: Sequence[str], seed: int, folder: Path, *, json: bool) -> int:
    runs = []
    for name in names:
        played = play(name, seed, folder / f"{find(name).stem}.gyre")
        runs.append(played)
        told = f"{name}: {played.hours:.2f} h, {played.events} events, replayed in {played.replay_s:.1f} s"
        print(told, file=sys.stderr, flush=True)  # noqa: T201  progress, beside the answer
    differ = sum(not each.ok for each in runs)
    events, seconds = sum(each.events for each in runs), sum(each.replay_s for each in runs)
    longest = max(runs, key=lambda each: each.hours)
    slowest = min(each.hours / each.replay_s for each in runs)
    figures = {
        "scenarios": len(runs),
        "differ": differ,
        "events": events,
        "events_per_s": round(events / seconds),
        "replay_s": round(seconds, 1),
        "longest_h": round(longest.hours, 2),
        "longest_replay_s": round(longest.replay_s, 2),
        "least_hours_per_s": round(slowest, 2),
    }
    targets = {"differ": "== 0", "least_hours_per_s": f">= {HOURS_A_SECOND:g}"}
    ok = not differ and slowest >= HOURS_A_SECOND
    if json:
        said = {"name": "scenarios", "figures": figures, "targets": targets, "runs": runs, "ok": ok}
        say_json({**said, "machine": machine()})
        return 0 if ok else 1
    for line in _table(runs):
        say(line)
    say(f"{len(runs)} scenarios, {differ} differ; {events} events replayed in {seconds:.1f} s")
    say("ok" if ok else f"missed: {', '.join(f'{name} {bound}' for name, bound in targets.items())}")
    return 0 if ok else 1


def play(name: str, seed: int, path: Path) -> Played:
    """Simulates to the file, and replays the file."""
    scenario = load(name)
    began = time.process_time()
    with LogWriter(path) as writer:

        def write(event: Event) -> None:
            writer.add(codec.stored(event, run=simulation.name))

        simulation = Simulation(scenario, seed=seed, watchers=[write])
        outcome = simulation.run()
        writer.finish()
    made = time.process_time()
    result = Replayer().replay(read(path))
    return Played(
        scenario=find(name).stem,
        strategy=scenario.run.scheduler.strategy,
        hours=outcome.hours,
        events=result.events,
        simulate_s=made - began,
        replay_s=time.process_time() - made,
        decisions=sum(each.recorded for each in result.deciders),
        same=sum(each.same for each in result.deciders),
        ok=result.ok and all(each.recorded == each.same > 0 for each in result.deciders),
    )


def _table(runs: Sequence[Played]) -> list[str]:
    head = ("scenario", "strategy", "hours", "events", "simulated in s", "replayed in s", "decisions", "the same")
    rows = [
        (
            each.scenario,
            each.strategy,
            f"{each.hours:.2f}",
            str(each.events),
            f"{each.simulate_s:.1f}",
            f"{each.replay_s:.1f}",
            str(each.decisions),
            "all" if each.ok else str(each.same),
        )
        for each in runs
    ]
    return table([head, *rows])
