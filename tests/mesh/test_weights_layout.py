"""The flat buffer's order is fixed, gapless and counted in elements."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import ConfigError
from services.mesh.weights.layout import (
    Qwen3Config,
    config_document,
    fingerprint,
    flat_size,
    layout,
    read_config,
)

TINY = Qwen3Config(
    vocab_size=640,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    rope_theta=1e4,
)


def test_order_shapes_and_offsets_of_the_tiny_policy() -> None:
    slots = layout(TINY)
    assert [tuple(slot) for slot in slots[:3]] == [
        ("model.embed_tokens.weight", (640, 128), 0),
        ("model.layers.0.self_attn.q_proj.weight", (128, 128), 81920),
        ("model.layers.0.self_attn.k_proj.weight", (64, 128), 98304),
    ]
    assert slots[-1].name == "model.norm.weight"
    assert flat_size(TINY) == 475_904


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_slots_follow_one_another_without_gaps(layers: int, groups: int, kv_heads: int, tied: bool) -> None:
    config = Qwen3Config(
        vocab_size=11,
        hidden_size=6,
        intermediate_size=5,
        num_hidden_layers=layers,
        num_attention_heads=groups * kv_heads,
        num_key_value_heads=kv_heads,
        head_dim=4,
        tie_word_embeddings=tied,
    )
    slots = layout(config)
    assert slots[0].offset == 0
    assert all(left.offset + left.size == right.offset for left, right in itertools.pairwise(slots))
    assert len({slot.name for slot in slots}) == len(slots) == 2 + 11 * layers + (not tied)
    assert (fingerprint(config) == fingerprint(TINY)) is False


def write(folder: Path, **changes: object) -> Path:
    (folder / "config.json").write_bytes(msgspec.json.encode({**config_document(TINY), **changes}))
    return folder


def test_config_round_trip_and_both_places_of_the_rope_base(tmp_path: Path) -> None:
    assert read_config(write(tmp_path)) == TINY
    newer = write(tmp_path, rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert read_config(newer).rope_theta == 5e5


def test_end_ids_are_always_a_tuple(tmp_path: Path) -> None:
    assert read_config(write(tmp_path, eos_token_id=None)).eos_token_ids == ()
    assert read_config(write(tmp_path, eos_token_id=3)).eos_token_ids == (3,)
    assert read_config(write(tmp_path, eos_token_id=[3, 4])).eos_token_ids == (3, 4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "llama"}, "model_type"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "yarn"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_size": "big"}, "hidden_size"),
        ({"num_key_value_heads": 3}, "no multiple"),
    ],
)
def test_what_the_architecture_lacks_is_refused(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_config(write(tmp_path, **changes))


def test_a_folder_without_config_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Hugging Face"):
        read_config(tmp_path)
