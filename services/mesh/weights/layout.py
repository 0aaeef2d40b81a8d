"""The shape of a Qwen3 policy and the order of its parameters in the flat weight buffer.

Weights travel from trainer to engines as one contiguous buffer of float32. Both sides derive its layout from the same
config and so never exchange one. Invariants:

- order: `model.embed_tokens`, then for each layer q, k, v, o projections, q and k norms, gate, up, down projections,
  input and post-attention norms; then `model.norm`; then `lm_head` only if it is not tied to the embedding;
- each parameter is stored row-major, `[out, in]` as in Hugging Face checkpoints, without gaps;
- offsets and sizes count float32 elements, not bytes.

Pure: no torch, no I/O but the reading of `config.json`.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from schemas.errors import ConfigError


class Qwen3Config(msgspec.Struct, frozen=True, kw_only=True):
    """What the architecture needs from a Hugging Face `config.json` of type `qwen3`; names are Hugging Face's."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 40960
    rope_theta: float = 1_000_000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    eos_token_id: int | list[int] | None = None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end a generation, always as a tuple."""
        if self.eos_token_id is None:
            return ()
        return (self.eos_token_id,) if isinstance(self.eos_token_id, int) else tuple(self.eos_token_id)


class WeightSlot(NamedTuple):
    """One parameter's place in the flat buffer."""

    name: str
    """Hugging Face parameter name."""
    shape: tuple[int, ...]
    offset: int
    """First element, counted in float32 elements."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def layout(config: Qwen3Config) -> list[WeightSlot]:
    """Every parameter in buffer order, as `(name, shape, offset)`."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    shapes: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (config.vocab_size, hidden))]
    for index in range(config.num_hidden_layers):
        prefix = f"model.layers.{index}."
        shapes += [
            (prefix + "self_attn.q_proj.weight", (queries, hidden)),
            (prefix + "self_attn.k_proj.weight", (keys, hidden)),
            (prefix + "self_attn.v_proj.weight", (keys, hidden)),
            (prefix + "self_attn.o_proj.weight", (hidden, queries)),
            (prefix + "self_attn.q_norm.weight", (config.head_dim,)),
            (prefix + "self_attn.k_norm.weight", (config.head_dim,)),
            (prefix + "mlp.gate_proj.weight", (inner, hidden)),
            (prefix + "mlp.up_proj.weight", (inner, hidden)),
            (prefix + "mlp.down_proj.weight", (hidden, inner)),
            (prefix + "input_layernorm.weight", (hidden,)),
            (prefix + "post_attention_layernorm.weight", (hidden,)),
        ]
    shapes.append(("model.norm.weight", (hidden,)))
    if not config.tie_word_embeddings:
        shapes.append(("lm_head.weight", (config.vocab_size, hidden)))
    slots, offset = [], 0
    for name, shape in shapes:
        slots.append(WeightSlot(name, shape, offset))
        offset += math.prod(shape)
    return slots


def flat_size(config: Qwen3Config) -> int:
    """Number of float32 elements in the flat buffer: the number of parameters."""
    last = layout(config)[-1]
    return last.offset + last.size


def fingerprint(config: Qwen3Config) -> str:
    """A short digest of the layout; two processes with equal fingerprints read each other's buffers alike."""
    return hashlib.blake2b(msgspec.json.encode(layout(config)), digest_size=8).hexdigest()


def read_config(folder: str | Path) -> Qwen3Config:
    """The config of a Hugging Face style checkpoint folder.

    Raises ConfigError where the file is absent or undecodable, or asks for something that this architecture does not
    have (attention bias, rope scaling, sliding windows): running such a model without it would be silently wrong.
    """
    path = Path(folder) / "config.json"
    try:
        raw = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        raise ConfigError(
            "there is no config.json",
            where=str(folder),
            remedy="give the folder of a Hugging Face style Qwen3 checkpoint",
        ) from None
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"not a JSON object: {error}", where=str(path), remedy="write the checkpoint again"
        ) from error
    _refuse_foreign(raw, str(path))
    # Newer checkpoints keep the rope base in `rope_parameters`, older ones at the top level.
    rope = raw.get("rope_parameters") or {}
    if "rope_theta" in rope:
        raw["rope_theta"] = rope["rope_theta"]
    try:
        config = msgspec.convert(raw, Qwen3Config)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error), where=str(path), remedy="write the checkpoint again") from error
    if config.num_attention_heads % config.num_key_value_heads:
        raise ConfigError(
            f"{config.num_attention_heads} query heads are no multiple of {config.num_key_value_heads} key-value heads",
            where=str(path),
            remedy="correct num_key_value_heads",
        )
    return config


def config_document(config: Qwen3Config) -> dict[str, Any]:
    """The `config.json` that Hugging Face, SGLang and `read_config` all understand."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "torch_dtype": "float32",
        **msgspec.to_builtins(config),
    }


def _refuse_foreign(raw: dict[str, Any], where: str) -> None:
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    reasons = [
        (raw.get("model_type", "qwen3") != "qwen3", f"model_type is {raw.get('model_type')!r}, not 'qwen3'"),
        (bool(raw.get("attention_bias")), "attention_bias is set"),
        (bool(raw.get("use_sliding_window")), "use_sliding_window is set"),
        (rope_type != "default", f"rope scaling of type {rope_type!r} is asked for"),
        (raw.get("hidden_act", "silu") != "silu", f"hidden_act is {raw.get('hidden_act')!r}, not 'silu'"),
    ]
    for refused, what in reasons:
        if refused:
            raise ConfigError(what, where=where, remedy="use a dense Qwen3 checkpoint without this setting")
