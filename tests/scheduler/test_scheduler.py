"""The scheduler's decider against a world that speaks in any order: the paper's invariants hold, and it ends."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from schemas import events as e
from services.mesh.decider import Driver
from services.scheduler.core import equations as eq
from services.scheduler.core.state import State, cell_count, served_capacity
from services.scheduler.decider import Scheduler
from tests.scheduler.watch import Watch
from tests.scheduler.world import RUN, World, small_config

_PLAIN: dict[str, Any] = {
    "capacity": 4,
    "cells": 2,
    "rho": 0.5,
    "fail": 0.2,
    "trainable": 2,
    "operator": 0.0,
    "lose": 0.0,
    "every": 0,
    "measured": 1,
    "lose_cells": 0.0,
    "restore": 0.0,
    "strategy": "elastic",
    "streaming": True,
    "pool": 0,
    "oversample": 0,
}
"""A run of two small cells in which executions fail and nothing else happens."""


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    capacity=st.integers(4, 40),
    cells=st.integers(2, 4),
    mu=st.sampled_from([1, 2, 4]),
    phi=st.sampled_from([0.0, 0.5, 1.5]),
    rho=st.sampled_from([0.5, 1.0]),
    fail=st.sampled_from([0.0, 0.2]),
    trainable=st.integers(1, 4),
    operator=st.sampled_from([0.0, 0.02]),
    lose=st.sampled_from([0.0, 0.1]),
    every=st.sampled_from([0, 2, 5]),
    measured=st.integers(1, 20),
    lose_cells=st.sampled_from([0.0, 0.02]),
    restore=st.sampled_from([0.0, 0.02]),
    strategy=st.sampled_from(["elastic", "colocate", "async"]),
    streaming=st.booleans(),
    pool=st.sampled_from([0, 0, 1, 2]),
    oversample=st.sampled_from([0, 0, 1, 3]),
)
@example(**{**_PLAIN, "seed": 0, "mu": 1, "phi": 0.0})  # the last engine left while a group could still be discarded
@example(  # more held-out executions than fit while any cell trains
    **{**_PLAIN, "seed": 1, "mu": 2, "phi": 0.5, "operator": 0.02, "lose": 0.1, "every": 2, "measured": 20}
)
def test_every_run_ends_and_keeps_the_invariants(
    seed: int,
    capacity: int,
    cells: int,
    mu: int,
    phi: float,
    rho: float,
    fail: float,
    trainable: int,
    operator: float,
    lose: float,
    every: int,
    measured: int,
    lose_cells: float,
    restore: float,
    strategy: str,
    streaming: bool,
    pool: int,
    oversample: int,
) -> None:
    trainable = min(trainable, cells - (strategy == "async" and not pool))
    serving = (cells - trainable * (strategy == "async")) * capacity + 5 * pool
    config = small_config(
        scheduler__oversample=min(oversample, serving - 4),
        cells__pool=pool,
        cells__pool_capacity=5,
        cells__capacity=capacity,
        cells__count=cells,
        cells__trainable=trainable,
        scheduler__strategy=strategy,
        scheduler__streaming=streaming,
        scheduler__mu=mu,
        scheduler__phi=phi,
        scheduler__rho_min=rho,
        eval__path="held-out",
        eval__every=every,
        eval__executions=measured,
    )
    world = World(
        config,
        seed=seed,
        fail_groups=fail,
        operator=operator,
        lose=lose,
        late=0.5,
        lose_cells=lose_cells,
        restore=restore,
    )
    Watch(world)
    world.run()
    assert world.finished, f"stuck: {world.state!r}"
    counts = [d for d in world.decisions if getattr(d.data, "batch", d.entity) not in world.undone]
    consumed = [d for d in counts if d.kind == "group.consumed"]
    assert len(consumed) == config.steps * config.scheduler.B
    assert max(Counter(d.entity for d in consumed).values()) == 1
    placed = [(d.entity, d.data.attempt) for d in world.decisions if d.kind == "execution.placed"]
    assert len(placed) == len(set(placed)), "each attempt is placed once"
    sizes = {len(d.data.executions) for d in world.decisions if d.kind == "group.dispatched"}
    assert sizes == {config.scheduler.group_size}
    per_batch = Counter(d.data.batch for d in consumed)
    assert set(per_batch.values()) == {config.scheduler.B}
    assert {batch for batch, _ in world.joined} - set(world.undone) == {d.data.batch for d in consumed}
    assert len(per_batch) == config.steps
    opened = [d.entity for d in world.decisions if d.kind == "measurement.opened"]
    assert opened == [d.entity for d in world.decisions if d.kind == "measurement.closed"]
    assert not every or {opened[0], opened[-1]} == {"h-000000", f"h-{config.steps:06d}"}
    for _, members in world.joined:
        assert members == [f"cell-{index}" for index in range(len(members))]


def test_satellites_join_batches_in_flight_and_all_return() -> None:
    """With room to spare and every group at hand, the prefix grows inside a batch and is sent back after the burst."""
    config = small_config(
        steps=24, cells__count=4, cells__capacity=40, cells__trainable=3, scheduler__phi=0.0, scheduler__tau_s=0.1
    )
    world = World(config, seed=11)
    Watch(world)
    world.run()
    sizes = [len(members) for _, members in world.joined]
    assert max(sizes) > 1
    opened = {batch: len(data.members) for batch, data in world.opened.items()}
    assert any(len(members) > opened[batch] for batch, members in world.joined), "somebody joined in flight"
    decided = [d for d in world.decisions if d.kind == "cell.role-transition" and d.data.phase == "decided"]
    away = Counter(d.entity for d in decided if d.data.target == "train")
    back = Counter(d.entity for d in decided if d.data.target == "rollout")
    for name, count in away.items():
        assert count - back[name] in (0, 1), "whoever left came back, but for the end of the run"


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_the_decider_is_deterministic_and_survives_a_snapshot(seed: int) -> None:
    config = small_config(cells__trainable=3, cells__capacity=24, eval__path="held-out", eval__every=2)
    world = World(config, seed=seed, fail_groups=0.1, lose=0.05, lose_cells=0.02, restore=0.02)
    world.run()
    again: Driver[State] = Driver(Scheduler())
    for index, event in enumerate(world.log):
        assert again.feed(event) == world.per_input[event.seq]
        if index == len(world.log) // 2:
            saved = again.snapshot()
            again = Driver(Scheduler())
            again.restore(saved)
    assert again.snapshot() == world.driver.snapshot()


@pytest.mark.parametrize(("phi", "mu"), [(0.5, 2), (0.5, 4), (1.5, 1), (0.0, 2), (1.0, 2)])
def test_mean_staleness_is_the_papers_identity(phi: float, mu: int) -> None:
    steps = 24 * mu
    config = small_config(steps=steps, scheduler__phi=phi, scheduler__mu=mu, cells__capacity=16)
    world = World(config, seed=7)
    world.run()
    B = config.scheduler.B
    consumed = [d.data.staleness for d in world.decisions if d.kind == "group.consumed"]
    whole_bursts = consumed[4 * mu * B :]
    assert sum(whole_bursts) / len(whole_bursts) == pytest.approx(eq.mean_staleness(phi=phi, mu=mu), abs=0.06)


def test_a_withdrawn_cell_empties_and_a_paused_run_places_nothing() -> None:
    world = World(small_config(), seed=4)
    world.start()
    while world.state.cells.get("cell-2") is None or world.state.cells["cell-2"].load == 0:
        world.step()
    world.say("operator", "run.paused", RUN, e.RunPaused(by="test"))
    placed = sum(d.kind == "execution.placed" for d in world.decisions)
    world.say("operator", "cell.withdrawn", "cell-2", e.CellWithdrawn(by="test"))
    while world.state.cells["cell-2"].load and world.step():
        pass
    assert world.state.cells["cell-2"].load == 0
    assert sum(d.kind == "execution.placed" for d in world.decisions) == placed
    world.say("operator", "run.resumed", RUN, e.RunResumed(by="test"))
    world.say("operator", "cell.withdrawn", "cell-0", e.CellWithdrawn(by="test"))
    assert not world.state.cells["cell-0"].withdrawn, "the core cannot be left out"
    while world.step():
        pass
    assert world.finished


def test_a_paused_run_ends_no_burst() -> None:
    """What runs ends, what can be trained is; then nothing more happens until the run goes on."""
    world = World(small_config(steps=2), seed=4)
    world.start()
    while not any(d.kind == "batch.opened" for d in world.decisions):
        world.step()
    while world.state.queue:
        world.step()
    world.say("operator", "run.paused", RUN, e.RunPaused(by="test"))
    while world.busy:
        world.step()
    assert world.state.burst.done == world.state.burst.steps == 2
    assert not world.finished
    assert {"burst.ended", "run.finished"}.isdisjoint(d.kind for d in world.decisions)
    resumed = [d.kind for d in world.say("operator", "run.resumed", RUN, e.RunResumed(by="test"))]
    assert resumed == ["burst.ended", "run.finished"]


def test_a_lost_execution_starts_again_in_its_slot() -> None:
    world = World(small_config(), seed=2)
    Watch(world)
    world.start()
    while not world.state.p:
        world.step()
    name, running = next((n, each) for n, each in world.state.executions.items() if each.status == "running")
    cell, lost = running.cell, e.ExecutionLost(attempt=0, reason="test")
    [again] = world.say("harness", "execution.lost", name, lost)
    assert (again.kind, again.entity, again.data.cell, again.data.attempt) == ("execution.placed", name, cell, 1)
    assert [check.rule for check in again.data.reason] == ["its slot is held"]
    assert world.say("harness", "execution.lost", name, lost) == [], "said twice"
    late = e.ExecutionFinished(
        attempt=0, reason="completed", exit_code=0, seconds=1.0, workspace="w", workspace_digest="d"
    )
    f = world.state.f
    world.say("harness", "execution.finished", name, late)
    assert world.state.f == f, "what an old attempt says counts no more"
    # A paused run places nothing: the execution waits, and an end that it meets meanwhile counts.
    world.say("operator", "run.paused", RUN, e.RunPaused(by="test"))
    assert world.say("harness", "execution.lost", name, e.ExecutionLost(attempt=1, reason="test")) == []
    [resumed] = [d for d in world.say("operator", "run.resumed", RUN, e.RunResumed(by="test")) if d.entity == name]
    assert (resumed.kind, resumed.data.attempt) == ("execution.placed", 2)


def test_decisions_carry_both_sides_of_their_inequality() -> None:
    world = World(small_config(), seed=1)
    world.run()
    joined = [
        d.data
        for d in world.decisions
        if d.kind == "cell.role-transition" and d.data.phase == "decided" and d.data.target == "train"
    ]
    assert joined
    for data in joined:
        assert [check.rule for check in data.reason] == ["waterlevel (2)", "supply rho_min B"]
        assert all(check.holds for check in data.reason)
    ended = [d.data for d in world.decisions if d.kind == "burst.ended"]
    assert all(data.reason[-1].rule == "core retention (3)" for data in ended)


def test_what_keeps_the_next_cell_back_is_said_when_it_changes() -> None:
    world = World(small_config(cells__trainable=3), seed=1)
    world.run()
    held = [
        d
        for d in world.decisions
        if d.kind == "cell.held" or (d.kind == "cell.role-transition" and d.data.phase == "decided")
    ]
    said = [next(c.rule for c in d.data.reason if not c.holds) if d.kind == "cell.held" else "" for d in held]
    assert {"waterlevel (2)", "supply rho_min B", "supply for tau"} <= set(said)
    for before, after in itertools.pairwise(zip((d.entity for d in held), said, strict=True)):
        assert before != after or not after[1], "the same is not said twice"


def test_the_core_stays_when_the_next_burst_fits_without_it() -> None:
    """With room for everything and supply at hand, equation (3) keeps the core in training."""
    roomy = World(small_config(cells__capacity=200, scheduler__phi=2.0, scheduler__rho_min=0.5), seed=3)
    roomy.run()
    assert any(d.data.core_stays for d in roomy.decisions if d.kind == "burst.ended")
    tight = World(small_config(cells__capacity=7), seed=3)
    tight.run()
    assert not any(d.data.core_stays for d in tight.decisions if d.kind == "burst.ended")


def test_equations_on_numbers() -> None:
    assert eq.capacity(C_s=4, K=8, k=3, C_e=10) == 54
    assert eq.startable(d=10, p=4, f=1, a=2, C_R=6) == 1
    assert eq.startable(d=10, p=4, f=1, a=2, C_R=2) == 0
    assert eq.waterlevel_allows(w=20, C_R=30, C_e=10).holds
    assert not eq.waterlevel_allows(w=21, C_R=30, C_e=10).holds
    assert eq.core_retention(w=4, mu=2, N=4, B=2, C_s=0, K=3, C_e=10).holds
    assert not eq.core_retention(w=5, mu=2, N=4, B=2, C_s=0, K=3, C_e=10).holds
    assert not eq.supply(ready=9, need=1, rho_min=0.5, B=4).holds


def test_capacity_counts_only_serving_cells() -> None:
    world = World(small_config(), seed=5)
    world.start()
    assert served_capacity(world.state) == 0
    while world.pending:
        owner, kind, entity, data = world.pending.pop(0)
        if kind == "cell.joined":
            world.say(owner, kind, entity, data)
            break
    assert served_capacity(world.state) == 8


def test_cells_that_are_added_count_and_may_train_where_all_do() -> None:
    config = small_config(cells__trainable=3, cells__capacity=200, scheduler__phi=2.0)
    world = World(config, seed=3)
    world.start()
    world.say("operator", "cell.added", "cell-3", e.CellAdded(by="test"))
    assert cell_count(world.state) == 4
    joined = e.CellJoined(index=3, capacity=200, url="", engine="scripted", version=0, capabilities=[])
    for service in ("rollout", "trainer"):
        world.pending.append((service, "service.joined", f"{service}-cell-3", e.ServiceJoined(url="", pid=0)))
    world.say("rollout", "cell.joined", "cell-3", joined)
    while world.step():
        pass
    assert world.finished
    stays = [d.data for d in world.decisions if d.kind == "burst.ended"]
    assert all(each.reason[-1].right == 3 * 200 for each in stays), "K - 1 cells beside the core"
    assert max(len(members) for _, members in world.joined) == 4
    assert config.cells.trainers(2) == 5
    assert small_config(cells__trainable=2).cells.trainers(2) == 2
