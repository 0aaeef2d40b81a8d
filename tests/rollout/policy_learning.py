"""Whether a starting policy learns: group-relative reinforcement learning in one process, tools and turns in memory.

    python -m tests.rollout.policy_learning DIR [--seed 0] [--lr 5e-4] [--steps 20] [--lag 1]

It is no part of the system and shares nothing with its trainer but the objective's equations: sequence-level clip
interval [0.995, 1.005], ratio cap 5, advantages by group, 1/L for each execution. `--lag` is a fixed staleness in
versions. Prints the mean reward of every step and the gain (mean of the last five less mean of the first five).
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import copy
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from services.mesh.chat import load_tokenizer, make_renderer
from services.rollout.policy.quickstart import Card, load_quickstart
from services.rollout.policy.rollouts import Context, Execution, play
from services.rollout.reference.model import Qwen3, load

GROUPS, GROUP_SIZE, SLICE = 4, 8, 12


def log_ratios(model: Qwen3, rows: Sequence[Context]) -> tuple[Tensor, Tensor]:
    """Log-probabilities `[n, S - 1]` of the rows' ids, and their excess over those they were sampled with (0 elsewhere)."""
    longest = max(len(row.ids) for row in rows)
    ids = torch.tensor([row.ids + [0] * (longest - len(row.ids)) for row in rows])
    recorded = torch.zeros(len(rows), longest)
    target = torch.zeros(len(rows), longest, dtype=torch.bool)
    for index, row in enumerate(rows):
        for place, logprob in enumerate(row.logprobs):
            if logprob is not None:
                recorded[index, place], target[index, place] = logprob, True
    logits = model(ids[:, :-1])
    logprobs = -F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(rows), -1)
    return logprobs * target[:, 1:], (logprobs - recorded[:, 1:]) * target[:, 1:]


def step(model: Qwen3, optimizer: torch.optim.Optimizer, executions: list[Execution]) -> tuple[float, float]:
    """One update; returns the mean reward and the share of executions that the clip interval masked."""
    rewards = torch.tensor([execution.reward for execution in executions]).view(-1, GROUP_SIZE)
    centred = rewards - rewards.mean(1, keepdim=True)
    advantages = (centred / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
    lengths = torch.tensor([float(execution.generated) for execution in executions])
    rows = sorted(
        ((index, context) for index, execution in enumerate(executions) for context in execution.contexts),
        key=lambda row: len(row[1].ids),
    )
    slices = [rows[start : start + SLICE] for start in range(0, len(rows), SLICE)]
    sums = torch.zeros(len(executions))
    with torch.no_grad():
        for part in slices:
            owners = torch.tensor([index for index, _ in part])
            sums.index_add_(0, owners, log_ratios(model, [context for _, context in part])[1].sum(1))
    ratios = (sums / lengths).exp()
    masked = ((advantages > 0) & (ratios > 1.005)) | ((advantages < 0) & (ratios < 0.995))
    weights = torch.where(masked, 0.0, advantages / lengths) / len(executions)
    for part in slices:
        owners = torch.tensor([index for index, _ in part])
        logprobs, excess = log_ratios(model, [context for _, context in part])
        (-(excess.detach().exp().clamp(max=5) * logprobs).sum(1) * weights[owners]).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(rewards.mean()), float(masked.float().mean())


def learn(folder: Path, *, seed: int, lr: float, steps: int, lag: int) -> list[float]:
    """The mean reward of every step."""
    quickstart, tokenizer, model = load_quickstart(), load_tokenizer(folder), load(folder)
    renderer, generator, rng = make_renderer(tokenizer), torch.Generator().manual_seed(seed), random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    cards = [Card(*card) for card in quickstart.tasks.cards(0, 0, 64)]
    versions = [copy.deepcopy(model)]
    curve = []
    for number in range(steps):
        drawn = [rng.choice(cards) for _ in range(GROUPS)]
        draws = [(card, f"{seed}/{number}/{g}/{n}") for g, card in enumerate(drawn) for n in range(GROUP_SIZE)]
        executions = play(versions[0], renderer, tokenizer, quickstart, draws, generator)
        reward, masked = step(model, optimizer, executions)
        versions = [*versions, copy.deepcopy(model)][-lag - 1 :]
        calls = sum(execution.calls for execution in executions)
        well = 1 - sum(execution.malformed for execution in executions) / max(calls, 1)
        print(f"step {number + 1:2}  reward {reward:.2f}  masked {masked:.2f}  well-formed {well:.3f}", flush=True)
        curve.append(reward)
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lag", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    curve = learn(options.folder, seed=options.seed, lr=options.lr, steps=options.steps, lag=options.lag)
    first, last = sum(curve[:5]) / 5, sum(curve[-5:]) / 5
    print(f"first five {first:.3f}  last five {last:.3f}  gain {last - first:+.3f}")


if __name__ == "__main__":
    main()
