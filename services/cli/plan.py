"""Which processes a run consists of: one list, from the configuration alone."""

from __future__ import annotations

import sys
from pathlib import Path

from schemas.config import Config
from schemas.ids import cell_id
from services.mesh.supervise import Spec

SERVICES = ("scheduler", "proxy", "harness", "rollout", "evaluator", "trajectories", "packer", "trainer")

# Who is asked to leave first: those who make work for others; the scheduler, who answers all, last.
_RANKS = {
    "harness": 0,
    "proxy": 1,
    "evaluator": 1,
    "rollout": 2,
    "trainer": 2,
    "packer": 3,
    "trajectories": 3,
    "scheduler": 4,
}


def service_specs(config: Config, *, run: str, url: str, state: Path, here: Path) -> list[Spec]:
    """One spec for each process: one of each service, a rollout engine for each cell, a trainer for each that trains."""

    def spec(service: str, threads: int = 1, cell: str = "") -> Spec:
        command = [sys.executable, "-m", "services.cli", "service", service, "--run", run, "--nats", url]
        command += ["--state", str(state), "--here", str(here)]
        if cell:
            command += ["--cell", cell]
        return Spec(
            name=f"{service}-{cell}" if cell else service,
            command=command,
            env=_environment(threads),
            rank=_RANKS[service],
            lasting=True,
        )

    specs = [spec("scheduler"), spec("trajectories"), spec("packer")]
    specs += [spec("rollout", config.rollout.threads, cell_id(index)) for index in range(config.cells.count)]
    specs += [spec("trainer", config.trainer.threads, cell_id(index)) for index in range(config.cells.trainable)]
    return [*specs, spec("evaluator"), spec("proxy"), spec("harness")]


def _environment(threads: int) -> dict[str, str]:
    """Thread pools of numeric libraries are sized before they load; a few arenas keep resident memory low."""
    count = str(threads)
    return {
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OPENBLAS_NUM_THREADS": count,
        "MALLOC_ARENA_MAX": "2",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
