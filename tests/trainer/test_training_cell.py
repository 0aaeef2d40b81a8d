"""A cell's life: one optimizer step a batch, roll-back, release and acquire, save and load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from schemas.config import Trainer as TrainerConfig
from schemas.errors import TrainerError
from schemas.micro_steps import MicroStep
from services.mesh.weights.layout import layout
from services.rollout.reference import model as reference
from services.trainer.arrays import array_of, tensors_of
from services.trainer.cell import Cell
from services.trainer.objective import ObjectiveTerms, execution_objective, target_logprobs

MakeCell = Callable[..., Cell]
LOOSE = ObjectiveTerms(groups=2, executions=4, clip_low=0.0, clip_high=1e9)
"""No execution is masked, so that sums can be compared however they are cut."""


@pytest.fixture
def batch(policy_model: reference.Qwen3, sample: Any, pack: Any) -> list[MicroStep]:
    """Three micro-steps of two executions each, one of them without an advantage."""
    micro_steps = []
    for index in range(3):
        rows = sample(policy_model, 10 + index, 4, temperature=0.8)
        advantages = {"e-000000.00": 1.5, "e-000001.00": -0.5 * index}
        micro_steps.append(pack(rows, advantages, name=f"m-000001.{index:03d}"))
    return micro_steps


def train(cell: Cell, micro_steps: list[MicroStep]) -> Any:
    cell.begin_batch()
    for micro_step in micro_steps:
        cell.micro_step(micro_step)
    return cell.step()


def gradients(cell: Cell, micro_steps: list[MicroStep]) -> torch.Tensor:
    """The accumulated gradient of a batch, which is then dropped."""
    if cell.phase == "idle":
        cell.begin_batch()
    for micro_step in micro_steps:
        cell.micro_step(micro_step)
    total = torch.cat([buffer.grad_data.clone() for buffer in cell._model.chunk.buffers])
    cell.rollback()
    return total


def relative(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left - right).norm() / right.norm())


def split_rows(micro_step: MicroStep) -> list[MicroStep]:
    """Each row as a micro-step of its own, weighted so that the sum of their losses is the original's."""
    bounds = array_of(micro_step, "cu_seqlens")
    parts = []
    for row, execution in enumerate(array_of(micro_step, "row_execution")):
        cut = slice(bounds[row], bounds[row + 1])
        fields = ("tokens", "targets", "behaviour_logprob", "temperature", "token_version")
        arrays = {field: array_of(micro_step, field)[cut].tobytes() for field in fields}
        targets = int(array_of(micro_step, "targets")[cut].sum())
        parts.append(
            msgspec.structs.replace(
                micro_step,
                **arrays,
                cu_seqlens=np.array([0, cut.stop - cut.start], "<i4").tobytes(),
                row_execution=np.zeros(1, "<i4").tobytes(),
                executions=(micro_step.executions[execution],),
                # 1/L_r times L_r/L_i is 1/L_i.
                advantages=(micro_step.advantages[execution] * targets / micro_step.target_counts[execution],),
                target_counts=(targets,),
            )
        )
    return parts


def test_one_step_is_the_reference_adamw_step(
    make_cell: MakeCell, batch: list[MicroStep], settings: TrainerConfig, policy: Path
) -> None:
    terms = LOOSE
    cell = make_cell(terms=terms)
    start = cell.flat_weights()
    results = [train(cell, batch), train(cell, batch)]

    model = reference.load(policy)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    adam = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=settings.lr,
        betas=settings.betas,
    )
    for result in results:
        adam.zero_grad()
        total = 0.0
        for micro_step in batch:
            rows = tensors_of(micro_step)
            logits = torch.cat([model(part[None])[0] for part in rows.tokens.split(rows.row_lengths)])
            loss, _ = execution_objective(target_logprobs(logits, rows), rows, terms, version=0)
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.grad_clip)
        assert float(norm) > settings.grad_clip
        adam.step()
        assert result.loss == pytest.approx(total, rel=1e-5)
        assert result.grad_norm == pytest.approx(float(norm), rel=1e-5)
        assert result.lr == settings.lr
    expected = reference.flatten(model)
    moved = torch.from_numpy(start) - expected
    assert float(moved.norm()) > 0.05
    assert float((torch.from_numpy(cell.flat_weights()) - expected).norm() / moved.norm()) < 1e-4
    assert cell.version == 2


