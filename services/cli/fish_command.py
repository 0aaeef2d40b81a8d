"""`gyre bench fish`: every planted bug in a copy of the code, and the seeds that the fault net needs to find it."""

from __future__ import annotations

import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from services.cli.output import say, say_json, table


def fish_command(*, seeds: int | None, named: list[str], jobs: int, json: bool) -> int:
    """0 when every planted bug was found within so many seeds. `named` are numbers or beginnings of names."""
    from replay.fault.planted import SEEDS, Catch, fish, patches
    from schemas.errors import ConfigError
    from services.cli.figures import machine

    bound, tree = seeds or SEEDS, Path.cwd()
    chosen = [patch for patch in patches() if not named or any(patch.stem.startswith(name) for name in named)]
    if not chosen:
        raise ConfigError(f"no planted bug is called {' or '.join(named)}", remedy="tests/fault/planted has them all")
    began = time.monotonic()

    def one(patch: Path) -> Catch:
        catch = fish(patch, tree=tree, seeds=bound)
        print(f"{catch.patch}: {_seeds(catch.seeds)}", file=sys.stderr, flush=True)  # noqa: T201  progress
        return catch

    # A thread each only waits for its process.
    with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        caught = list(pool.map(one, chosen))
    needed = [catch.seeds for catch in caught if catch.found]
    ok = len(needed) == len(caught)
    if json:
        figures = {
            "planted": len(caught),
            "found": len(needed),
            "seeds_needed_median": statistics.median(needed) if needed else 0,
            "seeds_needed_max": max(needed, default=0),
            "seconds": round(time.monotonic() - began, 1),
        }
        say_json(
            {
                "name": "fish",
                "figures": figures,
                "targets": {"found": f"== {len(caught)}", "seeds_needed_max": f"<= {bound}"},
                "caught": [msgspec.to_builtins(catch) for catch in caught],
                "ok": ok,
                "machine": machine(),
            }
        )
        return 0 if ok else 1
    rows = [("planted", "seeds", "first violation")]
    rows += [(catch.patch, _seeds(catch.seeds), catch.violation[:160]) for catch in caught]
    for line in table(rows):
        say(line)
    say(f"{len(needed)} of {len(caught)} planted bugs found, each within {bound} seeds" if ok else "not all were found")
    return 0 if ok else 1


def _seeds(count: int) -> str:
    return str(count) if count else "not found"
