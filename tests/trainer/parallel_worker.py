"""One rank of a cell of two: trains the same batch tensor-parallel, then pipeline-parallel. Run by test_parallel_cell."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import numpy as np
import torch

from schemas.config import Trainer as TrainerConfig
from schemas.micro_steps import decode
from services.trainer.cell import Cell
from services.trainer.megatron import CellRanks, close_world, open_world
from services.trainer.objective import ObjectiveTerms


def main(rank: int, folder: Path, policy: str) -> None:
    settings = msgspec.json.decode((folder / "settings.json").read_bytes(), type=TrainerConfig)
    terms = msgspec.json.decode((folder / "terms.json").read_bytes(), type=ObjectiveTerms)
    batch = [decode(path.read_bytes()) for path in sorted(folder.glob("*.micro-step"))]
    for name, tensor, pipeline in (("tensor", 2, 1), ("pipeline", 1, 2)):
        ranks = CellRanks(rank=rank, tensor=tensor, pipeline=pipeline, rendezvous=f"file://{folder / name}-rendezvous")
        open_world(ranks)
        cell = Cell(policy, settings, terms, scratch=folder)
        loaded = cell.flat_weights()
        stats = []
        for step in range(2):
            cell.begin_batch()
            stats += [cell.micro_step(micro_step) for micro_step in batch]
            result = cell.step()
            if step == 0:
                cell.save(folder / f"{name}-checkpoint")
                cell.release()
                cell.acquire()
        trained = cell.flat_weights()
        cell.load(folder / f"{name}-checkpoint")
        np.savez(folder / f"{name}-{rank}.npz", loaded=loaded, trained=trained, restored=cell.flat_weights())
        (folder / f"{name}-{rank}.json").write_bytes(msgspec.json.encode([stats, result]))
        cell.close()
        close_world()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
