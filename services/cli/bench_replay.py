"""`gyre bench replay`: how fast logs are decided again, beside the deciders alone, and how much memory that takes.

`share_of_bare_rate` is over the log of a real run: processor time of its deciders fed with decoded events, over that of a
replay from the file, reading and comparing included. `events_per_s` and `peak_rss_mb_N` are over simulated logs of N events
that are streamed to disk first; each is replayed in a process of its own, so that its peak is its own.
"""

from __future__ import annotations

import gc
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from replay.logfile import Log, read
from replay.logwriter import LogWriter
from replay.replayer import Replayer, load_deciders
from replay.simulator.run import Simulation
from replay.simulator.scenario import changed, load
from schemas.envelope import Event
from schemas.errors import GyreError
from services.cli.figures import machine
from services.cli.output import say, say_json
from services.mesh import codec
from services.mesh.decider import Driver

SHARE = 0.5
GROWTH_MB = 64.0
"""Peak memory of the longest log may be so much above that of the shortest."""
SIZES = (10_000, 100_000, 1_000_000)
_EVENTS_A_STEP = 5_000
"""Of the scenario, at least."""
_ROUNDS = 15
"""So many that the least of them is not the load of the machine."""
_CHILD = "import sys; from services.cli.bench_replay import child; child(sys.argv[1])"


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One log, replayed in a process of its own."""

    events: int
    cpu_s: float
    peak_rss_mb: float
    ok: bool

    @property
    def events_per_s(self) -> float:
        return self.events / self.cpu_s


class _Enough(Exception):
    pass


def replay_bench(real: Path, *, sizes: list[int], folder: Path | None, json: bool) -> int:
    """0 when every log replays the same and every bound is kept. Logs are made in `folder`, where they stay, or in one
    that is removed."""
    if folder is None:
        with TemporaryDirectory(prefix="gyre-bench-") as own:
            return _bench(real, sorted(sizes or SIZES), Path(own), json=json)
    return _bench(real, sorted(sizes or SIZES), folder, json=json)


def _bench(real: Path, sizes: list[int], folder: Path, *, json: bool) -> int:
    share = share_of_bare_rate(read(real))
    measured = []
    for size in sizes:
        path = folder / f"simulated-{size}.gyre"
        if not path.is_file():
            print(f"{size} events are made ...", file=sys.stderr, flush=True)  # noqa: T201  progress, beside the answer
            simulated(path, size)
        measured.append(measure(path))
        if not json:
            last = measured[-1]
            say(f"{last.events:9d} events: {last.events_per_s:9,.0f} events/s, peak {last.peak_rss_mb:.0f} MB")
    growth = measured[-1].peak_rss_mb - measured[0].peak_rss_mb
    same = all(each.ok for each in measured)
    figures = {
        "share_of_bare_rate": round(share, 3),
        "events_per_s": round(measured[-1].events_per_s),
        **{f"peak_rss_mb_{_name(each.events)}": round(each.peak_rss_mb, 1) for each in measured},
        "rss_growth_mb": round(growth, 1),
        "same": same,
    }
    targets = {"share_of_bare_rate": f">= {SHARE:g}", "rss_growth_mb": f"<= {GROWTH_MB:g}", "same": "== true"}
    kept = {"share_of_bare_rate": share >= SHARE, "rss_growth_mb": growth <= GROWTH_MB, "same": same}
    missed = [name for name, holds in kept.items() if not holds]
    if json:
        said = {"name": "replay", "figures": figures, "targets": targets, "runs": measured, "ok": not missed}
        say_json({**said, "machine": machine()})
    else:
        say(f"{share:.2f} of the bare rate on {real}; memory grows by {growth:.0f} MB")
        say(f"missed: {', '.join(f'{name} {targets[name]}' for name in missed)}" if missed else "ok")
    return 1 if missed else 0


def _name(events: int) -> str:
    for size, unit in ((1_000_000, "m"), (1_000, "k")):
        if events >= size and events % size == 0:
            return f"{events // size}{unit}"
    return str(events)


def simulated(path: Path, events: int) -> None:
    """Writes so many events of a long simulated run, the end cut off where it comes."""
    steps = 3 * (events // _EVENTS_A_STEP // 3 + 1)
    scenario = changed(load("nl2repobench-122b"), steps=steps)
    with LogWriter(path) as writer:
        left = events

        def write(event: Event) -> None:
            nonlocal left
            writer.add(codec.stored(event, run=simulation.name))
            left -= 1
            if not left:
                raise _Enough

        simulation = Simulation(scenario, seed=1, watchers=[write])
        try:
            simulation.run()
        except _Enough:
            writer.finish()
            return
    raise GyreError(f"the simulated run ended after {simulation.count} events", where=str(path))


def measure(path: Path) -> Measured:
    done = subprocess.run([sys.executable, "-c", _CHILD, str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise GyreError(f"the replay failed: {done.stderr.strip()[-500:]}", where=str(path))
    return msgspec.json.decode(done.stdout, type=Measured)


def child(path: str) -> None:
    """Replays one log and tells what it took."""
    began = time.process_time()
    result = Replayer().replay(read(path))
    cpu_s = time.process_time() - began
    found = Measured(events=result.events, cpu_s=cpu_s, peak_rss_mb=peak_rss_mb(), ok=result.ok)
    say(msgspec.json.encode(found).decode())


def peak_rss_mb() -> float:
    """Most memory that this process has had. On Linux its own: getrusage counts what its parent had when it was started."""
    status = Path("/proc/self/status")
    if not status.is_file():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    (peak,) = [line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
    return int(peak) / 1024


def share_of_bare_rate(log: Log, *, rounds: int = _ROUNDS) -> float:
    """The deciders' own time over that of a replay; the least of some rounds each, taken in turns."""
    events = list(log)
    bare, whole = [], []
    collects = gc.isenabled()
    gc.disable()
    try:
        for _ in range(rounds):
            bare.append(_timed(lambda: _bare(events)))
            whole.append(_timed(lambda: Replayer().replay(log)))
            gc.collect()
    finally:
        if collects:
            gc.enable()
    return min(bare) / min(whole)


def _bare(events: list[Event]) -> None:
    for decider in load_deciders():
        driver = Driver(decider)
        for event in events:
            if driver.is_input(event):
                driver.feed(event)


def _timed(act: Callable[[], object]) -> float:
    began = time.process_time()
    act()
    return time.process_time() - began
