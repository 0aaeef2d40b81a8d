"""From events to the document: every row of a small log, and the document against the scene of a run with losses."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from replay.invariants.folding import apply
from replay.invariants.scene import Scene
from replay.simulator.run import Simulation
from replay.timeline import Document, Tracks, fold
from replay.timeline.model import ROLES, split
from replay.timeline.thinning import LEAST_TELLING, thin
from schemas import events as e
from schemas.envelope import Event
from schemas.units import GapStats, check
from tests.facts import fact
from tests.replay.recorded import recorded
from tests.replay.simulator.small import small
from tests.scheduler.world import small_config

HELD = check("waterlevel (2)", 4, "<=", 0)
ALLOWED = check("waterlevel (2)", 0, "<=", 0)
LISTS = ("names", "checks", "cells", "says", "series")


def _log() -> list[Event]:
    """One cell, one execution, one micro-step: from the start to the first publication."""
    move = {"source": "rollout", "target": "train", "epoch": 1}
    gap = GapStats()
    said: list[tuple[str, str, str, Any]] = [
        ("operator", "run.started", "r-1", e.RunStarted(seed=7, config=small_config(), tasks=[], code="1.0")),
        ("rollout", "cell.joined", "cell-0", e.CellJoined(index=0, capacity=4, url="", engine="x", version=0, capabilities=[])),
        (
            "scheduler",
            "group.dispatched",
            "g-000000",
            e.GroupDispatched(task="t", task_digest="", reason="initial", burst="u-000001", version=0, executions=["e-000000.00"]),
        ),
        ("scheduler", "execution.dispatched", "e-000000.00", e.ExecutionDispatched(group="g-000000", member=0, task="t")),
        ("scheduler", "execution.placed", "e-000000.00", e.ExecutionPlaced(cell="cell-0", epoch=0, attempt=0, reason=[ALLOWED])),
        ("harness", "execution.started", "e-000000.00", e.ExecutionStarted(attempt=0)),
        ("scheduler", "cell.held", "cell-0", e.CellHeld(reason=[HELD])),
        (
            "harness",
            "execution.finished",
            "e-000000.00",
            e.ExecutionFinished(attempt=0, reason="completed", exit_code=0, seconds=3661, workspace="", workspace_digest=""),
        ),
        ("trajectories", "group.ready", "g-000000", e.GroupReady(rewards=[], mean=0.5, std=0.25)),
        ("scheduler", "cell.role-transition", "cell-0", e.CellRoleTransition(phase="decided", reason=[ALLOWED], **move)),
        ("trainer", "cell.role-transition", "cell-0", e.CellRoleTransition(phase="acquired", seconds=2, **move)),
        ("scheduler", "cell.role-transition", "cell-0", e.CellRoleTransition(phase="completed", **move)),
        (
            "scheduler",
            "batch.opened",
            "b-000001",
            e.BatchOpened(step=1, version=0, burst="u-000001", final=True, groups=1, members=["cell-0"]),
        ),
        ("packer", "group.claimed", "g-000000", e.GroupClaimed(batch="b-000001")),
        ("packer", "micro-step.enqueued", "m-000001.000", e.MicroStepEnqueued(batch="b-000001", index=0, blob="", tokens=9, rows=[])),
        ("trainer", "micro-step.claimed", "m-000001.000", e.MicroStepClaimed(batch="b-000001", cell="cell-0", epoch=1)),
        (
            "trainer",
            "micro-step.done",
            "m-000001.000",
            e.MicroStepDone(
                batch="b-000001", cell="cell-0", loss=0.0, tokens=9, targets=5, executions=1, masked=0, gap=gap, seconds=1.5
            ),
        ),
        ("scheduler", "burst.ended", "u-000001", e.BurstEnded(version=1, stays=[], reason=[])),
    ]
    return [
        fact(index, owner, kind, entity, data, time_us=1_000_000 + 2000 * index, causation=index - 1)
        for index, (owner, kind, entity, data) in enumerate(said, start=1)
    ]


def test_every_row_of_a_small_log() -> None:
    document = fold(_log())
    rows = {key: [(seq, value) for _, seq, value in found] for key, found in split(document).items()}
    name = {each: index for index, each in enumerate(document.names)}
    role = ROLES.index
    assert rows == {
        ("burst", -1): [(1, 0)],
        ("version", -1): [(1, 0)],
        ("paused", -1): [(1, 0)],
        ("ready", -1): [(1, 0), (9, 1), (14, 0)],
        ("supply", -1): [(1, 0), (9, 1), (14, 0)],
        ("batch", -1): [(1, -1), (13, name["b-000001"])],
        ("role", 0): [(2, role("rollout")), (10, role("leaving")), (12, role("training"))],
        ("epoch", 0): [(2, 0), (10, 1)],
        ("version", 0): [(2, 0)],
        ("micro_step", 0): [(2, -1), (16, name["m-000001.000"]), (17, -1)],
        ("C_R", -1): [(2, 4), (10, 0)],
        ("d", -1): [(4, 1)],
        ("p", -1): [(4, 0), (6, 1)],
        ("f", -1): [(4, 0), (8, 1)],
        ("held_out", -1): [(4, 0)],
        ("load", 0): [(5, 1), (8, 0)],
        ("held", -1): [(7, 7), (10, 0)],
        ("because", 0): [(10, 10)],
        ("claimed", -1): [(13, 0), (14, 1)],
        ("enqueued", -1): [(13, 0), (15, 1)],
        ("done", -1): [(13, 0), (17, 1)],
        ("published", -1): [(18, 1)],
    }


def test_events_have_their_place_cell_cause_and_words() -> None:
    document = fold(_log(), title="one cell")
    events, says = document.events, document.says
    assert (document.title, document.run, document.code, document.first, document.last) == ("one cell", "r-1", "1.0", 1, 18)
    assert (events.seq, events.t) == (list(range(1, 19)), list(range(0, 36, 2)))
    assert events.cause == list(range(18))
    assert [says[each].kind for each in events.says] == [event.kind for event in _log()]
    assert [document.names[each] for each in events.entity] == [event.entity for event in _log()]
    assert [seq for seq, cell in zip(events.seq, events.cell, strict=True) if cell == 0] == [2, 5, 7, 10, 11, 12, 16, 17]
    notes = dict(zip(events.seq, events.note, strict=True))
    assert notes[5] == "on cell-0, epoch 0"
    assert notes[7] == "waterlevel (2): 4 <= 0 does not hold"
    assert notes[8] == "completed after 1 h 01 min"
    assert notes[11] == "acquired to train, epoch 1, after 2 s"
    decided = {says[each].kind for each in events.says if says[each].decision}
    assert {"execution.placed", "cell.held", "group.claimed"} <= decided
    assert not {"execution.started", "micro-step.done"} & decided


def test_reasons_are_the_decisions_own_checks() -> None:
    document = fold(_log())
    r = document.reasons
    found = [
        (seq, document.checks[rule], left, op, right, holds)
        for seq, rule, left, op, right, holds in zip(r.seq, r.rule, r.left, r.op, r.right, r.holds, strict=True)
    ]
    assert found == [
        (5, "waterlevel (2)", 0.0, "<=", 0.0, 1),
        (7, "waterlevel (2)", 4.0, "<=", 0.0, 0),
        (10, "waterlevel (2)", 0.0, "<=", 0.0, 1),
    ]


@pytest.mark.parametrize("world", [{}, {"lose": 0.1, "lose_cells": 0.05}, {"restore": 0.2}], ids=["plain", "losses", "restored"])
def test_after_every_event_the_document_says_what_the_scene_says(world: dict[str, float]) -> None:
    log = recorded(seed=3, **world)
    rows = {key: dict((seq, value) for _, seq, value in found) for key, found in split(fold(log)).items()}
    now: dict[tuple[str, int], int] = {}
    cells: list[str] = []
    scene = Scene()
    for event in log:
        apply(scene, event)
        if event.kind == "cell.joined" and event.entity not in cells:
            cells.append(event.entity)
        now |= {key: found[event.seq] for key, found in rows.items() if event.seq in found}
        if not cells or not scene.d:
            continue
        told = [now[name, -1] for name in ("d", "p", "f", "ready", "C_R", "version", "burst")]
        C_R = scene.served_capacity()
        assert told == [scene.d, scene.p, scene.f, len(scene.ready), C_R, scene.version, scene.bursts], event
        for index, name in enumerate(cells):
            cell = scene.cells[name]
            assert now.get(("load", index), 0) == cell.load, event
            assert now["epoch", index] == cell.epoch
            assert (ROLES[now["role", index]] in ("rollout", "away")) == (cell.place == "serving")
            assert now["micro_step", index] == -1 or cell.place == "training"


def test_a_step_is_made_once_however_often_it_is_said() -> None:
    log = recorded(seed=3, lose=0.1, lose_cells=0.05)
    said = [event.seq for event in log if event.kind == "batch.stepped"]
    told = fold(log).values("step")
    assert [step for *_, step in told] == list(range(1, 9))
    assert {seq for _, seq, _ in told} <= set(said)
    assert len(said) > len(told), "the log says no step twice: choose another seed"


def test_parts_appended_are_the_whole() -> None:
    log = recorded(seed=1)
    whole, tracks = fold(log, limit=None), Tracks(limit=None)
    joined: dict[str, Any] | None = None
    for index, event in enumerate(log):
        tracks.see(event)
        if index % 97 == 0 or index == len(log) - 1:
            joined = _appended(joined, msgspec.to_builtins(tracks.take()))
    assert joined == msgspec.to_builtins(whole)


def _appended(whole: dict[str, Any] | None, part: dict[str, Any]) -> dict[str, Any]:
    """As a page does it."""
    if whole is None:
        return part
    grown = {name: whole[name] + part[name] for name in LISTS}
    tables = {
        name: {column: whole[name][column] + part[name][column] for column in part[name]}
        for name in ("events", "changes", "reasons")
    }
    return {**part, **grown, **tables}


def _simulated(limit: int | None = None) -> tuple[Document, int]:
    simulation = Simulation(small(), seed=1, keep=True)
    simulation.run()
    return fold(simulation.events, limit=limit), len(simulation.events)


def test_what_is_too_much_for_a_page_is_left_out_and_said() -> None:
    whole, count = _simulated()
    few, _ = _simulated(limit=600)
    assert len(whole.events.seq) == count and whole.left_out == {}
    assert len(few.events.seq) <= 600
    assert len(few.events.seq) + sum(few.left_out.values()) == count
    assert list(few.left_out) == [kind for kind in LEAST_TELLING if kind in few.left_out]
    kept = {few.says[each].kind for each in few.events.says}
    assert kept.isdisjoint(few.left_out)
    assert {"cell.role-transition", "batch.stepped", "burst.ended", "cell.held"} <= kept
    assert few.changes == whole.changes
    assert set(few.reasons.seq) <= set(few.events.seq)
    assert len(few.names) == len(whole.names) and few.names.count("") > 100
    assert all(few.names[each] for each in few.events.entity)
    assert all(few.names[value] for *_, value in few.values("micro_step", 0) if value >= 0)


def test_counts_are_made_coarse_and_roles_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = _simulated()
    coarse, _ = _simulated()
    monkeypatch.setattr("replay.timeline.thinning.CHANGES", 200)
    monkeypatch.setattr("replay.timeline.thinning._INTERVALS", 50)
    thin(coarse, 10**9)
    assert coarse.resolution == whole.end // 50
    exact, rough = split(whole), split(coarse)
    for key in exact:
        if key[0] in ("role", "step", "published", "because"):
            assert rough[key] == exact[key]
    assert len(rough["d", -1]) <= 51 < len(exact["d", -1])
    assert rough["d", -1][-1] == exact["d", -1][-1]
    assert set(rough["f", -1]) <= set(exact["f", -1])
