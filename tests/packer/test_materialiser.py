"""The arrays of a micro-step, token by token, and the packer's service on a bus beside the trajectories' own."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest

from schemas.envelope import Decision
from schemas.errors import LogBroken
from schemas.events import BatchOpened, MicroStepClaimed
from schemas.ids import batch_id, evaluation_id, group_id
from schemas.micro_steps import DTYPES, MicroStep, decode, validate
from schemas.records import FrozenTree, VersionSpan
from schemas.units import Reward, RowPlan
from services.mesh.decider import Driver
from services.mesh.shell import as_decision
from services.packer.core.packing import Packer
from services.packer.core.state import State
from services.packer.materialiser import Materialiser, build
from services.packer.service import serve
from services.trajectories.core.admission import admit
from services.trajectories.service import serve as serve_trajectories
from services.trajectories.tree import counts_of, freeze
from tests.facts import scored
from tests.trajectories.mesh import Mesh
from tests.trajectories.trees import record

A, B = "e-000000.00", "e-000000.01"


def array(micro_step: MicroStep, field: str) -> list[float]:
    return np.frombuffer(getattr(micro_step, field), DTYPES[field]).tolist()


def tree_of(execution: str) -> FrozenTree:
    """A root with two children, the second sampled under two versions."""
    second = msgspec.structs.replace(
        record(execution, 2, 0, inputs=1, role="sub-agent"),
        versions=[VersionSpan(version=3, start=0, end=1), VersionSpan(version=4, start=1, end=2)],
    )
    return freeze(execution, 1, [record(execution), record(execution, 1, 0, inputs=2, outputs=1, version=3), second])


def reward(execution: str, advantage: float) -> Reward:
    return Reward(execution=execution, attempt=1, outcome="valid", reward=0.0, advantage=advantage)


def rows_of(tree: FrozenTree) -> list[RowPlan]:
    return admit(counts_of(tree, blob="b", digest="d"), execution=tree.execution, limit=5, seed=0)


def test_rows_token_by_token() -> None:
    tree = tree_of(A)
    made = build("m-000001.000", "b-000001", rows_of(tree), trees={A: tree}, rewards={A: reward(A, 0.5)})
    validate(made)
    assert array(made, "cu_seqlens") == [0, 8, 16]
    root, main, sub = [1000, 1001, 1002, 1500, 1501], [2000, 2001, 2500], [3000, 3500, 3501]
    assert array(made, "tokens") == root + main + root + sub
    # The shared prefix is a target in the first row only; in the second it is context like any other.
    assert array(made, "targets") == [0, 0, 0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 1]
    assert array(made, "behaviour_logprob") == [0, 0, 0, -0.125, -0.25, 0, 0, -0.125] + [0] * 6 + [-0.125, -0.25]
    assert array(made, "token_version") == [-1, -1, -1, 0, 0, -1, -1, 3] + [-1] * 6 + [3, 4]
    assert array(made, "temperature") == [0.5] * 5 + [1.5] * 3 + [0.5] * 5 + [2.5] * 3
    assert array(made, "row_execution") == [0, 0]
    assert (made.executions, made.advantages, made.target_counts) == ((A,), (0.5,), (5,))


def test_executions_keep_their_advantages_and_counts() -> None:
    trees = {A: tree_of(A), B: tree_of(B)}
    rows = rows_of(trees[B]) + rows_of(trees[A])[:1]
    made = build("m", "b", rows, trees=trees, rewards={A: reward(A, 1.0), B: reward(B, -1.0)})
    validate(made)
    assert (made.executions, made.advantages, made.target_counts) == ((B, A), (-1.0, 1.0), (5, 3))
    assert array(made, "row_execution") == [0, 0, 1]


def test_a_tree_that_is_not_the_announced_one_is_refused() -> None:
    tree = tree_of(A)
    other = msgspec.structs.replace(tree, nodes=[msgspec.structs.replace(node, input_ids=[1]) for node in tree.nodes])
    with pytest.raises(LogBroken, match="admitted were 8 and 3"):
        build("m", "b", rows_of(tree), trees={A: other}, rewards={A: reward(A, 0.0)})


async def fill_groups(mesh: Mesh, count: int) -> None:
    """Groups of two scored executions each, through the trajectories service."""
    for index in range(count):
        for execution, score in zip(await mesh.dispatch(index, 2), (1.0, 0.0), strict=True):
            entries = [record(execution), record(execution, 1, 0), record(execution, 2, 0, role="sub-agent")]
            stored = await mesh.record(execution, entries)
            await mesh.finish(execution)
            await mesh.seal(execution, stored)
            asked = await mesh.wait("evaluation.requested", evaluation_id(execution, 1))
            await mesh.say("evaluator", "evaluation.scored", asked.entity, scored(execution, score))
        await mesh.wait("group.materialized", group_id(index))


async def open_batch(mesh: Mesh, step: int, groups: int) -> None:
    data = BatchOpened(step=step, version=0, burst="u-1", final=False, groups=groups, members=["cell-0"])
    await mesh.say("scheduler", "batch.opened", batch_id(step), data)


async def claim(mesh: Mesh, micro_step: str, batch: str) -> None:
    data = MicroStepClaimed(batch=batch, cell="cell-0", epoch=1)
    await mesh.say("trainer", "micro-step.claimed", micro_step, data)


async def check_log(mesh: Mesh) -> None:
    """Blobs lie where events say, can be made again to the byte, and the decider decides the same again."""
    events = await mesh.events()
    again = Materialiser(bus=mesh.bus, run=mesh.run)
    seen: list[tuple[str, int]] = []
    for event in events:
        if event.kind == "micro-step.enqueued":
            blob = await mesh.bus.get_blob(event.data.blob)
            micro_step = decode(blob)
            validate(micro_step)
            assert micro_step.micro_step == event.entity and micro_step.token_count == event.data.tokens
            await again(Decision(kind=event.kind, entity=event.entity, data=event.data))
            assert await mesh.bus.get_blob(event.data.blob) == blob
            seen += [(row.execution, row.draw) for row in event.data.rows]
    assert len(set(seen)) == len(seen) and again.padding == 0
    driver: Driver[State] = Driver(Packer())
    for event in events:
        if driver.is_input(event):
            recorded = [as_decision(e) for e in events if e.owner == "packer" and e.causation == event.seq]
            mismatch, _ = driver.compare(event, recorded)
            assert mismatch is None, mismatch


@pytest.mark.parametrize("mesh", ["memory", "nats"], indirect=True)
async def test_ready_groups_become_claimable_micro_steps(mesh: Mesh) -> None:
    async with mesh.serving("trajectories", serve_trajectories), mesh.serving("packer", serve) as context:
        await open_batch(mesh, 1, groups=2)
        await fill_groups(mesh, 2)
        first = await mesh.wait("micro-step.enqueued")
        await claim(mesh, first.entity, "b-000001")
        closed = await mesh.wait("batch.stream-closed")
        assert closed.data.groups == [group_id(0), group_id(1)] and closed.data.micro_steps == 2
        assert context.health.registry.get_sample_value("gyre_packer_padding_tokens") == 0
        assert context.health.registry.get_sample_value("gyre_packer_tokens") == 2 * 2 * 20
    await check_log(mesh)


async def test_a_packer_that_comes_back_goes_on_where_it_stood(mesh: Mesh) -> None:
    async with mesh.serving("trajectories", serve_trajectories):
        await fill_groups(mesh, 4)
    for step in (1, 2):
        await open_batch(mesh, step, groups=2)
        async with mesh.serving("packer", serve):
            await mesh.wait("batch.stream-closed", batch_id(step))
    await check_log(mesh)


async def test_a_crash_between_claim_and_micro_step_is_finished(mesh: Mesh) -> None:
    """The group's claim was said, its micro-step was not: the next process says exactly the rest."""
    async with mesh.serving("trajectories", serve_trajectories):
        await fill_groups(mesh, 1)
    await open_batch(mesh, 1, groups=1)
    # A bus on which the blob cannot be put: the first packer dies before `enqueued`.
    context = await mesh.context("packer")
    context.bus.put_blob = _refuse  # type: ignore[method-assign]
    with pytest.raises(LogBroken, match="disk full"):
        await asyncio.wait_for(serve(context), 20)
    await context.health.stop()
    await context.bus.close()
    assert [event.kind for event in await mesh.events() if event.owner == "packer"] == [
        "service.joined",
        "group.claimed",
    ]
    async with mesh.serving("packer", serve):
        await mesh.wait("batch.stream-closed")
    said = [event.kind for event in await mesh.events() if event.owner == "packer"]
    decided = [kind for kind in said if not kind.startswith("service")]
    assert decided == ["group.claimed", "micro-step.enqueued", "batch.stream-closed"]
    await check_log(mesh)


async def _refuse(name: str, data: bytes) -> str:
    raise LogBroken("disk full", where=name)