def test_packing_leaves_the_gradient_as_it_is(make_cell: MakeCell, batch: list[MicroStep]) -> None:
    cell = make_cell(terms=LOOSE)
    packed = gradients(cell, batch)
    separate = gradients(cell, [part for micro_step in batch for part in split_rows(micro_step)])
    assert relative(packed, separate) < 1e-6


def test_a_shared_target_may_be_carried_by_either_row(make_cell: MakeCell, make_row: Any, pack: Any) -> None:
    """Two leaves over one prefix: whichever row trains the prefix's target, loss and gradient are the same."""
    prefix, left, right = [5, 6, 7, 8], [9, 10], [11, 12, 13]
    cell = make_cell(terms=LOOSE)
    seen = []
    for carried in ("left", "right"):
        rows = [
            make_row(
                execution="e-000000.00", tokens=prefix + left, targets=([2, 3] if carried == "left" else []) + [4, 5]
            ),
            make_row(
                execution="e-000000.00", tokens=prefix + right, targets=([2, 3] if carried == "right" else []) + [5]
            ),
        ]
        micro_step = pack(rows, {"e-000000.00": 1.0})
        cell.begin_batch() if cell.phase == "idle" else None
        stats = cell.micro_step(micro_step)
        cell.rollback()
        seen.append((stats, gradients(cell, [micro_step])))
    assert seen[0][0].loss == pytest.approx(seen[1][0].loss, rel=1e-6)
    assert seen[0][0].sequence_ratios == pytest.approx(seen[1][0].sequence_ratios, rel=1e-6)
    assert relative(seen[0][1], seen[1][1]) < 1e-6


def test_order_and_grouping_of_micro_steps_leave_the_step_as_it_is(make_cell: MakeCell, batch: list[MicroStep]) -> None:
    cell = make_cell()
    assert relative(gradients(cell, batch), gradients(cell, batch[::-1])) < 1e-6


def test_on_policy_statistics(make_cell: MakeCell, policy_model: reference.Qwen3, sample: Any, pack: Any) -> None:
    rows = sample(policy_model, 4, 4, noise=0.0)
    cell = make_cell()
    cell.begin_batch()
    stats = cell.micro_step(pack(rows, {"e-000000.00": 1.0, "e-000001.00": -1.0}), entropy=True)
    assert stats.sequence_ratios == pytest.approx((1.0, 1.0), abs=1e-5)
    assert stats.masked == (False, False)
    assert stats.gap_max < 1e-4
    assert stats.gap_count == stats.targets == sum(len(row.targets) for row in rows)
    assert stats.entropy_sum is not None
    assert 0.0 < stats.entropy_sum < stats.targets * np.log(64)


def test_rollback_drops_what_was_accumulated(make_cell: MakeCell, batch: list[MicroStep]) -> None:
    straight, detour = make_cell(), make_cell()
    train(straight, batch)
    detour.begin_batch()
    detour.micro_step(batch[2])
    detour.micro_step(batch[0])
    detour.rollback()
    for micro_step in batch:
        detour.micro_step(micro_step)
    result = detour.step()
    assert result.micro_steps == 3
    assert detour.flat_weights().tobytes() == straight.flat_weights().tobytes()


def test_release_frees_memory_and_acquire_keeps_training_bit_identical(
    make_cell: MakeCell, batch: list[MicroStep]
) -> None:
    steady, moving = make_cell(), make_cell()
    for cell in (steady, moving):
        train(cell, batch)
    held = moving.held_bytes
    parameters = moving.flat_weights().nbytes
    assert held >= 3 * parameters
    moving.release()
    moving.release()
    assert moving.held_bytes == 0
    assert moving.phase == "released"
    assert torch.distributed.is_initialized()
    assert moving.flat_weights().tobytes() == steady.flat_weights().tobytes()
    for refused in (moving.begin_batch, moving.step, moving.rollback, lambda: moving.micro_step(batch[0])):
        with pytest.raises(TrainerError, match="released"):
            refused()
    moving.acquire()
    moving.acquire()
    assert moving.held_bytes == held
    for _ in range(2):
        assert train(steady, batch) == msgspec.structs.replace(train(moving, batch), seconds=pytest.approx(0, abs=60))
    assert moving.flat_weights().tobytes() == steady.flat_weights().tobytes()


