"""`gyre fault`: the mesh under a virtual clock with faults from a seed, one run or many; a failing one is made small.

A run is a pure function of its plan and the code, so a plan file is all that is needed to see a violation again.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from schemas.errors import ConfigError
from services.cli.output import say, say_json

if TYPE_CHECKING:
    from replay.fault.run import Outcome

SEEDS_PER_MIN = 300
"""Bound of the bench, for one core."""
_SHOWN = 10


class Failed(msgspec.Struct, frozen=True, kw_only=True):
    """A seed that violated something."""

    seed: int
    violations: list[str]
    faults: int
    """Faults left after shrinking."""
    plan: str
    """File of the plan that shows it."""


class Ran(msgspec.Struct, frozen=True, kw_only=True):
    """One seed of many."""

    seed: int
    events: int
    executions: int
    struck: int
    violations: list[str]
    cpu_s: float
    """With what it takes to clean up after it."""
    virtual_s: float


def fault_command(
    *,
    seed: int | None,
    seeds: int | None,
    first: int,
    plan: Path | None,
    output: Path | None,
    jobs: int,
    plans: Path,
    json: bool,
) -> int:
    """0: nothing was violated. 1: something was. 2: the plan is no plan."""
    given = [name for name, value in (("--seed", seed), ("--seeds", seeds), ("--plan", plan)) if value is not None]
    if len(given) != 1:
        raise ConfigError(
            f"{' and '.join(given) or 'nothing'} given", remedy="give one of --seed N, --seeds COUNT and --plan FILE"
        )
    if seeds is not None:
        return _many(seeds, first=first, jobs=jobs, plans=plans, json=json)
    from replay.fault.draw import draw
    from replay.fault.plan import read
    from replay.fault.run import simulate_plan
    from replay.fault.setting import setting_of

    chosen = read(plan) if plan is not None else draw(seed or 0, setting_of(seed or 0))
    outcome = simulate_plan(chosen)
    if output is not None:
        outcome.write(output)
    if json:
        say_json(_as_json(outcome))
    else:
        _print(outcome, output)
    if outcome.ok:
        return 0
    if plan is None:
        _say_small(outcome, plans, json=json)
    return 1


def _print(outcome: Outcome, output: Path | None) -> None:
    for struck in outcome.struck:
        fault = outcome.plan.faults[struck.place]
        say(f"  {struck.at_s:12.3f} s  sequence {struck.seq:5d}  {fault}")
    idle = len(outcome.plan.faults) - len({struck.place for struck in outcome.struck})
    say(
        f"seed {outcome.plan.seed}: {len(outcome.log)} events in {outcome.virtual_s / 3600:.1f} virtual hours, "
        f"{outcome.cpu_s:.2f} s of work; {len(outcome.struck)} faults struck, {idle} did not; log {outcome.digest}"
    )
    if output is not None:
        say(f"log written to {output}")
    for violation in outcome.violations[:_SHOWN]:
        say(str(violation))
    say("nothing was violated" if outcome.ok else f"{len(outcome.violations)} violations")


def _as_json(outcome: Outcome) -> dict[str, Any]:
    return {
        "seed": outcome.plan.seed,
        "ok": outcome.ok,
        "events": len(outcome.log),
        "digest": outcome.digest,
        "virtual_s": outcome.virtual_s,
        "cpu_s": outcome.cpu_s,
        "struck": [
            {"at_s": struck.at_s, "seq": struck.seq, "fault": outcome.plan.faults[struck.place]}
            for struck in outcome.struck
        ],
        "violations": outcome.violations,
    }


def _say_small(outcome: Outcome, plans: Path, *, json: bool) -> Failed:
    """Shrinks, writes the plan, and says how to repeat it."""
    from replay.fault.plan import encode
    from replay.fault.shrink import shrink

    small = shrink(outcome)
    plans.mkdir(parents=True, exist_ok=True)
    names = sorted({violation.invariant for violation in small.violations})
    path = plans / f"seed-{outcome.plan.seed}-{names[0]}.json"
    path.write_bytes(encode(msgspec.structs.replace(small.plan, note=str(small.violations[0])[:500])))
    if not json:
        say(f"seed {outcome.plan.seed}, {len(small.plan.faults)} faults are enough:")
        for fault in small.plan.faults:
            say(f"  {fault}")
        for violation in small.violations[:3]:
            say(str(violation))
        say(f"again: gyre fault --plan {path}")
    return Failed(seed=outcome.plan.seed, violations=names, faults=len(small.plan.faults), plan=str(path))


def _many(count: int, *, first: int, jobs: int, plans: Path, json: bool) -> int:
    from services.cli.figures import machine

    began = time.monotonic()
    totals: Counter[str] = Counter()
    failed: list[Failed] = []
    cpu_s = virtual_s = 0.0
    with _progress() as show:
        for done, ran in enumerate(_run_all(range(first, first + count), jobs), start=1):
            totals["faults"] += ran.struck
            totals["events"] += ran.events
            totals["executions"] += ran.executions
            totals["violations"] += len(ran.violations)
            cpu_s, virtual_s = cpu_s + ran.cpu_s, virtual_s + ran.virtual_s
            per_min = 60 * done / (time.monotonic() - began)
            show(f"{done} of {count} seeds, {per_min:.0f} a minute, {totals['violations']} violations")
            if ran.violations:
                failed.append(_say_small(_again(ran.seed), plans, json=json))
    seconds = time.monotonic() - began
    figures = {
        "seeds": count,
        "seeds_per_min": round(60 * count / seconds, 1),
        "seeds_per_cpu_min": round(60 * count / cpu_s, 1) if cpu_s else 0.0,
        "faults": totals["faults"],
        "faults_per_seed": round(totals["faults"] / count, 1),
        "executions_per_seed": round(totals["executions"] / count, 1),
        "events_per_seed": round(totals["events"] / count, 1),
        "virtual_days": round(virtual_s / 86_400, 1),
        "violations": totals["violations"],
        "failed_seeds": len(failed),
    }
    if json:
        say_json(
            {
                "name": "fault",
                "figures": figures,
                "targets": {"violations": "== 0", "seeds_per_cpu_min": f">= {SEEDS_PER_MIN}"},
                "failed": failed,
                "ok": not failed,
                "machine": machine(),
            }
        )
    else:
        say(", ".join(f"{name} {value}" for name, value in figures.items()))
    return 1 if failed else 0


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """One line on the terminal, written anew; nothing where there is none."""
    from rich.console import Console

    console = Console(stderr=True)
    with console.status("importing", refresh_per_second=2) as status:
        yield status.update


def _again(seed: int) -> Outcome:
    from replay.fault.run import simulate

    return simulate(seed)


def _run_all(seeds: range, jobs: int) -> Iterator[Ran]:
    """In rising order of seeds, whatever process ran them."""
    if jobs == 1:
        _prepare()
        try:
            yield from map(_one, seeds)
        finally:
            gc.unfreeze()
            gc.enable()
        return
    # A fresh interpreter each: what a child inherits by forking would be another memory to start from.
    context = multiprocessing.get_context("spawn")
    with context.Pool(jobs or os.cpu_count() or 1, initializer=_prepare) as pool:
        yield from pool.imap(_one, seeds, chunksize=8)


def _prepare() -> None:
    """Imports first; what they leave is no garbage of any run. From here on garbage is collected between runs."""
    import replay.fault.run

    assert replay.fault.run
    gc.disable()
    gc.collect()
    gc.freeze()


def _one(seed: int) -> Ran:
    began = time.process_time()
    outcome = _again(seed)
    ran = Ran(
        seed=seed,
        events=len(outcome.log),
        executions=sum(
            stored.subject.endswith(".dispatched") and ".execution." in stored.subject for stored in outcome.log
        ),
        struck=len({struck.place for struck in outcome.struck}),
        violations=[str(violation) for violation in outcome.violations],
        cpu_s=0.0,
        virtual_s=outcome.virtual_s,
    )
    del outcome
    gc.collect()
    return msgspec.structs.replace(ran, cpu_s=time.process_time() - began)
