"""Batched sampling over a KV cache, for measuring a policy in its own process.

It has the equations of `reference/model.py` on the same weights; the rollout engine proper is the reference engine.
Rows of a batch are right-padded: a row's new tokens overwrite its own padding, and a mask hides what lies beyond.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from services.rollout.reference.model import Qwen3, rope_table, rotate


class Sampled(NamedTuple):
    """One completion: the ids, the stop token included if there was one, and their log-probabilities."""

    ids: list[int]
    logprobs: list[float]


class Cache:
    """Keys and values of a batch, `[B, kv heads, room, head dim]` for each layer."""

    def __init__(self, model: Qwen3, batch: int, room: int) -> None:
        config = model.config
        shape = (config.num_hidden_layers, batch, config.num_key_value_heads, room, config.head_dim)
        self.model = model
        self.keys, self.values = torch.zeros(shape), torch.zeros(shape)
        self.cos, self.sin = rope_table(config, room, torch.float32)

    def advance(self, ids: Tensor, at: Tensor) -> Tensor:
        """Logits `[B, S, V]` of `ids [B, S]` standing at positions `at [B, S]`, which are added to the cache."""
        model, config = self.model, self.model.config
        batch, length = ids.shape
        cos, sin = self.cos[at].unsqueeze(1), self.sin[at].unsqueeze(1)
        seen = int(at.max()) + 1
        mask = (torch.arange(seen) <= at.unsqueeze(-1)).unsqueeze(1)
        where = at.unsqueeze(1).unsqueeze(-1).expand(-1, config.num_key_value_heads, -1, config.head_dim)
        x = model.model.embed_tokens(ids)
        for index, layer in enumerate(model.model.layers):
            attention, inner = layer.self_attn, layer.input_layernorm(x)
            q = attention.q_norm(attention.q_proj(inner).view(batch, length, -1, config.head_dim)).transpose(1, 2)
            k = attention.k_norm(attention.k_proj(inner).view(batch, length, -1, config.head_dim)).transpose(1, 2)
            v = attention.v_proj(inner).view(batch, length, -1, config.head_dim).transpose(1, 2)
            self.keys[index].scatter_(2, where, rotate(k, cos, sin))
            self.values[index].scatter_(2, where, v)
            keys, values = self.keys[index, :, :, :seen], self.values[index, :, :, :seen]
            mixed = F.scaled_dot_product_attention(rotate(q, cos, sin), keys, values, attn_mask=mask, enable_gqa=True)
            x = x + attention.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return F.linear(model.model.norm(x), model.head_weight)

    def keep(self, rows: Tensor) -> None:
        """Drop every row of the batch that isn't in `rows`."""
        self.keys, self.values = self.keys[:, rows], self.values[:, rows]


@torch.no_grad()
def sample(
    model: Qwen3, prompts: list[list[int]], *, most: int, stops: set[int], generator: torch.Generator
) -> list[Sampled]:
    """One completion of at most `most` tokens for each prompt, at temperature 1, ended by any id of `stops`."""
    longest = max(len(prompt) for prompt in prompts)
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    ids = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts])
    cache = Cache(model, len(prompts), longest + most)
    logits = cache.advance(ids, torch.arange(longest).expand(len(prompts), -1))
    logits = logits[torch.arange(len(prompts)), lengths - 1]
    done = [Sampled([], []) for _ in prompts]
    alive = torch.arange(len(prompts))
    while True:
        logprobs = torch.log_softmax(logits, dim=-1)
        drawn = torch.multinomial(logprobs.exp(), 1, generator=generator)
        chosen = logprobs.gather(1, drawn).squeeze(1)
        open_rows = []
        for row, (index, token, logprob) in enumerate(
            zip(alive.tolist(), drawn.squeeze(1).tolist(), chosen.tolist(), strict=True)
        ):
            done[index].ids.append(token)
            done[index].logprobs.append(logprob)
            if token not in stops and len(done[index].ids) < most:
                open_rows.append(row)
        if not open_rows:
            return done
        if len(open_rows) < len(alive):
            kept = torch.tensor(open_rows)
            alive, lengths, drawn = alive[kept], lengths[kept], drawn[kept]
            cache.keep(kept)
        logits = cache.advance(drawn, lengths.unsqueeze(1)).squeeze(1)
        lengths = lengths + 1
