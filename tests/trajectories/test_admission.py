"""Equation (4) over any tree, and advantages over any group."""

from __future__ import annotations

import math
import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.events import ExecutionTreeFrozen
from services.trajectories.core.admission import admit, path_to
from services.trajectories.core.advantages import STD_FLOOR, advantage, baseline
from tests.trajectories.trees import frozen_counts

E = "e-000003.01"


def flat(trainable: list[int], classes: list[int], *, shared: int = 0) -> ExecutionTreeFrozen:
    """A root with `shared` trainable tokens and one leaf for each entry."""
    count = len(trainable)
    return ExecutionTreeFrozen(
        attempt=1,
        blob="tree/x",
        digest="d",
        parents=[-1] + [0] * count,
        tokens=[shared + 1] + [n + 1 for n in trainable],
        trainable=[shared, *trainable],
        leaves=list(range(1, count + 1)),
        classes=classes,
    )


@given(tree=frozen_counts(), limit=st.integers(1, 8), seed=st.integers(0, 1000))
def test_admission_keeps_its_invariants(tree: ExecutionTreeFrozen, limit: int, seed: int) -> None:
    rows = admit(tree, execution=E, limit=limit, seed=seed)
    assert rows == admit(tree, execution=E, limit=limit, seed=seed)
    assert [row.draw for row in rows] == list(range(len(rows)))
    assert len(rows) <= limit
    masked: set[int] = set()
    kind = dict(zip(tree.leaves, tree.classes, strict=True))
    for row in rows:
        path = path_to(tree.parents, row.leaf)
        left = {
            leaf: sum(tree.trainable[node] for node in path_to(tree.parents, leaf) if node not in masked)
            for leaf in tree.leaves
        }
        assert kind[row.leaf] == min(kind[leaf] for leaf in tree.leaves if left[leaf])
        assert row.target_nodes == [node for node in path if node not in masked and tree.trainable[node]]
        assert row.targets == sum(tree.trainable[node] for node in row.target_nodes) == left[row.leaf] > 0
        assert row.tokens == sum(tree.tokens[node] for node in path)
        masked.update(path)
    if len(rows) < limit:
        assert all(node in masked or not count for node, count in enumerate(tree.trainable))


def test_leaves_are_drawn_in_proportion_to_unmasked_targets() -> None:
    weights = [10, 20, 30, 40]
    draws = 4000
    tree = flat(weights, [0, 0, 0, 0])
    seen = Counter(admit(tree, execution=E, limit=1, seed=seed)[0].leaf for seed in range(draws))
    chi2 = sum((seen[i + 1] - draws * w / 100) ** 2 / (draws * w / 100) for i, w in enumerate(weights))
    assert chi2 < 16.27, seen  # 3 degrees of freedom, p = 0.001; the seeds are fixed, so this cannot flicker


def test_counts_are_renewed_after_each_draw() -> None:
    """With a shared prefix of 90 both leaves weigh 91 and 99 at first; the second row trains only what is left."""
    tree = flat([1, 9], [0, 0], shared=90)
    rows = admit(tree, execution=E, limit=5, seed=1)
    assert [row.targets for row in rows] in ([91, 9], [99, 1])
    assert rows[1].target_nodes == [rows[1].leaf]


def test_a_lower_class_waits_for_the_higher() -> None:
    tree = flat([1, 1000, 1000, 1000], [0, 3, 2, 1])
    assert [row.leaf for row in admit(tree, execution=E, limit=5, seed=0)] == [1, 4, 3, 2]


def test_a_chain_of_a_thousand_nodes_is_quick() -> None:
    size = 1000
    tree = ExecutionTreeFrozen(
        attempt=1,
        blob="b",
        digest="d",
        parents=list(range(-1, size - 1)),
        tokens=[9] * size,
        trainable=[3] * size,
        leaves=[size - 1],
        classes=[0],
    )
    began = time.perf_counter()
    (row,) = admit(tree, execution=E, limit=5, seed=0)
    assert row.targets == 3 * size and row.tokens == 9 * size
    assert time.perf_counter() - began < 0.5


@given(st.lists(st.floats(0, 1), min_size=2, max_size=16))
def test_advantages_are_centred_and_scaled(rewards: list[float]) -> None:
    against = baseline(rewards)
    plain = [advantage(reward, against, "mean") for reward in rewards]
    scaled = [advantage(reward, against, "mean_std") for reward in rewards]
    assert math.fsum(plain) == pytest.approx(0, abs=1e-9)
    assert against.std == pytest.approx(math.sqrt(math.fsum(a * a for a in plain) / len(plain)), abs=1e-9)
    assert scaled == pytest.approx([a / (against.std + STD_FLOOR) for a in plain])
    assert baseline(rewards[::-1]) == against


@given(st.floats(0, 1), st.integers(2, 16))
def test_equal_rewards_have_no_advantage_at_all(reward: float, count: int) -> None:
    against = baseline([reward] * count)
    assert advantage(reward, against, "mean_std") == 0.0 == advantage(reward, against, "mean")
