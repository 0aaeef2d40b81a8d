"""Equations (5) and (6) against a slow transcription, and the invariances that the paper claims."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.micro_steps import MicroStep
from services.trainer.arrays import PackedRows, tensors_of
from services.trainer.objective import ObjectiveTerms, execution_objective, target_entropy, target_logprobs

TERMS = ObjectiveTerms(groups=3, executions=4)


def packed_rows(
    targets: list[tuple[int, float]],
    advantages: list[float],
    versions: list[int] | None = None,
    temperature: float = 1.0,
    tokens: list[int] | None = None,
) -> PackedRows:
    """`targets` are (execution, behaviour log-probability), each in a row of its own behind one token of context."""
    count = len(targets)
    tokens = tokens or [1] * count
    return tensors_of(
        MicroStep(
            micro_step="m-000001.000",
            batch="b-000001",
            cu_seqlens=np.arange(0, 2 * max(count, 1) + 1, 2, dtype="<i4").tobytes(),
            tokens=np.array([[0, token] for token in tokens] or [[0, 0]], "<i4").tobytes(),
            targets=np.array([[0, 1]] * count or [[0, 0]], "|u1").tobytes(),
            behaviour_logprob=np.array([[0, logprob] for _, logprob in targets] or [[0, 0]], "<f4").tobytes(),
            temperature=np.full(2 * max(count, 1), temperature, "<f4").tobytes(),
            token_version=np.repeat(np.array(versions or [0] * max(count, 1), "<i4"), 2).tobytes(),
            row_execution=np.array([execution for execution, _ in targets] or [0], "<i4").tobytes(),
            executions=tuple(f"e-{index:06d}.00" for index in range(len(advantages))),
            advantages=tuple(advantages),
            target_counts=tuple(sum(execution == e for execution, _ in targets) for e in range(len(advantages))),
        )
    )


def transcription(
    logprobs: list[float], targets: list[tuple[int, float]], advantages: list[float], terms: ObjectiveTerms
) -> tuple[float, list[float], list[float], list[bool]]:
    """(5) and (6) word by word: loss, its gradient by log pi_theta(y_u), s_i, masked."""
    loss, gradient, ratios, masked = 0.0, [0.0] * len(logprobs), [], []
    for execution, advantage in enumerate(np.asarray(advantages, np.float32).astype(float)):
        mine = [u for u, (owner, _) in enumerate(targets) if owner == execution]
        behaviour = {u: float(np.float32(targets[u][1])) for u in mine}
        rho = {u: math.exp(logprobs[u] - behaviour[u]) for u in mine}
        s = math.exp(sum(math.log(rho[u]) for u in mine) / len(mine)) if mine else 1.0
        m = 0 if (advantage > 0 and s > terms.clip_high) or (advantage < 0 and s < terms.clip_low) else 1
        ratios.append(s)
        masked.append(m == 0)
        for u in mine:
            capped = min(rho[u], terms.ratio_cap)
            full = -m * capped * advantage * logprobs[u]
            coefficient = 1 / (terms.groups * terms.executions) / len(mine)
            loss += coefficient * min(terms.loss_cap, full)
            gradient[u] = 0.0 if full > terms.loss_cap else coefficient * -m * capped * advantage
    return loss, gradient, ratios, masked


LOGPROB = st.floats(-12.0, 0.0)
SHIFT = st.one_of(st.floats(-0.02, 0.02), st.floats(-6.0, 6.0))


@settings(max_examples=300, deadline=None)
@given(
    drawn=st.lists(st.tuples(st.integers(0, 2), LOGPROB, SHIFT), max_size=14),
    advantages=st.lists(st.one_of(st.just(0.0), st.floats(-8.0, 8.0)), min_size=3, max_size=3),
    loss_cap=st.sampled_from([100.0, 4.0]),
)
def test_loss_gradient_and_masks_are_the_papers(
    drawn: list[tuple[int, float, float]], advantages: list[float], loss_cap: float
) -> None:
    terms = ObjectiveTerms(groups=3, executions=4, loss_cap=loss_cap)
    targets = [(execution, min(logprob - shift, 0.0)) for execution, logprob, shift in drawn]
    logprobs = torch.tensor([logprob for _, logprob, _ in drawn], dtype=torch.float64, requires_grad=True)
    loss, stats = execution_objective(logprobs, packed_rows(targets, advantages), terms, version=0)
    loss.backward()
    expected, gradient, ratios, masked = transcription(logprobs.tolist(), targets, advantages, terms)
    assert loss.item() == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx(gradient, rel=1e-6, abs=1e-9)
    assert stats.sequence_ratios == pytest.approx(ratios, rel=1e-9)
    assert list(stats.masked) == masked
    total = sum(stats.execution_losses) / (terms.groups * terms.executions)
    assert total == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(
    ("advantage", "log_ratio", "masked"),
    [
        (1.0, 0.006, True),
        (1.0, 0.004, False),
        (1.0, -0.9, False),
        (-1.0, -0.006, True),
        (-1.0, -0.004, False),
        (-1.0, 0.9, False),
        (0.0, 2.0, False),
    ],
)
def test_the_clip_mask_is_one_sided_and_shared(advantage: float, log_ratio: float, masked: bool) -> None:
    """One target far off, one on policy: the mask follows their mean and falls on both or on none."""
    rows = packed_rows([(0, -2.0), (0, -1.0)], [advantage])
    logprobs = torch.tensor([-2.0 + 2 * log_ratio, -1.0], dtype=torch.float64, requires_grad=True)
    loss, stats = execution_objective(logprobs, rows, TERMS, version=0)
    loss.backward()
    assert stats.masked == (masked,)
    assert stats.sequence_ratios[0] == pytest.approx(math.exp(log_ratio), rel=1e-6)
    assert logprobs.grad is not None
    trained = [value != 0.0 for value in logprobs.grad.tolist()]
    assert trained == [not masked and advantage != 0.0] * 2


def test_a_ratio_above_the_cap_weighs_as_the_cap_without_gradient() -> None:
    rows = packed_rows([(0, -9.0), (0, -1.0)], [-1.0])
    logprobs = torch.tensor([-1.0, -1.0], dtype=torch.float64, requires_grad=True)
    loss, stats = execution_objective(logprobs, rows, TERMS, version=0)
    loss.backward()
    assert stats.ratio_capped == 1
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([5.0 / 24, 1.0 / 24])


def test_a_token_loss_above_the_cap_counts_as_the_cap_and_pulls_nothing() -> None:
    rows = packed_rows([(0, -60.0), (0, -1.0)], [2.0])
    logprobs = torch.tensor([-60.0, -1.0], dtype=torch.float64, requires_grad=True)
    loss, stats = execution_objective(logprobs, rows, TERMS, version=0)
    loss.backward()
    assert stats.loss_capped == 1
    assert loss.item() == pytest.approx((100.0 + 2.0) / 24)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, -2.0 / 24])


@settings(max_examples=50, deadline=None)
@given(order=st.permutations(range(6)))
def test_which_row_carries_a_target_changes_nothing(order: list[int]) -> None:
    targets = [(0, -1.0), (0, -2.0), (0, -0.5), (1, -3.0), (1, -1.5), (1, -0.1)]
    values = [-1.001, -2.0, -0.502, -2.99, -1.5, -0.1]
    results = []
    for permutation in (list(range(6)), order):
        logprobs = torch.tensor([values[u] for u in permutation], dtype=torch.float64, requires_grad=True)
        rows = packed_rows([targets[u] for u in permutation], [1.0, -1.0])
        loss, stats = execution_objective(logprobs, rows, TERMS, version=0)
        loss.backward()
        assert logprobs.grad is not None
        gradient = dict(zip(permutation, logprobs.grad.tolist(), strict=True))
        results.append((loss.item(), [gradient[u] for u in range(6)], stats.masked, stats.sequence_ratios))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-12)
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-12)
    assert results[0][2] == results[1][2]
    assert results[0][3] == pytest.approx(results[1][3], rel=1e-12)


def test_an_execution_without_targets_contributes_zero() -> None:
    rows = packed_rows([], [1.0])
    logits = torch.randn(2, 8, requires_grad=True)
    loss, stats = execution_objective(target_logprobs(logits, rows), rows, TERMS, version=0)
    loss.backward()
    assert loss.item() == 0.0
    assert stats.sequence_ratios == (1.0,)
    assert stats.execution_losses == (0.0,)
    assert logits.grad is not None
    assert not logits.grad.any()


def test_the_gap_counts_only_tokens_of_the_version_being_trained() -> None:
    rows = packed_rows([(0, -1.0), (0, -2.0), (0, -3.0)], [1.0], versions=[7, 6, 7])
    logprobs = torch.tensor([-1.25, -9.0, -2.5], dtype=torch.float64)
    _, stats = execution_objective(logprobs, rows, TERMS, version=7)
    assert (stats.gap_sum, stats.gap_max, stats.gap_count) == pytest.approx((0.75, 0.5, 2))
    _, stats = execution_objective(logprobs, rows, TERMS, version=8)
    assert (stats.gap_sum, stats.gap_max, stats.gap_count) == (0.0, 0.0, 0)


def test_logits_are_divided_by_the_temperature_and_read_one_place_before() -> None:
    rows = packed_rows([(0, -1.0), (0, -1.0)], [1.0], temperature=0.5, tokens=[3, 5])
    logits = torch.randn(4, 8, dtype=torch.float64)
    expected = torch.log_softmax(logits / 0.5, -1)
    assert torch.allclose(
        target_logprobs(logits, rows), torch.stack([expected[0, 3], expected[2, 5]]).float(), atol=1e-5
    )
    entropy = -(expected.exp() * expected).sum(-1)
    assert target_entropy(logits, rows) == pytest.approx(float(entropy[0] + entropy[2]), rel=1e-5)


def test_statistics_count(make_row: Any, pack: Callable[..., MicroStep]) -> None:
    rows = tensors_of(
        pack(
            [
                make_row(execution="e-000000.00", tokens=[1, 2, 3], targets=[1, 2]),
                make_row(execution="e-000000.01", tokens=[4, 5], targets=[1]),
            ],
            {"e-000000.00": 1.0, "e-000000.01": -1.0},
        )
    )
    _, stats = execution_objective(torch.full((3,), -1.0), rows, TERMS, version=0)
    assert (stats.tokens, stats.targets, stats.masked) == (5, 3, (False, False))