def test_a_fresh_cell_may_be_released_before_its_first_step(make_cell: MakeCell, batch: list[MicroStep]) -> None:
    steady, moving = make_cell(), make_cell()
    moving.release()
    assert moving.held_bytes == 0
    moving.acquire()
    train(steady, batch)
    train(moving, batch)
    assert moving.flat_weights().tobytes() == steady.flat_weights().tobytes()


def test_save_and_load_continue_bit_for_bit(make_cell: MakeCell, batch: list[MicroStep], tmp_path: Path) -> None:
    first = make_cell()
    train(first, batch)
    saved = first.save(tmp_path / "checkpoint")
    assert saved.version == 1
    train(first, batch[:2])
    second = make_cell()
    train(second, batch[1:])
    train(second, batch[1:])
    restored = second.load(tmp_path / "checkpoint")
    assert restored == saved
    assert restored.digest == saved.digest
    assert second.version == 1
    train(second, batch[:2])
    assert second.flat_weights().tobytes() == first.flat_weights().tobytes()
    assert first.save(tmp_path / "checkpoint").version == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]


def test_a_damaged_or_foreign_checkpoint_is_refused_and_changes_nothing(
    make_cell: MakeCell, batch: list[MicroStep], tmp_path: Path
) -> None:
    cell = make_cell()
    train(cell, batch)
    cell.save(tmp_path / "checkpoint")
    before = cell.flat_weights().tobytes()
    with pytest.raises(TrainerError, match="no checkpoint"):
        cell.load(tmp_path / "absent")
    shard = tmp_path / "checkpoint" / "rank-00000.pt"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(TrainerError, match="isn't what was saved"):
        cell.load(tmp_path / "checkpoint")
    manifest = tmp_path / "checkpoint" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"tensor": 1', '"tensor": 2'))
    with pytest.raises(TrainerError, match="2 x 1 ranks"):
        cell.load(tmp_path / "checkpoint")
    assert cell.flat_weights().tobytes() == before
    assert cell.version == 1


def test_weights_of_another_cell_are_taken_with_their_version(make_cell: MakeCell, batch: list[MicroStep]) -> None:
    core, satellite = make_cell(), make_cell()
    train(core, batch)
    satellite.release()
    satellite.load_flat(core.flat_weights(), version=core.version)
    assert satellite.version == 1
    assert satellite.flat_weights().tobytes() == core.flat_weights().tobytes()


def test_calls_out_of_turn_are_refused(make_cell: MakeCell, batch: list[MicroStep], tmp_path: Path) -> None:
    cell = make_cell()
    for refused in (cell.step, cell.rollback, lambda: cell.micro_step(batch[0])):
        with pytest.raises(TrainerError, match="idle"):
            refused()
    cell.begin_batch()
    cell.micro_step(batch[0])
    for refused in (
        cell.begin_batch,
        cell.release,
        lambda: cell.save(tmp_path / "x"),
        lambda: cell.load(tmp_path / "x"),
    ):
        with pytest.raises(TrainerError, match="that is batch"):
            refused()
    assert repr(cell).startswith("<Cell batch version=0 micro_steps=1")


def test_a_bad_micro_step_leaves_the_batch_usable_and_a_broken_one_spoils_it(
    make_cell: MakeCell, batch: list[MicroStep]
) -> None:
    cell, steady = make_cell(), make_cell()
    cell.begin_batch()
    cell.micro_step(batch[0])
    with pytest.raises(TrainerError, match="field tokens"):
        cell.micro_step(msgspec.structs.replace(batch[1], tokens=np.full(batch[1].token_count, 64, "<i4").tobytes()))
    with pytest.raises(TrainerError, match="the loss is"):
        cell.micro_step(msgspec.structs.replace(batch[1], advantages=(1e300, -1e300)))
    with pytest.raises(TrainerError, match="failed half-way"):
        cell.step()
    cell.rollback()
    for micro_step in batch:
        cell.micro_step(micro_step)
    cell.step()
    train(steady, batch)
    assert cell.flat_weights().tobytes() == steady.flat_weights().tobytes()


def test_every_weight_trains(make_cell: MakeCell, batch: list[MicroStep]) -> None:
    cell = make_cell()
    before = cell.flat_weights()
    train(cell, batch)
    moved = cell.flat_weights() != before
    for slot in layout(cell._model.config):
        assert moved[slot.offset : slot.offset + slot.size].any(), slot.name
