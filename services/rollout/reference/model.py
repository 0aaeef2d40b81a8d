"""Qwen3 in plain torch: the full forward pass, checkpoints, and the flat weight buffer.

Parameters carry Hugging Face's names (`model.layers.0.self_attn.q_proj.weight`), so a checkpoint written here loads in
transformers and SGLang and the other way round. Invariants:

- arithmetic stays in the parameters' dtype (float32 or float64); nothing is cast on the way;
- the tied `lm_head` is no parameter of its own.

Generation over a KV cache lives in `decode.py`, which uses the same equations on the same weights.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from schemas.errors import EngineError
from services.mesh.weights.layout import Qwen3Config, config_document, flat_size, layout, read_config

WEIGHTS_FILE = "model.safetensors"


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / rms(x) * weight` over the last dimension."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rope_table(config: Qwen3Config, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[length, head_dim]` of the rotary embedding; angles are computed in float64, then cast."""
    inverse = config.rope_theta ** (-torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), inverse)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of `x [..., head_dim]`, halves rotated against each other as Hugging Face does."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention with normalised queries and keys."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        hidden = config.hidden_size
        self.q_proj = nn.Linear(hidden, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, hidden, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(batch, length, self.heads, self.head_dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(batch, length, self.kv_heads, self.head_dim)).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=self.heads != self.kv_heads
        )
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


class MLP(nn.Module):
    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Body(nn.Module):
    """Everything under Hugging Face's `model.` prefix."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Qwen3(nn.Module):
    """`forward(ids [B, S]) -> logits [B, S, V]`, causal, differentiable.

    Rows of different lengths are padded on the right with any valid id: attention is causal, so padding reaches no
    earlier position, and the caller leaves its logits out.
    """

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.config = config
        self.model = Body(config)
        self.lm_head = (
            None if config.tie_word_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        )
        self._rope: tuple[Tensor, Tensor] | None = None

    def forward(self, ids: Tensor) -> Tensor:
        x = self.model.embed_tokens(ids)
        cos, sin = self._rope_for(ids.shape[1], x.dtype)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return F.linear(self.model.norm(x), self.head_weight)

    @property
    def head_weight(self) -> Tensor:
        """`[V, hidden]`: the embedding where it is tied."""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def _rope_for(self, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if self._rope is None or self._rope[0].shape[0] < length or self._rope[0].dtype != dtype:
            self._rope = rope_table(self.config, length, dtype)
        return self._rope[0][:length], self._rope[1][:length]


def initialise(config: Qwen3Config, *, seed: int, std: float = 0.02, dtype: torch.dtype = torch.float32) -> Qwen3:
    """A fresh model: matrices normal with `std`, norms one; the same for a seed whatever torch's global state."""
    model = Qwen3(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for slot in layout(config):
            if len(slot.shape) == 2:
                model.get_parameter(slot.name).normal_(0.0, std, generator=generator)
    return model.to(dtype)


def load(folder: str | Path, dtype: torch.dtype = torch.float32) -> Qwen3:
    """The model of a checkpoint folder (`config.json`, `model.safetensors`), cast to `dtype`.

    Raises ConfigError for the config, EngineError for weights that are absent or do not fit it.
    """
    config = read_config(folder)
    path = Path(folder) / WEIGHTS_FILE
    remedy = "give a folder with config.json and one model.safetensors that belong together"
    if not path.is_file():
        raise EngineError(f"there is no {WEIGHTS_FILE}", where=str(folder), remedy=remedy)
    model = Qwen3(config).to(dtype)
    slots = layout(config)
    try:
        with safe_open(path, framework="pt") as stored, torch.no_grad():
            names = set(stored.keys())
            expected = {slot.name for slot in slots}
            missing, surplus = sorted(expected - names), sorted(names - expected - {"lm_head.weight"})
            if missing or surplus:
                raise EngineError(f"parameters missing: {missing}, unknown: {surplus}", where=str(path), remedy=remedy)
            for slot in slots:
                tensor = stored.get_tensor(slot.name)
                if tuple(tensor.shape) != slot.shape:
                    what = f"{slot.name} has shape {tuple(tensor.shape)}, the config says {slot.shape}"
                    raise EngineError(what, where=str(path), remedy=remedy)
                model.get_parameter(slot.name).copy_(tensor)
    except SafetensorError as error:
        raise EngineError(f"unreadable weights: {error}", where=str(path), remedy=remedy) from error
    return model


def save(folder: str | Path, model: Qwen3, config: Qwen3Config) -> None:
    """Write `config.json` and `model.safetensors` (float32); each file appears whole or not at all."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    tensors = {
        slot.name: model.get_parameter(slot.name).detach().to(torch.float32).contiguous() for slot in layout(config)
    }
    weights, document = target / f".{WEIGHTS_FILE}.part", target / ".config.json.part"
    save_file(tensors, weights, metadata={"format": "pt"})
    document.write_bytes(msgspec.json.format(msgspec.json.encode(config_document(config)), indent=2) + b"\n")
    os.replace(weights, target / WEIGHTS_FILE)
    os.replace(document, target / "config.json")


def flatten(model: Qwen3) -> Tensor:
    """All parameters as one new float32 vector `[flat_size]` in the order of `layout`."""
    flat = torch.empty(flat_size(model.config), dtype=torch.float32)
    for slot in layout(model.config):
        flat[slot.offset : slot.offset + slot.size] = model.get_parameter(slot.name).detach().reshape(-1)
    return flat
