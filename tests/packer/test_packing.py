"""The packer's decider: what is said when, and what holds over any order of events."""

from __future__ import annotations

import inspect
import random
import re
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.envelope import Decision
from schemas.ids import batch_id, execution_id, group_id, group_of
from services.mesh.decider import Driver
from services.packer.core import packing
from services.packer.core.packing import Packer, fill_share
from services.packer.core.state import Bundle, State
from tests.packer.world import World, groups_of


def kinds(decisions: list[Decision]) -> list[str]:
    return [decision.kind for decision in decisions]


def test_a_batch_of_two_groups() -> None:
    world = World()
    world.dispatch(0)
    world.dispatch(1)
    assert world.open(1, groups=2) == []
    first = world.ready(0, [[40], [20, 10], [35]])
    # Nothing waits for a cell, so the first micro-step leaves although another group could still fill it up.
    assert kinds(first) == ["group.claimed", "micro-step.enqueued"]
    assert first[1].data.tokens == 75 and first[1].entity == "m-000001.000" and first[1].data.index == 0
    assert first[1].data.blob == "micro-step/m-000001.000"
    last = world.ready(1, [[90], [], [30]])
    assert kinds(last) == ["group.claimed", "micro-step.enqueued"]
    closed = world.claim("m-000001.000", "b-000001")
    assert kinds(closed) == ["micro-step.enqueued", "batch.stream-closed"]
    assert closed[1].data.micro_steps == 3 and closed[1].data.groups == [group_id(0), group_id(1)]
    assert world.state.batches == [] and world.state.supplies == {}


def test_a_poor_fill_is_kept_back_while_the_window_can_grow() -> None:
    world = World(ahead=3)
    for index in range(3):
        world.dispatch(index)
    world.open(1, groups=3)
    assert kinds(world.ready(0, [[60], [60], [60]])) == ["group.claimed", "micro-step.enqueued"]
    assert kinds(world.ready(1, [[30], [20]])) == ["group.claimed", "micro-step.enqueued", "micro-step.enqueued"]
    assert [step.data.tokens for step in world.of("micro-step.enqueued")] == [60, 90, 80]
    world.claim("m-000001.000", "b-000001")
    world.claim("m-000001.001", "b-000001")
    assert kinds(world.ready(2, [[10]])) == ["group.claimed", "micro-step.enqueued", "batch.stream-closed"]


def test_without_streaming_a_burst_waits_for_all_of_its_groups() -> None:
    world = World(mu=2, streaming=False)
    for index in range(4):
        world.dispatch(index)
    world.open(1, groups=2)
    for index in range(3):
        assert world.ready(index, [[40]]) == [], "four groups are two steps"
    assert kinds(world.ready(3, [[40]]))[:2] == ["group.claimed", "group.claimed"]
    world.claim("m-000001.000", "b-000001")
    world.step(1)
    # The second step's groups are there: it begins at once.
    assert kinds(world.open(2, groups=2, version=1))[0] == "group.claimed"


def test_a_batch_that_was_opened_before_the_core_went_back_and_is_heard_after_it_gets_nothing() -> None:
    world = World()
    for index in range(2):
        world.dispatch(index)
        world.ready(index, [[40]])
    world.open(1, groups=2)
    world.claim("m-000001.000", "b-000001")
    world.step(1)
    world.restore(0)
    assert world.open(2, groups=2, version=1) == []
    assert {each.data.batch for each in world.open(3, groups=2) if each.kind == "group.claimed"} == {"b-000003"}


def test_kept_back_until_a_cell_would_starve() -> None:
    world = World(ahead=2)
    world.dispatch(0)
    world.dispatch(1)
    world.open(1, groups=2)
    world.ready(0, [[90], [50]])
    assert world.waiting() == ["m-000001.000"]
    said = world.claim("m-000001.000", "b-000001")
    assert kinds(said) == ["micro-step.enqueued"] and said[0].data.tokens == 50


def test_oldest_version_first_then_group_id() -> None:
    world = World(reorder_groups=1, ahead=9)
    for index, version in enumerate([2, 1, 1, 0]):
        world.dispatch(index, version)
        world.ready(index, [[80]])
    world.open(1, groups=3)
    assert [decision.entity for decision in world.of("group.claimed")] == [group_id(3), group_id(1), group_id(2)]


