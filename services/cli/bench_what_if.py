"""`gyre bench what-if`: recorded runs asked about other parameters, beside fresh simulations with the same seed.

Every workload's scenario is made small (4 executions a group, 8 groups a step, slots in proportion, 24 steps), simulated, and
its log asked. Identity: unchanged parameters give every event back at its time, both followed and made again by the recorded
world alone from the first event on; the golden log of a real run is followed. Error: the largest over the times of all steps,
in percent of the fresh simulation's. Rows about what no recording holds are told, and are in no bound: one more execution in
each group, or what a micro-step costs under a strategy that makes it cheaper.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from replay.logfile import read_events
from replay.simulator.run import Simulation
from replay.simulator.scenario import FOLDER, Scenario, find, load
from replay.whatif.report import Asked
from schemas.envelope import Event
from services.cli.figures import machine
from services.cli.output import say, say_json, table

BOUND_PCT = 2.0
STEPS = 24
CHANGES: tuple[tuple[str, ...], ...] = (
    ("scheduler.rho_min=0.5",),
    ("scheduler.phi=1.0",),
    ("scheduler.phi=0.25",),
    ("scheduler.mu=2",),
    ("scheduler.tau_s=600",),
    ("packer.T=4000",),
    ("cells.pool=1", "cells.pool_capacity=18"),
    ("scheduler.strategy=colocate",),
    ("scheduler.strategy=async", "cells.trainable=2"),
    ("scheduler.oversample=1",),
)


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """One change of one recorded run."""

    scenario: str
    change: str
    error_pct: float
    """Largest over steps."""
    last_pct: float
    """Of the last step."""
    drawn: int
    """Executions of which something was drawn that could have mattered by the last step."""
    told: bool
    """Whether a recording holds what the change needs."""


class Same(msgspec.Struct, frozen=True, kw_only=True):
    log: str
    followed: bool
    alone: bool | None
    """None for a real run: processes hear of each other later each time."""


def what_if_bench(names: Sequence[str], log: Path, *, seed: int, json: bool) -> int:
    """0 when every identity is exact and every error within the bound. Raises ConfigError when a scenario is not known."""
    chosen = names or sorted(path.stem for path in FOLDER.glob("*.toml"))
    rows: list[Compared] = []
    same = [_golden(log)]
    for name in chosen:
        found, compared = _scenario(name, seed)
        same.append(found)
        rows += compared
    known = [each.error_pct for each in rows if each.told]
    figures = {
        "identity_exact": float(all(each.followed and each.alone is not False for each in same)),
        "logs": float(len(same)),
        "changes": float(len(known)),
        "max_error_pct": max(known),
        "mean_error_pct": sum(known) / len(known),
        "max_error_untold_pct": max((each.error_pct for each in rows if not each.told), default=0.0),
    }
    ok = figures["identity_exact"] == 1.0 and figures["max_error_pct"] <= BOUND_PCT
    targets = {"identity_exact": "== 1", "max_error_pct": f"<= {BOUND_PCT:g}"}
    if json:
        said = {"name": "what-if", "figures": figures, "targets": targets, "identity": same, "rows": rows, "ok": ok}
        say_json({**said, "machine": machine()})
        return 0 if ok else 1
    for line in [*_same(same), "", *_rows(rows), ""]:
        say(line)
    say(
        f"identity {'exact' if figures['identity_exact'] else 'not exact'} on {len(same)} logs; "
        f"{len(known)} changes within {figures['max_error_pct']:.2f}% (mean {figures['mean_error_pct']:.2f}%), "
        f"what no recording holds within {figures['max_error_untold_pct']:.1f}%"
    )
    say("ok" if ok else f"missed: {', '.join(f'{name} {bound}' for name, bound in targets.items())}")
    return 0 if ok else 1


def reduced(name: str, *overrides: str) -> Scenario:
    """A workload with fewer executions a step, and slots in proportion."""
    whole = load(name).run
    share = whole.scheduler.N * whole.scheduler.B / 32
    small = [f"run.steps={STEPS}", "run.scheduler.N=4", "run.scheduler.B=8"]
    small.append(f"run.cells.capacity={max(4, round(whole.cells.capacity / share))}")
    return load(name, [*small, *(f"run.{each}" for each in overrides)])


def _scenario(name: str, seed: int) -> tuple[Same, list[Compared]]:
    scenario = reduced(name)
    events = _simulated(scenario, seed)
    asked = Asked(events)
    label = find(name).stem
    same = Same(
        log=label,
        followed=asked.play(asked.config).events == events,
        alone=asked.play(asked.config, from_seq=1).events == events,
    )
    rows = []
    for change in CHANGES:
        changed = reduced(name, *change)
        answer = asked.answer(changed.run, world=False)
        fresh = _step_s(_simulated(changed, seed))
        errors = [
            100 * abs((each.what_if_s or 0.0) / fresh[each.step] - 1) for each in answer.steps if each.step in fresh
        ]
        compared = Compared(
            scenario=label,
            change=" ".join(change),
            error_pct=max(errors),
            last_pct=errors[-1],
            drawn=answer.steps[-1].drawn,
            told=_is_told(scenario, changed),
        )
        rows.append(compared)
        said = f"{label} {compared.change}: {compared.error_pct:.2f}%"
        print(said, file=sys.stderr, flush=True)  # noqa: T201  progress, beside the answer
    return same, rows


def _is_told(scenario: Scenario, changed: Scenario) -> bool:
    was, now = scenario.run.scheduler, changed.run.scheduler
    dearer = scenario.world.shared_work != 1.0 and (was.strategy == "async") != (now.strategy == "async")
    return now.group_size <= was.group_size and not dearer


def _golden(log: Path) -> Same:
    events = read_events(log)
    asked = Asked(events)
    return Same(log=log.stem, followed=asked.play(asked.config).events == events, alone=None)


def _simulated(scenario: Scenario, seed: int) -> list[Event]:
    simulation = Simulation(scenario, seed=seed, keep=True)
    simulation.run()
    return simulation.events


def _step_s(events: Sequence[Event]) -> dict[int, float]:
    return {each.data.step: (each.time_us - events[0].time_us) / 1e6 for each in events if each.kind == "batch.stepped"}


def _same(same: Sequence[Same]) -> list[str]:
    words = {True: "every event", False: "not the same", None: "-"}
    rows = [(each.log, words[each.followed], words[each.alone]) for each in same]
    return table([("unchanged", "followed", "the world alone"), *rows])


def _rows(rows: Sequence[Compared]) -> list[str]:
    head = ("scenario", "change", "worst step", "last step", "drawn", "")
    return table(
        [
            head,
            *(
                (
                    each.scenario,
                    each.change,
                    f"{each.error_pct:.2f}%",
                    f"{each.last_pct:.2f}%",
                    str(each.drawn),
                    "" if each.told else "no recording holds it",
                )
                for each in rows
            ),
        ]
    )
