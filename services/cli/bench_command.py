"""`gyre bench NAME`: what the project promises, measured by a command that anyone can run.

`quickstart` trains the quickstart once for each seed and once without learning (`trainer.lr=0`), one run after the other
in processes of their own, and proves each run's log: exported, checked, every decision taken again.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from schemas.errors import ConfigError
from services.cli.figures import machine
from services.cli.output import say, say_json, table

STILL = "lr=0"
SHOWN = (
    "steps",
    "reward_first5",
    "reward_last5",
    "reward_gain",
    "held_out_first",
    "held_out_last",
    "harness_errors",
    "reconnects",
    "transitions",
    "staleness_mean",
    "logprob_gap",
    "peak_rss_gb",
    "seconds",
)


class BenchRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run and what its log proved."""

    label: str
    run: str
    figures: dict[str, Any]
    missed: list[str]
    checked: bool
    replayed: bool

    @property
    def ok(self) -> bool:
        return not self.missed and self.checked and self.replayed


def bench_command(name: str, *, file: Path, seeds: list[int], state: Path, json: bool) -> int:
    """0 when every run kept its targets and every log was proven."""
    if name not in BENCHES:
        raise ConfigError(f"no benchmark is called {name!r}", remedy=f"choose from {', '.join(BENCHES)}")
    if not file.is_file():
        raise ConfigError("no such file", where=str(file), remedy="run it in the repository, or name it with --file")
    runs = BENCHES[name](file, seeds, state)
    ok = all(run.ok for run in runs)
    if json:
        figures = {f"{key}[{run.label}]": run.figures.get(key) for run in runs for key in SHOWN}
        say_json(
            {
                "name": name,
                "figures": figures,
                "targets": {"missed": "== []", "checked": "== true", "replayed": "== true"},
                "runs": runs,
                "ok": ok,
                "machine": machine(),
            }
        )
        return 0 if ok else 1
    rows: list[tuple[str, ...]] = [("", *SHOWN, "log proven", "ok")]
    for run in runs:
        numbers = [_text(run.figures.get(key)) for key in SHOWN]
        proven = "yes" if run.checked and run.replayed else "no"
        rows.append((run.label, *numbers, proven, "ok" if run.ok else f"missed {', '.join(run.missed) or 'the log'}"))
    for line in table(list(zip(*rows, strict=True))):
        say(line)
    return 0 if ok else 1


def quickstart(file: Path, seeds: Sequence[int], state: Path) -> list[BenchRun]:
    runs = [_one(f"seed={seed}", file, [f"seed={seed}"], state) for seed in seeds]
    runs.append(_one(STILL, file, [f"seed={seeds[0]}", "trainer.lr=0"], state))
    return runs


def _one(label: str, file: Path, overrides: list[str], state: Path) -> BenchRun:
    words = [word for override in overrides for word in ("--set", override)]
    print(f"{label} ...", file=sys.stderr, flush=True)  # noqa: T201  progress, beside the answer
    finished = _gyre("run", str(file), "--state", str(state), "--json", "--no-progress", "--new", *words)
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
        checked=exported and _gyre("check", str(log)).returncode == 0,
        replayed=exported and _gyre("replay", str(log)).returncode == 0,
    )


def _gyre(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "services.cli", *words], capture_output=True, text=True, check=False)


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


BENCHES: dict[str, Callable[[Path, Sequence[int], Path], list[BenchRun]]] = {"quickstart": quickstart}
