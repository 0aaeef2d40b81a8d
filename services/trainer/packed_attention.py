"""Attention on packed rows: several trajectories in one sequence, none of which sees another.

`layer_spec` is the one place that chooses. With an accelerator and Transformer Engine, Megatron's own layer takes the row
bounds (`PackedSeqParams`, format `thd`) into a variable-length kernel. Elsewhere `PackedDotProductAttention` runs one
causal attention for each row, so that cost grows with the sum of squared row lengths and not with the square of their
sum.

Invariant: the output at a token is a function of the tokens of its own row up to itself. Plain causal attention over
the packed sequence would break it without any error: a token would read the trajectories packed before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from services.trainer.cpu_shim import has_accelerator
from services.trainer.mcore import (
    HAVE_TE,
    DotProductAttention,
    ModuleSpec,
    PackedSeqParams,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)


class PackedDotProductAttention(DotProductAttention):  # type: ignore[misc]
    """Causal attention in every row of a packed sequence, for Megatron's layers without Transformer Engine."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: object = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Packed: query `[S, heads, head_dim]`, key and value `[S, groups, head_dim]` to `[S, heads * head_dim]`.

        `packed_seq_params` must be a `RowBounds`. Without it, Megatron's own attention on `[s, b, ...]` runs.
        """
        if packed_seq_params is None:
            unpacked: Tensor = super().forward(query, key, value, attention_mask, attn_mask_type, attention_bias)
            return unpacked
        return row_attention(query, key, value, packed_seq_params.row_lengths, self.softmax_scale).flatten(1)


class RowBounds(PackedSeqParams):  # type: ignore[misc]
    """Megatron's row bounds of a packed sequence, with the lengths as Python integers beside them."""

    def __init__(self, cu_seqlens: Tensor, row_lengths: Sequence[int]) -> None:
        longest = max(row_lengths)
        super().__init__(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
        self.row_lengths = tuple(row_lengths)


def row_attention(query: Tensor, key: Tensor, value: Tensor, row_lengths: Sequence[int], scale: float) -> Tensor:
    """One causal attention a row: query `[S, heads, d]`, key and value `[S, groups, d]` to `[S, heads, d]`.

    Head h attends with group `h // (heads / groups)`, as in grouped-query attention.
    """
    shared = query.shape[1] // key.shape[1]
    if shared > 1:
        key, value = key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)
    # [heads, S, d], so that a row is a slice of every head.
    parts = [torch.split(part.transpose(0, 1), list(row_lengths), dim=1) for part in (query, key, value)]
    outputs = [
        scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, scale=scale)[0]
        for q, k, v in zip(*parts, strict=True)
    ]
    return torch.cat(outputs, dim=1).transpose(0, 1)


def layer_spec() -> ModuleSpec:
    """Megatron's description of one Qwen3 layer (with q and k norms) whose attention takes packed rows."""
    if HAVE_TE and has_accelerator():
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=True)
    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = PackedDotProductAttention
    return spec
