"""Qwen3 over paged keys and values: the pass that generation uses.

The same equations as `model.py`, without autograd, with projections fused and keys and values read from blocks. Weights
and the KV pool can be dropped and allocated again at any time. Invariants:

- a pass over `B` rows of `T` tokens writes their keys and values, then attends to all up to each token's position;
- entries of a block beyond a row's length are masked and finite, so they have no influence, not even on the last bit;
- the result for one row of one token depends only on its shapes and inputs: in float64 the batcher calls it so.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from schemas.errors import EngineError
from services.mesh.weights.layout import Qwen3Config, flat_size, layout
from services.rollout.reference.kv import BLOCK_SIZE
from services.rollout.reference.model import rms_norm, rope_table, rotate


class LayerWeights:
    """One layer, fused: `qkv [(H + 2 KVH) D, hidden]`, `qk_norm [H + KVH, D]`, `gate_up [2 inner, hidden]`."""

    __slots__ = ("down", "gate_up", "input_norm", "out", "post_norm", "qk_norm", "qkv")

    def __init__(self, config: Qwen3Config, dtype: torch.dtype) -> None:
        hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.qkv = torch.zeros((heads + 2 * kv_heads) * size, hidden, dtype=dtype)
        self.qk_norm = torch.zeros(heads + kv_heads, size, dtype=dtype)
        self.out = torch.zeros(hidden, heads * size, dtype=dtype)
        self.gate_up = torch.zeros(2 * inner, hidden, dtype=dtype)
        self.down = torch.zeros(hidden, inner, dtype=dtype)
        self.input_norm = torch.zeros(hidden, dtype=dtype)
        self.post_norm = torch.zeros(hidden, dtype=dtype)

    def views(self, config: Qwen3Config) -> dict[str, Tensor]:
        """Where each parameter of a checkpoint goes; the norms of queries and keys are repeated over their heads."""
        queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        q, k, v = torch.split(self.qkv, [queries, keys, keys])
        q_norm, k_norm = torch.split(self.qk_norm, [config.num_attention_heads, config.num_key_value_heads])
        gate, up = self.gate_up.chunk(2)
        return {
            "self_attn.q_proj.weight": q,
            "self_attn.k_proj.weight": k,
            "self_attn.v_proj.weight": v,
            "self_attn.o_proj.weight": self.out,
            "self_attn.q_norm.weight": q_norm,
            "self_attn.k_norm.weight": k_norm,
            "mlp.gate_proj.weight": gate,
            "mlp.up_proj.weight": up,
            "mlp.down_proj.weight": self.down,
            "input_layernorm.weight": self.input_norm,
            "post_attention_layernorm.weight": self.post_norm,
        }

    @property
    def nbytes(self) -> int:
        return sum(getattr(self, name).nbytes for name in self.__slots__)


class ModelWeights:
    """All weights of a model, and `views`: a place for each parameter of the flat layout."""

    def __init__(self, config: Qwen3Config, dtype: torch.dtype) -> None:
        self.layers = [LayerWeights(config, dtype) for _ in range(config.num_hidden_layers)]
        self.embed = torch.zeros(config.vocab_size, config.hidden_size, dtype=dtype)
        self.norm = torch.zeros(config.hidden_size, dtype=dtype)
        self.head = self.embed if config.tie_word_embeddings else torch.zeros_like(self.embed)
        self.views = {
            "model.embed_tokens.weight": self.embed,
            "model.norm.weight": self.norm,
            "lm_head.weight": self.head,
        }
        for index, layer in enumerate(self.layers):
            self.views |= {f"model.layers.{index}.{name}": view for name, view in layer.views(config).items()}

    @property
    def nbytes(self) -> int:
        head = 0 if self.head is self.embed else self.head.nbytes
        return self.embed.nbytes + self.norm.nbytes + head + sum(layer.nbytes for layer in self.layers)


class PagedDecoder:
    """Holds weights and the KV pool `[layers, 2 * KVH, blocks, 16 * head_dim]` in `dtype`."""

    def __init__(self, config: Qwen3Config, *, dtype: torch.dtype, num_blocks: int, context_length: int) -> None:
        self.config = config
        self.dtype = dtype
        self.num_blocks = num_blocks
        self._cos, self._sin = rope_table(config, context_length, dtype)
        self._weights: ModelWeights | None = None
        self._loaded = False
        self._kv: Tensor | None = None
        # Gathered keys and values of one layer. A fresh tensor of this size costs more in page faults than the copy.
        self._gathered = torch.empty(0, dtype=dtype)
        self.allocate_kv()
        self.allocate_weights()

    @property
    def has_weights(self) -> bool:
        """Whether weights are there and have been set."""
        return self._loaded

    @property
    def has_kv(self) -> bool:
        """Whether the KV pool is allocated."""
        return self._kv is not None

    @property
    def weight_bytes(self) -> int:
        """Bytes that the weights take now."""
        return 0 if self._weights is None else self._weights.nbytes

    @property
    def kv_bytes(self) -> int:
        """Bytes that the KV pool takes now."""
        return 0 if self._kv is None else self._kv.nbytes

    def allocate_weights(self) -> None:
        """Allocate the weights; nothing can run before `set_weights`."""
        self._weights, self._loaded = ModelWeights(self.config, self.dtype), False

    def drop_weights(self) -> None:
        """Free the weights."""
        self._weights, self._loaded = None, False

    @torch.inference_mode()
    def set_weights(self, flat: Tensor) -> None:
        """Overwrite all weights with the flat float32 buffer `[flat_size]`.

        Raises EngineError, and changes nothing, if its size is wrong or the weights are released.
        """
        if self._weights is None:
            raise EngineError("the weights are released", remedy="resume the memory of the weights first")
        if flat.shape != (flat_size(self.config),):
            raise EngineError(
                f"the weight buffer has shape {tuple(flat.shape)}, this model needs [{flat_size(self.config)}]",
                remedy="send weights of the same architecture as the engine's",
            )
        for slot in layout(self.config):
            self._weights.views[slot.name].copy_(flat[slot.offset : slot.offset + slot.size].view(slot.shape))
        self._loaded = True

    def allocate_kv(self) -> None:
        """Allocate the KV pool, zeroed: masked entries must be finite."""
        config = self.config
        shape = (
            config.num_hidden_layers,
            2 * config.num_key_value_heads,
            self.num_blocks,
            BLOCK_SIZE * config.head_dim,
        )
        self._kv = torch.zeros(shape, dtype=self.dtype)

    def drop_kv(self) -> None:
        """Free the KV pool."""
        self._kv, self._gathered = None, torch.empty(0, dtype=self.dtype)

    @torch.inference_mode()
    def run(self, ids: Tensor, starts: Tensor, tables: Tensor) -> Tensor:
        """Logits `[B, V]` of the last token of each row.

        `ids [B, T]` are the tokens at positions `starts [B] .. starts + T - 1`; everything before is in the blocks
        `tables [B, n]`, which reach at least to the last position.
        """
        if self._weights is None or not self._loaded or self._kv is None:
            raise EngineError("weights or KV pool are released", remedy="resume and update them before generating")
        config, (rows, length) = self.config, ids.shape
        heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        positions = starts[:, None] + torch.arange(length)
        slots = (tables.gather(1, positions // BLOCK_SIZE) * BLOCK_SIZE + positions % BLOCK_SIZE).view(-1)
        flat_tables = tables.reshape(-1)
        span = tables.shape[1] * BLOCK_SIZE
        # [B, 1, T, span]: added to the scores of every head.
        mask = torch.zeros((rows, 1, length, span), dtype=self.dtype)
        mask.masked_fill_((torch.arange(span) > positions[:, :, None])[:, None], float("-inf"))
        cos = self._cos[positions.view(-1), None]
        sin = self._sin[positions.view(-1), None]
        scale = size**-0.5
        gathered = self._scratch(2 * kv_heads, flat_tables.numel(), BLOCK_SIZE * size)
        x = self._weights.embed[ids.reshape(-1)]
        for weights, pool in zip(self._weights.layers, self._kv, strict=True):
            fused = F.linear(rms_norm(x, weights.input_norm, config.rms_norm_eps), weights.qkv)
            fused = fused.view(-1, heads + 2 * kv_heads, size)
            qk = rotate(rms_norm(fused[:, : heads + kv_heads], weights.qk_norm, config.rms_norm_eps), cos, sin)
            fresh = torch.cat((qk[:, heads:], fused[:, heads + kv_heads :]), dim=1).transpose(0, 1)
            pool.view(2 * kv_heads, -1, size).index_copy_(1, slots, fresh)
            # [2, KVH * B, span, head_dim]: whole blocks are copied, heads outermost, so no transposition is needed.
            torch.index_select(pool, 1, flat_tables, out=gathered)
            keys, values = gathered.view(2, kv_heads * rows, span, size)
            queries = (qk[:, :heads] * scale).view(rows, length, kv_heads, -1, size).permute(2, 0, 3, 1, 4)
            scores = torch.bmm(queries.reshape(kv_heads * rows, -1, size), keys.transpose(1, 2))
            scores.view(kv_heads, rows, -1, length, span).add_(mask)
            mixed = torch.bmm(torch.softmax(scores, dim=-1), values).view(kv_heads, rows, -1, length, size)
            x = x + F.linear(mixed.permute(1, 3, 0, 2, 4).reshape(rows * length, -1), weights.out)
            gate, up = F.linear(rms_norm(x, weights.post_norm, config.rms_norm_eps), weights.gate_up).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, weights.down)
        last = x.view(rows, length, -1)[:, -1]
        return F.linear(rms_norm(last, self._weights.norm, config.rms_norm_eps), self._weights.head)

    def _scratch(self, *shape: int) -> Tensor:
        count = math.prod(shape)
        if self._gathered.numel() < count:
            self._gathered = torch.empty(count, dtype=self.dtype)
        return self._gathered[:count].view(shape)
