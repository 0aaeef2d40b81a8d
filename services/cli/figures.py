"""The figures of a run, the bounds that they must keep, and the object that `--json` prints."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from services.cli.chaos_plan import Killed
from services.cli.progress import Progress

Figure = float | int | None

QUICKSTART = "quickstart"
LEARNING_LR = 1e-5
"""Below it nothing visible is learned in a short run, so no gain is asked for."""
LEARNING_STEPS = 20


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A bound on a figure."""

    name: str
    op: str
    bound: float

    def __str__(self) -> str:
        return f"{self.op} {self.bound:g}"

    def holds(self, value: Figure) -> bool:
        if value is None:
            return False
        return _OPS[self.op](value, self.bound)


_OPS: dict[str, Callable[[float, float], bool]] = {
    ">=": lambda value, bound: value >= bound,
    "==": lambda value, bound: value == bound,
    "<": lambda value, bound: value < bound,
    "abs <": lambda value, bound: abs(value) < bound,
}


class Summary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a run came to."""

    name: str
    figures: dict[str, Figure]
    targets: dict[str, str]
    missed: list[str]
    """Names of the targets that don't hold."""
    ok: bool
    machine: dict[str, Any]
    run: str
    finished: str
    chaos: list[Killed] = []
    """What `--chaos` killed."""


def figures(progress: Progress, *, peak_rss_bytes: int) -> dict[str, Figure]:
    """Name to number; None where the run made nothing to measure."""
    first, last = progress.mean_reward(True), progress.mean_reward(False)
    return {
        "steps": len(progress.steps),
        "reward_first5": _rounded(first),
        "reward_last5": _rounded(last),
        "reward_gain": _rounded(last - first) if first is not None and last is not None else None,
        "held_out_first": _rounded(progress.measured_reward(True)),
        "held_out_last": _rounded(progress.measured_reward(False)),
        "measurements": len(progress.measured),
        "harness_errors": progress.harness_errors,
        "harness_calls": progress.harness_calls,
        "reconnects": progress.reconnects,
        "executions": progress.f,
        "executions_surplus": progress.surplus,
        "attempts_lost": sum(progress.lost.values()),
        "transitions": progress.transitions,
        "staleness_mean": _rounded(progress.staleness_mean),
        "logprob_gap": progress.logprob_gap,
        "logprob_gap_max": progress.gap_max,
        "groups_discarded": progress.groups_discarded,
        "sampled_tokens": progress.sampled,
        "peak_rss_gb": round(peak_rss_bytes / 1e9, 3),
        "seconds": round(progress.seconds, 1),
    }


def targets(progress: Progress) -> list[Target]:
    """What this run promised: every run works without harness errors, the quickstart also learns within its bounds."""
    config = progress.config
    wanted = [Target(name="harness_errors", op="==", bound=0)]
    if config is None:
        return wanted
    wanted.append(Target(name="steps", op=">=", bound=config.steps))
    if config.name == QUICKSTART:
        if config.trainer.lr > LEARNING_LR and config.steps >= LEARNING_STEPS:
            wanted.append(Target(name="reward_gain", op=">=", bound=0.2))
        if config.trainer.lr == 0 and config.steps >= LEARNING_STEPS:
            wanted.append(Target(name="reward_gain", op="abs <", bound=0.05))
        wanted.append(Target(name="peak_rss_gb", op="<", bound=8))
        wanted.append(Target(name="seconds", op="<", bound=900))
    return wanted


def summarize(
    progress: Progress,
    *,
    peak_rss_bytes: int,
    crashes: int = 0,
    killed: Sequence[Killed] = (),
    kills: int | None = None,
) -> Summary:
    """`crashes` counts ends of services that nobody asked for; `kills` is how many processes were to be killed,
    `killed` those that were; None when none were to be."""
    found = {**figures(progress, peak_rss_bytes=peak_rss_bytes), "crashes": crashes}
    wanted = targets(progress)
    if kills is not None:
        found["processes"] = kills
        # One that did not come back is not survived.
        found["kills"] = sum(each.ready_after_s is not None for each in killed)
        wanted.append(Target(name="kills", op="==", bound=kills))
        # Nobody else may end when one is killed.
        wanted.append(Target(name="crashes", op="==", bound=0))
    missed = [target.name for target in wanted if not target.holds(found[target.name])]
    return Summary(
        name=progress.config.name if progress.config else "",
        figures=found,
        targets={target.name: str(target) for target in wanted},
        missed=missed,
        ok=not missed,
        machine=machine(),
        run=progress.run,
        finished=progress.finished,
        chaos=list(killed),
    )


def machine() -> dict[str, Any]:
    """What the figures were taken on; nothing that names the machine."""
    import psutil

    return {
        "cpus": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "system": platform.system(),
        "arch": platform.machine(),
        "python": platform.python_version(),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
