"""The supervised warm start: a fresh tiny Qwen3 learns the format and the copying, then to be sloppy.

Copying a value from a tool result is learned late and suddenly, and only from careful demonstrations, so those come
first; the sloppy ones then lower the policy to where reinforcement learning has something to improve.
The result is a function of the recipe and the seed alone, on a given machine and torch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec
import torch
from torch.nn import functional as F

from services.mesh.weights.layout import Qwen3Config
from services.rollout.policy.demonstrations import Row
from services.rollout.policy.optimizer import MuonAdamW
from services.rollout.reference.model import Qwen3, initialise


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the starting policy depends on besides the seed and the code."""

    vocabulary: int = 640
    """upper bound of the tokenizer's size"""
    tokenizer_executions: int = 300
    hidden: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    intermediate: int = 384
    context: int = 2048
    """max_position_embeddings"""
    rope_theta: float = 10_000.0
    init_std: float = 0.1
    """with the usual 0.02, copying is learned a hundred steps later"""
    careful_steps: int = 105
    sloppy_steps: int = 55
    careful_pool: int = 1000
    """distinct demonstrated executions to draw from"""
    sloppy_pool: int = 700
    executions: int = 12
    """demonstrated executions a step"""
    muon_lr: float = 0.04
    adamw_lr: float = 8e-3
    warm_up: int = 10
    sloppy_rate: float = 0.6
    """factor of the learning rates when the sloppy demonstrations begin; it falls from there to `floor`"""
    floor: float = 0.03
    clip: float = 1.0
    slices: int = 3
    """a batch is cut by length into so many parts, which saves padding"""


def config_for(recipe: Recipe, *, vocabulary: int, eos: int) -> Qwen3Config:
    """The model's config; the vocabulary is rounded up to a multiple of 64, as trainers like it."""
    return Qwen3Config(
        vocab_size=-(-vocabulary // 64) * 64,
        hidden_size=recipe.hidden,
        intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=recipe.context,
        rope_theta=recipe.rope_theta,
        tie_word_embeddings=True,
        eos_token_id=eos,
    )


def rate(recipe: Recipe, step: int) -> float:
    """The learning rates' factor in [0, 1] at a step: up, flat, and down through the sloppy steps."""
    if step < recipe.careful_steps:
        return min(1.0, (step + 1) / recipe.warm_up)
    gone = (step - recipe.careful_steps) / recipe.sloppy_steps
    return recipe.sloppy_rate + gone * (recipe.floor - recipe.sloppy_rate)


def loss_of(model: Qwen3, rows: Sequence[Row]) -> tuple[torch.Tensor, int]:
    """The summed cross-entropy of the rows' targets, and their number."""
    longest = max(len(row.ids) for row in rows)
    ids = torch.tensor([row.ids + [0] * (longest - len(row.ids)) for row in rows])
    target = torch.tensor([row.target + [False] * (longest - len(row.ids)) for row in rows])[:, 1:]
    logits = model(ids[:, :-1])[target]
    return F.cross_entropy(logits, ids[:, 1:][target], reduction="sum"), int(target.sum())


def train(
    recipe: Recipe,
    config: Qwen3Config,
    careful: list[list[Row]],
    sloppy: list[list[Row]],
    *,
    seed: int,
    report: Callable[[int, float], None],
) -> Qwen3:
    """The warm-started model. `careful` and `sloppy` are rows by execution; `report(step, loss)` is called every step."""
    model = initialise(config, seed=seed, std=recipe.init_std)
    optimizer = MuonAdamW(model, muon_lr=recipe.muon_lr, adamw_lr=recipe.adamw_lr)
    rng = random.Random(f"batches/{seed}")
    for step in range(recipe.careful_steps + recipe.sloppy_steps):
        pool = careful if step < recipe.careful_steps else sloppy
        rows = [row for execution in rng.sample(pool, recipe.executions) for row in execution]
        rows.sort(key=lambda row: len(row.ids))
        count = sum(sum(row.target) for row in rows)
        size = -(-len(rows) // recipe.slices)
        total = 0.0
        for start in range(0, len(rows), size):
            loss, _ = loss_of(model, rows[start : start + size])
            (loss / count).backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step(rate(recipe, step))
        report(step, total / count)
    return model
