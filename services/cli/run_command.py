"""`gyre run`: prepare, check, launch, sum up."""

from __future__ import annotations

import asyncio
import shlex
import shutil
import sys
import time
from pathlib import Path

from schemas.config import Config
from schemas.config_file import load
from services.cli import checks, preflight, prepare
from services.cli.chaos import processes
from services.cli.chaos_plan import Kill, plan
from services.cli.figures import Summary
from services.cli.launch import GivenUp, launch
from services.cli.output import quiet_logs, say, say_json, table
from services.cli.places import Places
from services.cli.plan import service_specs
from services.cli.view import View, open_view


def train(
    file: Path,
    overrides: list[str],
    *,
    state: Path,
    json: bool,
    quiet: bool,
    chaos: int | None = None,
    new: bool = False,
) -> int:
    """The whole run, or the rest of one that was stopped.

    Exit code 0 when it finished within its targets, 1 when not, 128 + signal when it was stopped. Raises GivenUp, once
    the summary is printed, when something kept failing."""
    config, here, places = load(file, overrides), file.absolute().parent, Places(state)
    quiet_logs()
    preflight.environment(config, places)
    if config.bus.url:
        asyncio.run(preflight.event_bus(config.bus.url))
    with places.hold(f"gyre run {file.name}"):
        view = open_view(quiet=quiet, json=json)
        failure: GivenUp | None = None
        try:
            prepared(config, here=here, places=places, view=view)
            tasks, held_out = preflight.inputs(config, places)
            running = launch(
                config,
                tasks=tasks,
                held_out=held_out,
                here=here,
                places=places,
                view=view,
                chaos_seed=chaos,
                new=new,
            )
            summary, signum = asyncio.run(running)
        except GivenUp as error:
            summary, signum, failure = error.summary, 0, error
        finally:
            view.close()
    if json:
        say_json(summary)
    else:
        for line in closing(summary, places, again=again(file, overrides, places)):
            say(line)
    if failure is not None:
        raise failure
    if signum:
        return 128 + signum
    return 0 if summary.ok else 1


def prepared(config: Config, *, here: Path, places: Places, view: View) -> None:
    """Make what the configuration says how to make, unless the cache has it."""

    def tell(step: prepare.Step, text: str) -> None:
        if not text:
            view.note(f"making {step.makes} (once; its log is {step.log})")
        else:
            view.busy(f"making {step.makes}: {text}")

    for step in prepare.steps(config, cache=places.cache, here=here):
        began = time.monotonic()
        was_ready = step.ready
        prepare.make(step, tell=tell)
        if not was_ready:
            view.note(f"made {step.makes} in {time.monotonic() - began:.0f} s")


def dry(file: Path, overrides: list[str], *, state: Path, json: bool, chaos: int | None = None) -> int:
    """Say what would run, and what would be killed when."""
    config, here, places = load(file, overrides), file.absolute().parent, Places(state)
    steps = prepare.steps(config, cache=places.cache, here=here)
    specs = service_specs(config, run="RUN", url=config.bus.url or "URL", state=places.root, here=here)
    kills: list[Kill] = []
    if chaos is not None:
        names = processes([spec.name for spec in specs], own_bus=not config.bus.url)
        kills = plan(names, seed=chaos, steps=config.steps, mu=config.scheduler.mu)
    if json:
        say_json(
            {
                "config": config,
                "state": str(places.root),
                "prepare": [{"makes": s.makes, "ready": s.ready, "command": s.command} for s in steps],
                "bus": config.bus.url or f"nats-server in {places.nats}",
                "services": [{"name": spec.name, "command": spec.command} for spec in specs],
                "chaos": kills,
            }
        )
        return 0
    s = config.scheduler
    size = f"{s.N} of {s.group_size}" if s.oversample else f"{s.N}"
    say(f"{config.name}: {config.steps} steps, N = {size}, B = {s.B}, mu = {s.mu}, phi = {s.phi:g}")
    say(f"held-out measurements: {checks.measurements(config)}")
    say(f"state folder {places.root}")
    for step in steps:
        say(f"prepare {step.makes}: {'in the cache' if step.ready else ' '.join(step.command)}")
    say(f"event bus: {config.bus.url or f'nats-server in {places.nats}'}")
    for spec in specs:
        say(f"service {spec.name}: {' '.join(spec.command[1:])}")
    for kill in kills:
        say(f"chaos kills {kill.process} at step {kill.at:.2f}; the run waits for it from {kill.hold:.2f} on")
    return 0


def again(file: Path, overrides: list[str], places: Places) -> str:
    """The command that goes on with a run of this file."""
    words = ["gyre", "run", str(file), *(word for override in overrides for word in ("--set", override))]
    return shlex.join(words) + _state(places)


def _state(places: Places) -> str:
    return "" if places.root == Path("state").absolute() else f" --state {shlex.quote(str(places.root))}"


def _unfound() -> str:
    """What makes the shell find `gyre`, where it doesn't yet."""
    if shutil.which("gyre"):
        return ""
    return f' (first: export PATH="{Path(sys.executable).parent}:$PATH")'


def closing(summary: Summary, places: Places, *, again: str) -> list[str]:
    """The summary as lines: figures, targets, where things are, what to try next; `again` goes on with the run."""
    folder = places.run(summary.run)
    state = _state(places)
    how = "finished" if summary.finished else "was stopped and is not finished"
    onward = [] if summary.finished else [f"  {again}", "      goes on with it; with --new another run begins"]
    rows = []
    for name, value in summary.figures.items():
        bound = summary.targets.get(name, "")
        # What a run that goes on may still reach is not missed.
        missed = "missed" if summary.finished or not bound.startswith(">=") else "not yet"
        mark = "" if not bound else f"{missed if name in summary.missed else 'ok'}, wanted {bound}"
        rows.append((f"  {name}", _number(value), mark))
    return [
        "",
        f"Run {summary.run} {how}.",
        *table(rows),
        *survived(summary),
        "",
        f"  log          gyre events --run {summary.run}{state}",
        f"  checkpoints  {folder / 'checkpoints'}",
        f"  workspaces   {folder / 'workspaces'}",
        f"  services     {folder / 'logs'}",
        "",
        f"Next{_unfound()}:",
        *onward,
        f"  gyre export {summary.run} -o run.gyre{state}",
        "  gyre check run.gyre     invariants of the paper, over the log",
        "  gyre replay run.gyre    every decision taken again and compared",
        f"  gyre events --kind 'cell.*'{state}",
    ]


def survived(summary: Summary) -> list[str]:
    """What was killed, as lines; none in a run without chaos."""
    if not summary.chaos:
        return []
    rows = [("  killed", "after step", "event", "ready again after")]
    for each in summary.chaos:
        ready = "never" if each.ready_after_s is None else f"{each.ready_after_s:.1f} s"
        rows.append((f"  {each.process}", str(each.at_step), str(each.at_sequence), ready))
    return ["", *table(rows)]


def _number(value: float | int | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) and abs(value) < 1e-2 and value else f"{value:g}"
