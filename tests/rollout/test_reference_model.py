"""The model: checkpoints, the flat buffer, and decoding over blocks against the full pass."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from schemas.errors import EngineError
from services.mesh.weights.layout import Qwen3Config, layout
from services.rollout.reference.decode import PagedDecoder
from services.rollout.reference.kv import BLOCK_SIZE
from services.rollout.reference.model import Qwen3, flatten, initialise, load, save
from services.rollout.reference.sampling import sample, seed_of, uniforms

UNTIED = Qwen3Config(
    vocab_size=50,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=3,
    head_dim=8,
    max_position_embeddings=128,
    rope_theta=1e4,
    tie_word_embeddings=False,
)


def test_parameters_are_those_of_the_layout(model: Qwen3) -> None:
    for candidate in (model, Qwen3(UNTIED)):
        shapes = {name: tuple(parameter.shape) for name, parameter in candidate.named_parameters()}
        assert shapes == {slot.name: slot.shape for slot in layout(candidate.config)}


def test_checkpoint_and_flat_buffer_keep_every_bit(model: Qwen3, tmp_path: Path) -> None:
    save(tmp_path, model, model.config)
    again = load(tmp_path)
    assert again.config == model.config
    assert torch.equal(flatten(again), flatten(model))
    ids = torch.arange(20)[None]
    assert torch.equal(again(ids), model(ids))
    for slot in layout(model.config):
        part = flatten(model)[slot.offset : slot.offset + slot.size].view(slot.shape)
        assert torch.equal(part, model.get_parameter(slot.name))


def test_weights_that_do_not_fit_the_config_are_refused(model: Qwen3, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"no model\.safetensors"):
        (tmp_path / "config.json").write_bytes(msgspec.json.encode({"model_type": "qwen3"} | fields(model.config)))
        load(tmp_path)
    save(tmp_path, model, model.config)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["surprise"] = tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(EngineError, match=r"missing: \['model.norm.weight'\], unknown: \['surprise'\]"):
        load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no tensors here")
    with pytest.raises(EngineError, match="unreadable"):
        load(tmp_path)


def fields(config: Qwen3Config) -> dict[str, object]:
    return msgspec.to_builtins(config)


def test_a_full_pass_is_causal_and_differentiable(model: Qwen3) -> None:
    ids = torch.randint(0, 96, (2, 12), generator=torch.Generator().manual_seed(0))
    logits = model(ids)
    padded = model(torch.cat((ids, torch.zeros(2, 5, dtype=torch.long)), dim=1))
    assert torch.allclose(padded[:, :12], logits, atol=1e-5)
    gradients = torch.autograd.grad(logits.logsumexp(-1).sum(), list(model.parameters()))
    assert all(bool(gradient.abs().sum() > 0) for gradient in gradients)


@pytest.mark.parametrize("config", [None, UNTIED])
@pytest.mark.parametrize("chunks", [[40], [16, 24], [1] * 40, [33, 1, 6]])
def test_decoding_over_blocks_equals_the_full_pass(model: Qwen3, config: Qwen3Config | None, chunks: list[int]) -> None:
    full = (model if config is None else initialise(config, seed=3, std=0.3)).double()
    try:
        decoder = PagedDecoder(full.config, dtype=torch.float64, num_blocks=9, context_length=64)
        decoder.set_weights(flatten(full))
        ids = torch.randint(0, 50, (1, 40), generator=torch.Generator().manual_seed(1))
        expected = full(ids)[0]
        table, start = torch.tensor([[7, 2, 5]]), 0
        for chunk in chunks:
            end = start + chunk
            blocks = table[:, : (end - 1) // BLOCK_SIZE + 1]
            logits = decoder.run(ids[:, start:end], torch.tensor([start]), blocks)
            assert torch.allclose(logits[0], expected[end - 1], atol=1e-10)
            start = end
    finally:
        full.float()


def test_rows_of_different_lengths_decode_together(model: Qwen3) -> None:
    decoder = PagedDecoder(model.config, dtype=torch.float32, num_blocks=16, context_length=64)
    decoder.set_weights(flatten(model))
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randint(0, 96, (length,), generator=generator) for length in (3, 33, 16)]
    tables = torch.tensor([[0, 0, 0], [4, 9, 2], [6, 0, 0]])
    for row, table in zip(rows, tables, strict=True):
        decoder.run(row[None, :-1], torch.tensor([0]), table[None])
    last = torch.stack([row[-1:] for row in rows])
    together = decoder.run(last, torch.tensor([len(row) - 1 for row in rows]), tables)
    for row, logits in zip(rows, together, strict=True):
        assert torch.allclose(logits, model(row[None])[0, -1], atol=1e-4)


def test_sampling_follows_the_distribution_and_reports_its_logprobs() -> None:
    logits = torch.tensor([2.0, -1.0, 0.5, float("-inf")]).repeat(20_000, 1)
    temperatures = torch.full((20_000,), 0.7, dtype=torch.float64)
    ids, logprobs = sample(logits, temperatures, torch.from_numpy(uniforms(1, 20_000)))
    expected = torch.log_softmax(logits[0].double() / 0.7, dim=-1)
    frequencies = torch.bincount(torch.tensor(ids), minlength=4) / 20_000
    assert torch.allclose(frequencies.double(), expected.exp(), atol=0.01)
    assert frequencies[3] == 0
    assert all(logprob == pytest.approx(expected[token].item()) for token, logprob in zip(ids, logprobs, strict=True))


def test_temperature_zero_takes_the_most_likely_and_its_unscaled_logprob() -> None:
    logits = torch.tensor([[0.0, 1.0, 3.0], [0.0, 5.0, 3.0]])
    ids, logprobs = sample(logits, torch.zeros(2, dtype=torch.float64), torch.full((2,), 0.01, dtype=torch.float64))
    assert ids == [2, 1]
    assert logprobs[0] == pytest.approx(torch.log_softmax(logits[0], -1)[2].item())


def test_a_draw_at_the_upper_end_never_takes_an_impossible_id() -> None:
    logits = torch.tensor([[0.0, 0.0, float("-inf")]])
    ones, top = torch.ones(1, dtype=torch.float64), torch.tensor([1 - 2**-53], dtype=torch.float64)
    assert sample(logits, ones, top)[0] == [1]


def test_streams_of_uniforms_depend_on_the_seed_only() -> None:
    assert uniforms(7, 3).tolist() == uniforms(7, 9).tolist()[:3]
    assert seed_of("a") != seed_of("b")