def test_a_group_is_claimed_just_before_its_first_row_leaves() -> None:
    world = World(ahead=1, reorder_groups=2)
    world.dispatch(0)
    world.dispatch(1)
    world.ready(0, [[100]])
    world.ready(1, [[100]])
    assert kinds(world.open(1, groups=2)) == ["group.claimed", "micro-step.enqueued"]
    assert kinds(world.claim("m-000001.000", "b-000001")) == [
        "group.claimed",
        "micro-step.enqueued",
        "batch.stream-closed",
    ]


def test_groups_without_rows_count_and_a_batch_may_be_empty() -> None:
    world = World()
    for index in range(2):
        world.dispatch(index)
        world.ready(index, [[], []])
    assert kinds(world.open(1, groups=2)) == ["group.claimed", "group.claimed", "batch.stream-closed"]
    assert world.of("batch.stream-closed")[0].data.micro_steps == 0


def test_a_long_execution_gets_a_micro_step_of_its_own() -> None:
    world = World(ahead=9)
    world.dispatch(0)
    world.ready(0, [[80, 90], [50], [40]])
    world.open(1, groups=1)
    assert [step.data.tokens for step in world.of("micro-step.enqueued")] == [170, 90]
    assert fill_share(world.state) == 260 / 270


def test_a_released_micro_step_waits_again() -> None:
    world = World(ahead=1)
    world.dispatch(0)
    world.ready(0, [[90], [90], [90]])
    world.open(1, groups=1)
    world.claim("m-000001.000", "b-000001")
    assert world.waiting() == ["m-000001.001"]
    world.release("m-000001.000", "b-000001")
    assert world.claim("m-000001.001", "b-000001") == []
    assert kinds(world.claim("m-000001.000", "b-000001")) == ["micro-step.enqueued", "batch.stream-closed"]


def test_a_batch_opened_early_waits_for_the_stream_of_the_one_before() -> None:
    world = World(ahead=1)
    for index in range(2):
        world.dispatch(index)
        world.ready(index, [[90], [90]])
    world.open(1, groups=1)
    assert world.open(2, groups=1) == []
    assert kinds(world.claim("m-000001.000", "b-000001")) == [
        "micro-step.enqueued",
        "batch.stream-closed",
        "group.claimed",
        "micro-step.enqueued",
    ]


