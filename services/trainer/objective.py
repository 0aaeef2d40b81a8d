"""The execution-level objective: equations (5) and (6) of the paper, in plain torch.

Names are the paper's. For target u of execution i:

    rho_u   = pi_theta(y_u | c_u) / p_u^roll                                          (5)
    s_i     = sg[ exp( 1/L_i  sum_u log rho_u ) ]                                     (5)
    m_i     = 0 where A_i > 0 and s_i > clip_high, or A_i < 0 and s_i < clip_low; else 1
    rhobar_u = sg( min(rho_u, ratio_cap) )
    l_u     = min( loss_cap, -m_i rhobar_u A_i log pi_theta(y_u | c_u) )
    L       = 1/(B N)  sum_i  1/L_i  sum_u l_u                                        (6)

Invariants:

- rho, s and m carry no gradient; the gradient flows through log pi alone, and not at all where the token loss is
  capped;
- the divisor of a target is B N L_i whatever is masked or capped; an execution without targets contributes zero;
- the value depends on which targets an execution has, not on which of its rows carries them;
- the loss is a plain sum over executions, so the gradients of a batch's micro-steps add up in any order.

`target_logprobs` reads full logits; where the vocabulary is split over ranks, the caller computes log pi in its own way
(`sharded_target_logprobs` in `megatron.py`) and everything from `execution_objective` on is the same.
"""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from services.trainer.arrays import PackedRows


class ObjectiveTerms(msgspec.Struct, frozen=True, kw_only=True):
    """Constants of the objective; defaults are the paper's."""

    groups: int
    """B: groups a batch."""
    executions: int
    """N: raw executions a group."""
    clip_low: float = 0.995
    clip_high: float = 1.005
    ratio_cap: float = 5.0
    loss_cap: float = 100.0


class ObjectiveStats(msgspec.Struct, frozen=True, kw_only=True):
    """What one micro-step says of itself. Tuples run over its executions, in order."""

    loss: float
    """Its share of the batch's loss."""
    execution_losses: tuple[float, ...]
    """1/L_i sum_u l_u, before the division by B N."""
    sequence_ratios: tuple[float, ...]
    """s_i; 1.0 for an execution without targets."""
    masked: tuple[bool, ...]
    """m_i == 0."""
    tokens: int
    targets: int
    ratio_capped: int
    """Targets with rho_u above the cap."""
    loss_capped: int
    """Targets whose token loss was cut at the cap; they have no gradient."""
    gap_sum: float
    """Sum of |engine log-probability - trainer log-probability| over targets sampled at the version being trained."""
    gap_max: float
    gap_count: int
    entropy_sum: float | None = None
    """Entropy of the predicting distributions summed over targets, in nats, where it was asked for."""


def target_logprobs(logits: Tensor, rows: PackedRows) -> Tensor:
    """log pi_theta(y_u | c_u) of each target, float32 [T], from `logits [S, V]`.

    Target u is predicted by the logits at u-1, divided by the temperature that it was sampled with.
    """
    predicting = logits[rows.target_positions - 1].float() / rows.temperature[:, None]
    chosen = rows.tokens[rows.target_positions]
    return predicting.gather(1, chosen[:, None]).squeeze(1) - predicting.logsumexp(dim=-1)


@torch.no_grad()
def target_entropy(logits: Tensor, rows: PackedRows) -> float:
    """Sum over targets of the entropy, in nats, of the distribution that predicts it."""
    logp = torch.log_softmax(logits[rows.target_positions - 1].float() / rows.temperature[:, None], dim=-1)
    return float(-(logp.exp() * logp).sum())


def execution_objective(
    logprobs: Tensor, rows: PackedRows, terms: ObjectiveTerms, *, version: int, entropy_sum: float | None = None
) -> tuple[Tensor, ObjectiveStats]:
    """The micro-step's share of (6) and its statistics.

    `logprobs` is log pi_theta of each target, float [T], with gradient; `version` is the policy version being trained.
    Returns a scalar that `backward` may be called on (a zero that hangs on the graph where nothing is trained).
    """
    trainer = logprobs.detach().double()
    log_ratios = trainer - rows.behaviour_logprob.double()
    execution, counts, advantages = rows.target_execution, rows.target_counts, rows.advantages
    divisor = counts.clamp(min=1)

    # (5). Sums are in double: m_i is a threshold, and must not hang on the order of the targets.
    sequence_ratio = _per_execution(log_ratios, rows).div(divisor).exp()
    dropped = ((advantages > 0) & (sequence_ratio > terms.clip_high)) | (
        (advantages < 0) & (sequence_ratio < terms.clip_low)
    )
    ratio = log_ratios.exp()
    weight = ratio.clamp(max=terms.ratio_cap).to(logprobs.dtype)

    # (6)
    mask = (~dropped).to(logprobs.dtype)
    uncapped = -(mask * advantages)[execution] * weight * logprobs
    token_loss = uncapped.clamp(max=terms.loss_cap)
    share = 1.0 / (terms.groups * terms.executions * divisor.to(logprobs.dtype))
    loss = (token_loss * share[execution]).sum()

    gap = (trainer - rows.behaviour_logprob.double()).abs()[rows.token_version == version]
    return loss, ObjectiveStats(
        loss=float(loss.detach()),
        execution_losses=tuple((_per_execution(token_loss.detach().double(), rows) / divisor).tolist()),
        sequence_ratios=tuple(sequence_ratio.tolist()),
        masked=tuple(dropped.tolist()),
        tokens=rows.size,
        targets=int(logprobs.numel()),
        ratio_capped=int((ratio > terms.ratio_cap).sum()),
        loss_capped=int((uncapped.detach() > terms.loss_cap).sum()),
        gap_sum=float(gap.sum()),
        gap_max=float(gap.max()) if gap.numel() else 0.0,
        gap_count=int(gap.numel()),
        entropy_sum=entropy_sum,
    )


def _per_execution(values: Tensor, rows: PackedRows) -> Tensor:
    """Sum of target values by execution, [T] -> [E]."""
    return values.new_zeros(len(rows.executions)).index_add_(0, rows.target_execution, values)
