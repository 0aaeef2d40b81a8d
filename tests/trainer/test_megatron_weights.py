"""The Megatron model is the same function as the reference model, and gives its weights back unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from schemas.config import Trainer as TrainerConfig
from schemas.errors import TrainerError
from services.mesh.weights.layout import Qwen3Config, flat_size
from services.rollout.reference import model as reference
from services.trainer.arrays import tensors_of
from services.trainer.checkpoint import flat_weights, load_flat, load_policy, save_policy
from services.trainer.megatron import CellModel, CellRanks, build_cell_model, open_world, run_micro_step


def megatron_logits(model: CellModel, micro_step: Any) -> torch.Tensor:
    result = run_micro_step(
        model, tensors_of(micro_step), lambda logits: (logits.sum() * 0, {"logits": logits.detach()}), backward=False
    )
    assert result is not None
    logits: torch.Tensor = result["logits"]
    return logits


@pytest.fixture
def model(world: None, config: Qwen3Config, settings: TrainerConfig, policy: Path) -> CellModel:
    built = build_cell_model(config, settings)
    with torch.no_grad():
        load_policy(built, policy)
    return built


def test_logits_are_the_reference_models(
    model: CellModel, policy_model: reference.Qwen3, sample: Any, pack: Any
) -> None:
    rows = sample(policy_model, 1, 6)
    logits = megatron_logits(model, pack(rows, dict.fromkeys((row.execution for row in rows), 1.0)))
    with torch.no_grad():
        expected = torch.cat([policy_model(torch.tensor([row.tokens]))[0] for row in rows])
    assert float(expected.abs().max()) > 1.0
    assert float((logits - expected).abs().max()) < 1e-5


def test_an_untied_head_is_carried_too(
    world: None, config: Qwen3Config, settings: TrainerConfig, sample: Any, pack: Any, tmp_path: Path
) -> None:
    untied = msgspec.structs.replace(config, tie_word_embeddings=False)
    policy_model = reference.initialise(untied, seed=5, std=0.2)
    built = build_cell_model(untied, settings)
    flat = reference.flatten(policy_model).numpy()
    with torch.no_grad():
        load_flat(built, flat)
    rows = sample(policy_model, 2, 3)
    with torch.no_grad():
        expected = torch.cat([policy_model(torch.tensor([row.tokens]))[0] for row in rows])
    logits = megatron_logits(built, pack(rows, dict.fromkeys((row.execution for row in rows), 1.0)))
    assert float((logits - expected).abs().max()) < 1e-5
    assert np.array_equal(flat_weights(built), flat)


def test_hugging_face_to_megatron_and_back_is_bit_exact(
    model: CellModel, policy_model: reference.Qwen3, config: Qwen3Config, tmp_path: Path
) -> None:
    flat = reference.flatten(policy_model).numpy()
    assert flat_weights(model).tobytes() == flat.tobytes()
    registered = np.full(flat_size(config), np.nan, np.float32)
    assert flat_weights(model, registered) is registered
    assert registered.tobytes() == flat.tobytes()
    save_policy(config, registered, tmp_path / "out")
    again = reference.load(tmp_path / "out")
    assert reference.flatten(again).numpy().tobytes() == flat.tobytes()
    changed = np.random.default_rng(0).normal(size=flat.shape).astype(np.float32)
    with torch.no_grad():
        load_flat(model, changed)
    assert flat_weights(model).tobytes() == changed.tobytes()


def test_a_policy_that_does_not_fit_is_refused(
    model: CellModel, config: Qwen3Config, tmp_path: Path, policy: Path
) -> None:
    with pytest.raises(TrainerError, match=r"no \*.safetensors"):
        load_policy(model, tmp_path)
    other = msgspec.structs.replace(config, intermediate_size=56)
    reference.save(tmp_path / "wide", reference.initialise(other, seed=0), other)
    with pytest.raises(TrainerError, match="has shape"), torch.no_grad():
        load_policy(model, tmp_path / "wide")
    deep = msgspec.structs.replace(config, num_hidden_layers=1)
    reference.save(tmp_path / "shallow", reference.initialise(deep, seed=0), deep)
    with pytest.raises(TrainerError, match="parameters are missing"):
        load_policy(model, tmp_path / "shallow")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "model.safetensors").write_bytes((policy / "model.safetensors").read_bytes()[:100])
    with pytest.raises(TrainerError, match="can't be read"):
        load_policy(model, tmp_path / "torn")
    with pytest.raises(TrainerError, match="weight buffer"):
        load_flat(model, np.zeros(3, np.float32))


def test_a_world_is_opened_once_and_with_ranks_that_fit(world: None) -> None:
    with pytest.raises(TrainerError, match="already"):
        open_world(CellRanks())
