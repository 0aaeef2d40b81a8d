"""The service with its real shell: seals become trees, outcomes and rows, also after a crash and with broken records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from sqlalchemy import text

from schemas import streams
from schemas.errors import EnvironmentMissing
from schemas.events import ExecutionDispatched, MeasurementClosed, MeasurementOpened
from schemas.ids import evaluation_id, group_id, held_out_id, measurement_id
from services.mesh.service import Context
from services.mesh.tree_codec import decode_tree
from services.trajectories.projection import rebuild
from services.trajectories.service import database_url, serve
from services.trajectories.store import Store
from tests.facts import scored
from tests.trajectories.mesh import Mesh
from tests.trajectories.trees import record


async def score(mesh: Mesh, execution: str, value: float) -> None:
    """Answers the evaluation as the evaluator would, once it is asked for."""
    asked = await mesh.wait("evaluation.requested", evaluation_id(execution, 1))
    data = scored(execution, value, digest=asked.data.workspace_digest, reference=asked.data.workspace)
    await mesh.say("evaluator", "evaluation.scored", asked.entity, data)


async def run_group(mesh: Mesh, index: int, scores: list[float]) -> list[str]:
    executions = await mesh.dispatch(index, len(scores))
    for execution, value in zip(executions, scores, strict=True):
        entries = [record(execution, 0), record(execution, 1, 0), record(execution, 2, 0, role="sub-agent")]
        stored = await mesh.record(execution, entries)
        await mesh.finish(execution)
        await mesh.seal(execution, stored)
        await score(mesh, execution, value)
    return executions


@pytest.mark.parametrize("mesh", ["memory", "nats"], indirect=True)
async def test_a_group_becomes_rows(mesh: Mesh) -> None:
    async with mesh.serving("trajectories", serve) as context:
        a, _ = await run_group(mesh, 0, [1.0, 0.0])
        materialized = await mesh.wait("group.materialized")
        frozen = await mesh.wait("execution.tree-frozen", a)
        assert frozen.id == f"seal-{a}.tree-frozen" and frozen.data.parents == [-1, 0, 0]
        tree = decode_tree(await mesh.bus.get_blob(streams.tree_blob(a, 1)))
        assert [node.call for node in tree.nodes] == [record(a, index).call for index in range(3)]
        rows = [row for row in materialized.data.rows if row.execution == a]
        assert [(row.leaf, row.targets, row.target_nodes) for row in rows] == [(1, 4, [0, 1]), (2, 2, [2])]
        body = await tree_at(context, a, materialized.seq)
        assert body["outcome"] == "valid" and body["reward"] == 1.0 and body["advantage"] > 0
        assert [node["role"] for node in body["nodes"]] == ["main", "main", "sub-agent"]
        assert [node["trainable_tokens"] for node in body["nodes"]] == [2, 2, 2]
        assert [row["target_nodes"] for row in body["rows"]] == [[0, 1], [2]]
        async with aiohttp.ClientSession() as http:
            for path, status in (("e-9/tree", 404), (f"{a}/tree?after=x", 400)):
                async with http.get(f"{context.health.url}/executions/{path}") as answer:
                    assert answer.status == status


async def tree_at(context: Context, execution: str, seq: int) -> dict[str, Any]:
    """The tree over HTTP, once the database holds LOG up to `seq`."""
    async with aiohttp.ClientSession() as http:
        async with http.get(f"{context.health.url}/executions/{execution}/tree?after={seq}") as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()


async def test_the_database_is_a_projection(mesh: Mesh, tmp_path: Path) -> None:
    async with mesh.serving("trajectories", serve) as context:
        for index in range(3):
            await run_group(mesh, index, [1.0, 0.0, 0.5])
        last = await mesh.wait("group.materialized", group_id(2))
        await tree_at(context, "e-000002.00", last.seq)
    store = Store(database_url(context), mesh.run)
    live = store.dump()
    assert [len(live[f"gyre_{name}"]) for name in ("groups", "executions", "nodes", "rows")] == [3, 9, 27, 18]
    fresh = Store(f"sqlite:///{tmp_path}/fresh.sqlite", mesh.run)
    await rebuild(mesh.bus, mesh.run, fresh)
    assert fresh.dump() == live
    await rebuild(mesh.bus, mesh.run, store)
    assert store.dump() == live
    for event in await mesh.events():  # everything a second time
        store.apply(event)
    assert store.dump() == live
    fresh.close()
    store.close()


async def test_after_a_crash_it_takes_up_what_was_sealed(mesh: Mesh) -> None:
    a, b = await mesh.dispatch(0, 2)
    async with mesh.serving("trajectories", serve):
        stored = await mesh.record(a, [record(a)])
        await mesh.finish(a)
        await mesh.seal(a, stored)
        await mesh.wait("execution.tree-frozen", a)
    stored = await mesh.record(b, [record(b)])
    await mesh.finish(b)
    await mesh.seal(b, stored)
    async with mesh.serving("trajectories", serve):
        await score(mesh, a, 1.0)
        await score(mesh, b, 0.0)
        await mesh.wait("group.materialized")
    kinds = [event.kind for event in await mesh.events() if event.owner == "trajectories"]
    assert kinds.count("execution.tree-frozen") == 2 == kinds.count("execution.settled")
    assert kinds.count("evaluation.requested") == 2


async def test_broken_records_exclude_the_execution(mesh: Mesh) -> None:
    executions = await mesh.dispatch(0, 4)
    a, b, c, d = executions
    async with mesh.serving("trajectories", serve) as context:
        for execution in executions:
            orphan = msgspec.structs.replace(record(execution), parent="c-nobody")
            stored = await mesh.record(execution, [orphan if execution == c else record(execution)])
            await mesh.finish(execution)
            if execution == b:
                stored *= 2
            await mesh.seal(execution, stored, digest="0" * 32 if execution == a else "")
        await score(mesh, d, 1.0)
        discarded = await mesh.wait("group.discarded")
        assert discarded.data.valid == 1
        for execution in (a, b, c):
            settled = await mesh.wait("execution.settled", execution)
            assert settled.data.outcome == "excluded" and "sealed" in settled.data.reason
        assert context.health.registry.get_sample_value("gyre_records_broken") == 3
        assert [each for each in executions if await mesh.bus.blob_exists(streams.tree_blob(each, 1))] == [d]


async def test_an_execution_without_a_call_is_scored(mesh: Mesh) -> None:
    executions = await mesh.dispatch(0, 2)
    async with mesh.serving("trajectories", serve):
        for execution in executions:
            await mesh.finish(execution, "harness_timeout")
            await mesh.seal(execution, [])
            await score(mesh, execution, 0.5)
        assert (await mesh.wait("group.materialized")).data.rows == []


async def test_a_database_of_another_version_fills_again(mesh: Mesh) -> None:
    async with mesh.serving("trajectories", serve) as context:
        await run_group(mesh, 0, [1.0, 0.0])
        await tree_at(context, "e-000000.00", (await mesh.wait("group.materialized")).seq)
    store = Store(database_url(context), mesh.run)
    live = store.dump()
    with store._begin() as db:
        db.execute(text("update gyre_projections set schema = 0"))
    store.close()
    async with mesh.serving("trajectories", serve) as context:
        await tree_at(context, "e-000000.00", (await mesh.wait("group.materialized")).seq)
    store = Store(database_url(context), mesh.run)
    assert store.dump() == live
    store.close()


def test_a_database_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentMissing, match=r"(?s)no/such.*trajectories\.database"):
        Store(f"sqlite:///{tmp_path}/no/such/file", "r-1")


async def test_a_held_out_execution_has_its_tree_and_its_tag(mesh: Mesh, tmp_path: Path) -> None:
    name, measurement = held_out_id(4, 0), measurement_id(4)
    async with mesh.serving("trajectories", serve) as context:
        await mesh.say("scheduler", "measurement.opened", measurement, MeasurementOpened(version=4, executions=[name]))
        dispatched = ExecutionDispatched(group="", member=0, task="h", measurement=measurement, task_digest="hd")
        await mesh.say("scheduler", "execution.dispatched", name, dispatched)
        stored = await mesh.record(name, [record(name, 0), record(name, 1, 0)])
        await mesh.finish(name)
        await mesh.seal(name, stored)
        await score(mesh, name, 0.5)
        await mesh.wait("execution.settled", name)
        closed = MeasurementClosed(version=4, mean=0.5, std=0.0, valid=1, placeholder=0, excluded=0, steps=4)
        seq = await mesh.say("scheduler", "measurement.closed", measurement, closed)
        body = await tree_at(context, name, seq)
    assert (body["group"], body["measurement"], body["reward"], body["advantage"]) == ("", measurement, 0.5, None)
    assert len(body["nodes"]) == 2 and body["rows"] == []
    store = Store(database_url(context), mesh.run)
    assert store.dump()["gyre_measurements"] == [(mesh.run, measurement, 4, 0.5, 0.0, 1, 0, 0)]
    fresh = Store(f"sqlite:///{tmp_path}/fresh.sqlite", mesh.run)
    await rebuild(mesh.bus, mesh.run, fresh)
    assert fresh.dump() == store.dump()
    fresh.close()
    store.close()