sizes = st.lists(st.lists(st.integers(1, 70), max_size=3), min_size=2, max_size=5)


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    groups=st.lists(sizes, min_size=2, max_size=9),
    per_batch=st.integers(1, 3),
    reorder=st.integers(1, 3),
    ahead=st.integers(1, 4),
)
def test_every_row_once_in_any_order(
    seed: int, groups: list[list[list[int]]], per_batch: int, reorder: int, ahead: int
) -> None:
    rng = random.Random(seed)
    world = World(reorder_groups=reorder, ahead=ahead)
    batches = len(groups) // per_batch
    unready = list(range(len(groups)))
    for index in unready:
        world.dispatch(index, version=index // 2)
    opened = 0
    snapshot_at = rng.randrange(1, 25)
    for turn in range(10_000):
        if turn == snapshot_at:
            other: Driver[State] = Driver(Packer())
            other.restore(world.driver.snapshot())
            world.driver = other
        if len(world.of("batch.stream-closed")) == batches:
            break
        choices = []
        if unready:
            choices.append("ready")
        if opened < batches and len(world.of("batch.stream-closed")) == opened:
            choices.append("open")
        if world.waiting():
            choices += ["claim", "claim", "again"]
        if len(world.log) > 3:
            choices.append("duplicate")
        match rng.choice(choices):
            case "ready":
                index = unready.pop(rng.randrange(len(unready)))
                world.ready(index, groups[index])
            case "open":
                opened += 1
                world.open(opened, per_batch)
            case "claim":
                world.claim(rng.choice(world.waiting()), batch_id(opened))
            case "again":
                name = rng.choice(world.waiting())
                world.claim(name, batch_id(opened))
                world.release(name, batch_id(opened))
            case "duplicate":
                old = rng.choice(world.log)
                # What cells say about a micro-step is no fact of its own to repeat: saying it again is another claim.
                if not old.kind.startswith("micro-step"):
                    world.say(old.owner, old.kind, old.entity, old.data)
        for batch in world.state.batches:
            held = {group_of(bundle.execution) for group in batch.claimed for bundle in _left(world.state, group)}
            assert len(held) <= reorder
    closed = world.of("batch.stream-closed")
    assert len(closed) == batches and all(len(set(end.data.groups)) == per_batch for end in closed)
    claims = Counter(decision.entity for decision in world.of("group.claimed"))
    assert set(claims.values()) <= {1} and sum(claims.values()) == batches * per_batch
    packed = Counter((row.execution, row.draw) for step in world.of("micro-step.enqueued") for row in step.data.rows)
    expected = {
        (execution_id(index, member), draw)
        for index, rows in enumerate(groups)
        if group_id(index) in claims
        for member, lengths in enumerate(rows)
        for draw in range(len(lengths))
    }
    assert packed == dict.fromkeys(expected, 1)
    claimed: set[str] = set()
    for decision in world.decisions:
        if decision.kind == "group.claimed":
            claimed.add(decision.entity)
        if decision.kind == "micro-step.enqueued":
            executions = {row.execution for row in decision.data.rows}
            assert decision.data.tokens == sum(row.tokens for row in decision.data.rows)
            assert decision.data.tokens <= 100 or len(executions) == 1
            assert groups_of(decision) <= claimed
    where: dict[str, set[str]] = {}
    for decision in world.of("micro-step.enqueued"):
        for row in decision.data.rows:
            where.setdefault(row.execution, set()).add(decision.entity)
    assert all(len(names) == 1 for names in where.values())
    replayed: Driver[State] = Driver(Packer())
    assert [decision for event in world.log for decision in replayed.feed(event)] == world.decisions
    assert replayed.snapshot() == world.driver.snapshot()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    groups=st.lists(sizes, min_size=4, max_size=8),
    per_batch=st.integers(1, 2),
    mu=st.integers(1, 3),
    restore=st.floats(0, 0.3),
)
def test_undone_batches_are_packed_again(
    seed: int, groups: list[list[list[int]]], per_batch: int, mu: int, restore: float
) -> None:
    """The core begins again from any version that isn't older than the published one, in the middle of whatever: in
    the batches that count, every row is in one micro-step."""
    rng = random.Random(seed)
    world = World(ahead=rng.randint(1, 3))
    for index, rows in enumerate(groups):
        world.dispatch(index, version=index // 3)
        world.ready(index, rows)
    version = published = opened = 0
    began: dict[str, int] = {}
    gone: set[str] = set()
    steps = len(groups) // per_batch
    while version < steps:
        opened += 1
        batch = batch_id(opened)
        began[batch] = version
        world.open(opened, per_batch, version)
        undone = False
        while not undone and batch not in {each.entity for each in world.of("batch.stream-closed")}:
            world.claim(rng.choice(world.waiting()), batch)
            undone = version > published and rng.random() < restore
        if not undone:
            version += 1
            world.step(opened, version)
            if version % mu == 0 and rng.random() < 0.8:
                published = version
                world.publish(version)
            undone = version > published and rng.random() < restore
        if undone:
            version = rng.randint(published, version - 1)
            gone |= {name for name, before in began.items() if before >= version}
            world.restore(version)
    counts = {each.entity: each.data.groups for each in world.of("batch.stream-closed") if each.entity not in gone}
    assert len(counts) == steps
    consumed = [group for taken in counts.values() for group in taken]
    assert len(set(consumed)) == len(consumed) == steps * per_batch
    steps_of = [each.data for each in world.of("micro-step.enqueued") if each.data.batch in counts]
    packed = Counter((row.execution, row.draw) for data in steps_of for row in data.rows)
    expected = {
        (execution_id(index, member), draw)
        for index, rows in enumerate(groups)
        if group_id(index) in consumed
        for member, lengths in enumerate(rows)
        for draw in range(len(lengths))
    }
    assert packed == dict.fromkeys(expected, 1)
    assert len(world.state.taken) <= version - published + 1
    replayed: Driver[State] = Driver(Packer())
    assert [decision for event in world.log for decision in replayed.feed(event)] == world.decisions


def _left(state: State, group: str) -> list[Bundle]:
    supply = state.supplies.get(group)
    return supply.bundles or [] if supply else []


def test_typical_lengths_fill_micro_steps_well() -> None:
    """Executions of 2 to 60 % of T in groups of 8, cells that keep up: the fill is measured, not assumed."""
    rng = random.Random(5)
    world = World(T=16384, ahead=2)
    for index in range(32):
        world.dispatch(index, count=8)
        world.ready(index, [[rng.randrange(300, 9800)] for _ in range(8)])
    world.open(1, groups=32)
    while world.waiting():
        world.claim(world.waiting()[0], "b-000001")
    assert world.of("batch.stream-closed")
    assert fill_share(world.state) > 0.88, world.state


def test_every_kind_that_changes_the_state_is_looked_at() -> None:
    names = set(re.findall(r"\be\.(\w+)\(\)", inspect.getsource(Packer.evolve)))
    assert names == {kind.__name__ for kind in packing._CONCERNS}
