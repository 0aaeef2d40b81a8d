"""The small runs that are simulated: some fifty executions on three cells, drawn from a seed."""

from __future__ import annotations

from random import Random
from typing import Any, Literal

from replay.worlds.world import Scripts
from schemas.config import Config
from schemas.config_file import from_tree
from schemas.events import RunStarted
from schemas.flags import NEWEST
from schemas.units import TaskRef

CELLS = 3
EXECUTIONS = 44
"""About how many a run has."""
_SHAPES = ((2, 1, 0.5), (2, 2, 0.5), (2, 1, 1.0), (2, 2, 1.0), (3, 1, 1.0), (3, 2, 1.0))
"""B, mu and phi."""
_TASKS, _HELD_OUT = 5, 2
_WIDE = 24


ROUGH = Scripts(hangs=0.2, tests_fail=0.4)
"""Agents and tests of a rough run: executions end without an outcome, and groups of two are discarded."""


def manner(seed: int) -> Literal["plain", "rough", "wide"]:
    """Most runs are plain. In a rough one groups are discarded and replaced; in a wide one engines have so much room that
    the core stays in training and others join it early, for many small micro-steps."""
    return Random(f"{seed}:manner").choice(("plain", "plain", "plain", "rough", "wide"))


def scripts(seed: int) -> Scripts:
    """How what happens in the run of a seed is drawn."""
    return ROUGH if manner(seed) == "rough" else Scripts()


def started(seed: int, *, pace: float = 1.0) -> RunStarted:
    """How the run of a seed begins; `pace` multiplies all seconds of its configuration."""
    return RunStarted(
        seed=seed,
        config=config_of(seed, pace=pace),
        tasks=[TaskRef(name=f"task-{index}", digest=f"digest-{index}") for index in range(_TASKS)],
        held_out=[TaskRef(name=f"held-{index}", digest=f"held-digest-{index}") for index in range(_HELD_OUT)],
        code="simulation",
        flags=NEWEST,
    )


def config_of(seed: int, *, pace: float = 1.0) -> Config:
    draw = Random(f"{seed}:scenario")
    B, mu, phi = draw.choice(_SHAPES)
    N, rough, wide = 4, manner(seed) == "rough", manner(seed) == "wide"
    if rough:
        N, B, phi = 2, 2 * B, draw.choice((0.0, 0.5))
    tree = {
        "name": f"seed {seed}",
        "seed": seed,
        "steps": _bursts(B, mu, phi, N) * mu,
        "cells": {
            "count": CELLS + wide,
            "capacity": _WIDE if wide else draw.choice((4, 6, 8)),
            "trainable": CELLS + wide if wide else draw.choice((1, 2, 3, 3)),
        },
        "scheduler": {
            "N": N,
            "B": B,
            "mu": mu,
            "phi": phi,
            "rho_min": draw.choice((0.3, 0.5, 1.0)),
            "tau_s": pace * (0.0 if wide else draw.choice((0.0, 60.0, 600.0))),
        },
        # Where a harness may use the whole budget, an evaluation that fails after its time-out is the last.
        "harness": {
            "command": ["true"],
            "timeout_s": pace * 14_400,
            "overall_timeout_s": pace * (14_400 if rough else 28_800),
        },
        "proxy": {"grace_s": pace * draw.choice((0.0, 30.0)), "max_new_tokens": 8},
        "rollout": {"context_length": 4096, "drain_s": pace * 5, "lost_s": pace * draw.choice((900, 1800))},
        "evaluator": {"workers": draw.choice((1, 2, 4)), "timeout_s": pace * 600},
        "packer": {
            "T": 40 if wide else draw.choice((60, 120, 240)),
            "ahead": draw.choice((1, 2)),
            "reorder_groups": draw.choice((1, 2)),
        },
        "trajectories": {"J_max": draw.choice((1, 5)), "advantage": draw.choice(("mean_std", "mean"))},
        "eval": {"path": "held-out", "every": draw.choice((0, 0, 2)), "executions": 2},
        "trainer": {"keep_checkpoints": 2, "lost_s": pace * draw.choice((900, 1800))},
    }
    _vary(tree, Random(f"{seed}:strategy"))
    _oversample(tree, Random(f"{seed}:oversample"))
    _share(tree, Random(f"{seed}:proxies"))
    return from_tree(tree, where=f"seed {seed}")


def _vary(tree: dict[str, Any], draw: Random) -> None:
    """Half of the seeds keep the strategy of the paper; a quarter has a separate pool, a quarter does not stream."""
    cells, scheduler = tree["cells"], tree["scheduler"]
    scheduler["strategy"] = draw.choice(("elastic", "elastic", "colocate", "async"))
    scheduler["streaming"] = draw.random() < 0.75
    if draw.random() < 0.25:
        cells.update(pool=draw.choice((1, 2)), pool_capacity=draw.choice((4, 6)))
    if scheduler["strategy"] == "async" and "pool" not in cells:
        cells["trainable"] = min(cells["trainable"], cells["count"] - 1)


def _share(tree: dict[str, Any], draw: Random) -> None:
    """A quarter of the seeds has two proxies, with something between them and harnesses that asks either."""
    if draw.random() < 0.25:
        tree["proxy"]["count"] = 2


def _oversample(tree: dict[str, Any], draw: Random) -> None:
    """A quarter of the seeds dispatches more than N for a group, where there is room for it, in runs of the same size."""
    cells, scheduler = tree["cells"], tree["scheduler"]
    N, B, mu, phi = (scheduler[key] for key in ("N", "B", "mu", "phi"))
    serving = cells["count"] - (cells["trainable"] if scheduler["strategy"] == "async" else 0)
    room = serving * cells["capacity"] + cells.get("pool", 0) * cells.get("pool_capacity", 0)
    # Two bursts are the fewest.
    most = min(room, int(4 / 3 * EXECUTIONS / ((2 * mu + phi) * B)))
    if draw.random() < 0.25 and most > N:
        scheduler["oversample"] = min(most - N, draw.choice((1, 2)))
        tree["steps"] = _bursts(B, mu, phi, N + scheduler["oversample"]) * mu


def _bursts(B: int, mu: int, phi: float, size: int) -> int:
    """How many of them have about as many executions as a run has."""
    return max(2, round((EXECUTIONS - phi * B * size) / (mu * B * size)))
