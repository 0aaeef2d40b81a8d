"""Which processes a run consists of: one list, from the configuration alone."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from schemas.config import Config
from schemas.ids import cell_id, cell_index, pool_id, proxy_ids
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
    """One spec for each process: one of each service, `proxy.count` proxies, one rollout engine a
    cell and pool engine, one trainer a cell that trains."""

    def spec(service: str, threads: int = 1, cell: str = "") -> Spec:
        # What stands for the cell may also be the number of a proxy.
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
    specs += [spec("rollout", config.rollout.threads, pool_id(index)) for index in range(config.cells.pool)]
    specs += [spec("trainer", config.trainer.threads, cell_id(index)) for index in range(config.cells.trainable)]
    proxies = [spec("proxy", cell=name.partition("-")[2]) for name in proxy_ids(config.proxy.count)]
    return [*specs, spec("evaluator"), *proxies, spec("harness")]


def added_specs(config: Config, cell: str, *, run: str, url: str, state: Path, here: Path) -> list[Spec]:
    """What a cell beyond the configured ones consists of: its engine, and a trainer where it may train."""
    cells = config.cells
    count = cell_index(cell) + 1
    grown = msgspec.structs.replace(cells, count=count, trainable=cells.trainers(count - cells.count))
    all_of_it = msgspec.structs.replace(config, cells=grown)
    specs = service_specs(all_of_it, run=run, url=url, state=state, here=here)
    return [spec for spec in specs if spec.name in (f"rollout-{cell}", f"trainer-{cell}")]


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
