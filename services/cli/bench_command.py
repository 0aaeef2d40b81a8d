"""`gyre bench NAME`: what the project promises, measured by a command that anyone can run.

`quickstart` trains the quickstart once for each seed and once without learning (`trainer.lr=0`); `chaos` trains it once
for each seed while every process of the run is killed once. One run after the other, in processes of their own, and each
run's log is proven: exported, checked, every decision taken again.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from schemas.errors import ConfigError
from services.cli.figures import Target, machine
from services.cli.log_lines import Complaints, complaints
from services.cli.output import say, say_json, table

STILL = "lr=0"
COMPLAINTS = Complaints.__struct_fields__
LEARNED = (
    "steps",
    "reward_first5",
    "reward_last5",
    "reward_gain",
    "held_out_first",
    "held_out_last",
    "harness_errors",
    "reconnects",
)
SHOWN = (*LEARNED, "transitions", "staleness_mean", "logprob_gap", "peak_rss_gb", "seconds")
COMPLAINED = tuple(f"log_{name}" for name in COMPLAINTS)
SURVIVED = ("processes", "kills", "crashes", "attempts_lost", *LEARNED, "seconds", *COMPLAINED)


class BenchRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run and what its log proved."""

    label: str
    run: str
    figures: dict[str, Any]
    missed: list[str]
    targets: dict[str, str]
    checked: bool
    replayed: bool

    @property
    def ok(self) -> bool:
        return not self.missed and self.checked and self.replayed


class Bench(msgspec.Struct, frozen=True, kw_only=True):
    """What a name stands for."""

    runs: Callable[[Path, Sequence[int], Path], list[BenchRun]]
    """(configuration, seeds, state folder) to what was measured."""
    shown: tuple[str, ...]
    seeds: int
    """How many seeds it takes when a person names none."""


def bench_command(name: str, *, file: Path, seeds: list[int] | None, count: int | None, state: Path, json: bool) -> int:
    """0 when every run kept its targets and every log was proven.

    `seeds` are named ones, `count` asks for so many from 0 on."""
    if name not in BENCHES:
        raise ConfigError(
            f"no benchmark is called {name!r}",
            remedy=f"choose from {', '.join(BENCHES)}, fish, proxy, replay, scenarios, scheduler, what-if",
        )
    if not file.is_file():
        raise ConfigError("no such file", where=str(file), remedy="run it in the repository, or name it with --file")
    if seeds and count is not None:
        raise ConfigError("seeds are named and counted", remedy="give either --seed, again and again, or --seeds")
    if count is not None and count < 1:
        raise ConfigError(f"{count} seeds", where="--seeds", remedy="take at least one")
    bench = BENCHES[name]
    runs = bench.runs(file, seeds or range(count or bench.seeds), state)
    ok = all(run.ok for run in runs)
    if json:
        figures = {f"{key}[{run.label}]": run.figures.get(key) for run in runs for key in bench.shown}
        say_json(
            {
                "name": name,
                "figures": figures,
                "targets": {
                    "missed": "== []",
                    "checked": "== true",
                    "replayed": "== true",
                    **{f"{name}[{run.label}]": bound for run in runs for name, bound in run.targets.items()},
                },
                "runs": runs,
                "ok": ok,
                "machine": machine(),
            }
        )
        return 0 if ok else 1
    rows: list[tuple[str, ...]] = [("", *bench.shown, "invariants hold", "replayed the same", "ok")]
    for run in runs:
        numbers = [_text(run.figures.get(key)) for key in bench.shown]
        proven = ["yes" if each else "no" for each in (run.checked, run.replayed)]
        rows.append((run.label, *numbers, *proven, "ok" if run.ok else f"missed {', '.join(run.missed) or 'the log'}"))
    for line in table(list(zip(*rows, strict=True))):
        say(line)
    return 0 if ok else 1


def quickstart(file: Path, seeds: Sequence[int], state: Path) -> list[BenchRun]:
    runs = [_one(f"seed={seed}", file, [f"seed={seed}"], state) for seed in seeds]
    runs.append(_one(STILL, file, [f"seed={seeds[0]}", "trainer.lr=0"], state))
    return runs


def chaos(file: Path, seeds: Sequence[int], state: Path) -> list[BenchRun]:
    return [_survivor(f"seed={seed}", file, seed, state) for seed in seeds]


def _survivor(label: str, file: Path, seed: int, state: Path) -> BenchRun:
    run = _one(label, file, [f"seed={seed}"], state, "--chaos", str(seed))
    found = msgspec.to_builtins(complaints(state / "runs" / run.run / "logs"))
    figures = {
        **run.figures,
        **{f"log_{name}": found[name] for name in COMPLAINTS},
    }
    target = Target(name="log_tracebacks", op="==", bound=0)
    missed = [*run.missed, *([] if target.holds(figures[target.name]) else [target.name])]
    targets = {**run.targets, target.name: str(target)}
    return msgspec.structs.replace(run, figures=figures, targets=targets, missed=missed)


def _one(label: str, file: Path, overrides: list[str], state: Path, *more: str) -> BenchRun:
    words = [word for override in overrides for word in ("--set", override)]
    print(f"{label} ...", file=sys.stderr, flush=True)  # noqa: T201  progress, beside the answer
    finished = _gyre("run", str(file), "--state", str(state), "--json", "--no-progress", "--new", *words, *more)
    if not finished.stdout:
        raise ConfigError(f"{label}: the run gave no summary", where=str(file), remedy=finished.stderr.strip()[-500:])
    summary = msgspec.json.decode(finished.stdout)
    log = state / "runs" / summary["run"] / "run.gyre"
    exported = _gyre("export", summary["run"], "-o", str(log), "--state", str(state)).returncode == 0
    return BenchRun(
        label=label,
        run=summary["run"],
        figures=summary["figures"],
        missed=summary["missed"],
        targets=summary["targets"],
        checked=exported and _gyre("check", str(log)).returncode == 0,
        replayed=exported and _gyre("replay", str(log)).returncode == 0,
    )


def _gyre(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "services.cli", *words], capture_output=True, text=True, check=False)


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


BENCHES = {
    "quickstart": Bench(runs=quickstart, shown=SHOWN, seeds=3),
    "chaos": Bench(runs=chaos, shown=SURVIVED, seeds=2),
}
