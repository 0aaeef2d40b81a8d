"""Strategies: who leaves for training when, and who comes back."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from schemas.errors import ConfigError
from schemas.units import Check
from tests.scheduler.world import World, small_config


def transitions(world: World, target: str) -> list[tuple[str, int, list[Check]]]:
    """Cells that were sent to `target`, the input on which they were, and why."""
    return [
        (decision.entity, seq, decision.data.reason)
        for seq, decisions in world.per_input.items()
        for decision in decisions
        if decision.kind == "cell.role-transition"
        and decision.data.phase == "decided"
        and decision.data.target == target
    ]


def run(**overrides: Any) -> World:
    world = World(small_config(**overrides), seed=3)
    world.run()
    assert world.finished
    return world


@pytest.mark.parametrize("streaming", [True, False])
def test_colocated_cells_leave_and_return_together(streaming: bool) -> None:
    world = run(cells__trainable=3, scheduler__strategy="colocate", scheduler__phi=0.0, scheduler__streaming=streaming)
    left = Counter(seq for _, seq, _ in transitions(world, "train"))
    assert set(left.values()) == {3} and len(left) == world.config.steps // world.config.scheduler.mu
    back = Counter(seq for _, seq, _ in transitions(world, "rollout"))
    assert set(back.values()) == {3}
    for _, _, reason in transitions(world, "train"):
        level = reason[0]
        assert (level.rule, level.left, level.right) == ("waterlevel (2)", 0.0, 0.0), "nobody serves meanwhile"
        assert ("groups of the burst mu B" in [each.rule for each in reason]) == (not streaming)
    assert not any(d.data.stays for d in world.decisions if d.kind == "burst.ended")


def test_a_colocated_run_of_one_cell() -> None:
    """A row of the ablation that switches all nodes at once."""
    world = run(cells__count=1, cells__capacity=24, scheduler__strategy="colocate", scheduler__streaming=False)
    assert {name for name, _, _ in transitions(world, "train")} == {"cell-0"}


def test_a_fixed_split_trains_from_the_start_and_never_returns() -> None:
    world = run(cells__count=4, cells__trainable=2, scheduler__strategy="async", scheduler__mu=1, scheduler__phi=1.5)
    assert [name for name, _, _ in transitions(world, "train")] == ["cell-0", "cell-1"]
    assert transitions(world, "rollout") == []
    placed = {d.data.cell for d in world.decisions if d.kind == "execution.placed"}
    assert placed == {"cell-2", "cell-3"}
    assert not any(d.kind == "route.moved" for d in world.decisions)
    assert all(d.data.stays == ["cell-0", "cell-1"] for d in world.decisions if d.kind == "burst.ended")
    assert [members for _, members in world.joined][-1] == ["cell-0", "cell-1"]


def test_a_split_without_rollout_is_refused() -> None:
    with pytest.raises(ConfigError, match="nobody would ever serve"):
        small_config(cells__trainable=3, scheduler__strategy="async")
