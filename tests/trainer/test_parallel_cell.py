"""Two ranks of one cell compute what one rank computes, cut by tensors or by layers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from schemas.micro_steps import encode
from services.rollout.reference import model as reference
from services.trainer.cell import Cell, StepResult
from services.trainer.objective import ObjectiveStats

ROUNDING = 3e-3
"""Adam lifts the rounding of gradients near its epsilon; one norm vector left out would show as 1e-2."""
WORKER = Path(__file__).with_name("parallel_worker.py")


@pytest.mark.timeout(120)
def test_two_ranks_train_as_one(
    make_cell: Callable[..., Cell],
    policy: Path,
    policy_model: reference.Qwen3,
    settings: Any,
    terms: Any,
    sample: Any,
    pack: Any,
    tmp_path: Path,
) -> None:
    batch = [
        pack(
            sample(policy_model, 20 + index, 4), {"e-000000.00": 1.0, "e-000001.00": -0.5}, name=f"m-000001.{index:03d}"
        )
        for index in range(2)
    ]
    for micro_step in batch:
        (tmp_path / f"{micro_step.micro_step}.micro-step").write_bytes(encode(micro_step))
    (tmp_path / "settings.json").write_bytes(msgspec.json.encode(settings))
    (tmp_path / "terms.json").write_bytes(msgspec.json.encode(terms))
    workers = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(tmp_path), str(policy)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]
    cell = make_cell()
    loaded = cell.flat_weights()
    stats: list[ObjectiveStats] = []
    weights = []
    for _ in range(2):
        cell.begin_batch()
        stats += [cell.micro_step(micro_step) for micro_step in batch]
        result = cell.step()
        weights.append(cell.flat_weights())
    outputs = [worker.communicate(timeout=100)[0].decode() for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(outputs)
    for name in ("tensor", "pipeline"):
        for rank in range(2):
            theirs = np.load(tmp_path / f"{name}-{rank}.npz")
            assert np.array_equal(theirs["loaded"], loaded)
            moved = np.linalg.norm(weights[1] - loaded)
            assert np.linalg.norm(theirs["trained"] - weights[1]) / moved < ROUNDING
            assert np.linalg.norm(theirs["restored"] - weights[0]) / moved < ROUNDING
            seen, stepped = msgspec.json.decode(
                (tmp_path / f"{name}-{rank}.json").read_bytes(), type=tuple[list[ObjectiveStats], StepResult]
            )
            assert [each.loss for each in seen] == pytest.approx([each.loss for each in stats], rel=1e-4, abs=1e-6)
            assert [each.masked for each in seen] == [each.masked for each in stats]
            assert stepped.grad_norm == pytest.approx(result.grad_norm, rel=1e-4, abs=1e-7)
