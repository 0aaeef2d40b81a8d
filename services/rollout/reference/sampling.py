"""Drawing one token per row by inverse transform, with a stream of uniforms of each request's own.

The k-th token of a request uses the k-th number of its stream: retraction, batching and preemption never shift it.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def seed_of(rid: str) -> int:
    """The seed of a request that brings none: a digest of its id."""
    return int.from_bytes(hashlib.blake2b(rid.encode(), digest_size=8).digest())


def uniforms(seed: int, count: int) -> npt.NDArray[np.float64]:
    """The first `count` numbers in [0, 1) of the stream of `seed`; a longer request sees the same beginning."""
    return np.random.Generator(np.random.Philox(seed)).random(count)


@torch.inference_mode()
def sample(logits: Tensor, temperatures: Tensor, draws: Tensor) -> tuple[list[int], list[float]]:
    """Ids and log-probabilities, one for each row of `logits [B, V]`.

    `temperatures [B]` and `draws [B]` are float64. Temperature 0 takes the most likely id; its log-probability is that
    of the unscaled logits. Otherwise the id is drawn from, and its log-probability is of, softmax(logits / temperature)
    in float64.
    """
    greedy = temperatures == 0
    scaled = logits.double() / torch.where(greedy, 1.0, temperatures)[:, None]
    logprobs = torch.log_softmax(scaled, dim=-1)
    cumulative = logprobs.exp().cumsum(dim=-1)
    # Scaled by the total, so that rounding in the sum never leaves a draw beyond the last id.
    targets = (draws * cumulative[:, -1])[:, None]
    drawn = torch.searchsorted(cumulative, targets, right=True).squeeze(1).clamp_(max=logits.shape[1] - 1)
    ids = torch.where(greedy, logprobs.argmax(dim=-1), drawn)
    return ids.tolist(), logprobs.gather(1, ids[:, None]).squeeze(1).tolist()
