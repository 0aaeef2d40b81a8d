"""Why decisions are taken: all say it where the run has the flag, and without it they are taken in the bytes of before."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest

from replay.timeline.notes import note, reasons
from schemas import events as e
from schemas.envelope import Decision
from schemas.flags import HELD, NEWEST
from schemas.kinds import KINDS
from services.mesh.codec import encode_data
from services.mesh.decider import Driver
from services.scheduler.decider import Scheduler
from tests.facts import fact
from tests.scheduler.world import World, small_config

MANY: dict[str, Any] = {
    "lose": 0.05,
    "late": 0.3,
    "fail_groups": 0.2,
    "operator": 0.02,
    "lose_cells": 0.02,
    "restore": 0.02,
}
"""Everything that makes the scheduler decide something else than in a quiet run."""
MEASURED = {"eval__path": "held-out", "eval__every": 2, "eval__executions": 3}
FIELDS = {
    "burst.opened": {"index", "steps", "first_step", "version"},
    "burst.ended": {"version", "reason", "stays"},
    "group.dispatched": {"task", "task_digest", "reason", "burst", "version", "executions"},
    "group.consumed": {"batch", "version_dispatched", "version_trained", "staleness"},
    "execution.dispatched": {"group", "member", "task", "measurement", "task_digest"},
    "execution.placed": {"cell", "epoch", "attempt", "reason"},
    "route.moved": {"source", "target", "epoch", "kv"},
    "batch.opened": {"step", "version", "burst", "final", "groups", "members"},
    "batch.join-closed": {"members", "epochs"},
    "cell.held": {"reason"},
    "cell.role-transition": {"phase", "source", "target", "epoch", "reason", "seconds", "version"},
    "measurement.opened": {"version", "executions"},
    "measurement.closed": {"version", "mean", "std", "valid", "placeholder", "excluded", "steps", "late"},
    "timer.set": {"purpose", "due_us"},
    "run.finished": {"steps", "reason"},
}
"""What decisions said before the flag."""
ADDED = {"steps that follow", "none of them withdrawn"}
"""Checks of `burst.ended` that came with it; the cells that return repeat them."""


def worlds(**more: Any) -> list[World]:
    found = []
    for strategy in ("elastic", "colocate", "async"):
        for seed in range(4):
            trainable = 2 if strategy == "async" else 3
            config = small_config(cells__trainable=trainable, scheduler__strategy=strategy, **MEASURED)
            found.append(World(config, seed=seed, **MANY, **more))
            found[-1].run()
    return found


def bare(decision: Decision) -> tuple[str, str, dict[str, Any]]:
    """What it says, as JSON, in the fields of before and with the checks of before."""
    data = msgspec.json.decode(encode_data(decision.data))
    if decision.kind == "cell.role-transition" and data["phase"] == "completed":
        data["reason"] = []
    elif isinstance(data.get("reason"), list):
        data["reason"] = [each for each in data["reason"] if each["rule"] not in ADDED]
    return decision.kind, decision.entity, {name: data[name] for name in FIELDS[decision.kind]}


def test_every_decision_says_why() -> None:
    decided: Counter[str] = Counter()
    for world in worlds():
        for decision in world.decisions:
            decided[decision.kind] += 1
            found = reasons(fact(1, "scheduler", decision.kind, decision.entity, decision.data))
            if decision.kind == "execution.dispatched":
                assert not found, "its group's is said just before"
            else:
                assert found, decision
    assert decided.keys() == {name for name, kind in KINDS.items() if kind.owners.get("scheduler") == "decision"}


def test_without_the_flag_the_same_is_decided_in_the_bytes_of_before() -> None:
    """The same facts are fed to a run that was begun before there was the flag."""
    for world in worlds():
        before: Driver[Any] = Driver(Scheduler())
        for event in world.log:
            if event.kind == "run.started":
                event = msgspec.structs.replace(event, data=msgspec.structs.replace(event.data, flags=[HELD]))
            decisions = before.feed(event)
            assert [bare(each) for each in decisions] == [bare(each) for each in world.per_input[event.seq]]
            for each in decisions:
                assert msgspec.json.decode(encode_data(each.data)).keys() == FIELDS[each.kind]


def test_a_run_that_was_begun_without_it_goes_on_without_it() -> None:
    assert HELD in NEWEST
    for world in worlds(flags=[HELD]):
        assert not any(getattr(each.data, "checks", []) for each in world.decisions)
        assert {each.data.reason for each in world.decisions if each.kind == "route.moved"} <= {""}


def test_a_route_says_what_took_its_engine_away() -> None:
    moves = [each.data for world in worlds() for each in world.decisions if each.kind == "route.moved"]
    assert {each.reason for each in moves} == {"transition", "withdrawn", "lost"}


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("", "cell-1 to cell-2, prefix recomputed"),
        ("transition", "cell-1 leaves for training: to cell-2, prefix recomputed"),
        ("withdrawn", "cell-1 is withdrawn: to cell-2, prefix recomputed"),
        ("lost", "cell-1 is lost: to cell-2, prefix recomputed"),
    ],
)
def test_in_words(reason: Any, said: str) -> None:
    moved = e.RouteMoved(source="cell-1", target="cell-2", epoch=0, kv="recomputed", reason=reason)
    assert note(fact(1, "scheduler", "route.moved", "e-000001.00", moved)) == said


def test_the_last_burst_says_why_nobody_stays() -> None:
    roomy = World(small_config(cells__capacity=200, scheduler__phi=2.0), seed=3)
    roomy.run()
    ended = [each.data for each in roomy.decisions if each.kind == "burst.ended"]
    assert [each.reason[0].rule for each in ended if not each.stays] == ["steps that follow"]
    assert all(each.holds for each in ended[-1].reason[1:]), "it would have stayed"


def test_a_fixed_split_says_who_was_withdrawn() -> None:
    config = small_config(cells__count=4, cells__trainable=2, scheduler__strategy="async", scheduler__phi=1.5)
    world = World(config, seed=3)
    world.start()
    while not world.state.version:
        world.step()
    world.say("operator", "cell.withdrawn", "cell-1", e.CellWithdrawn(by="test"))
    while world.step():
        pass
    ended = next(each.data for each in world.decisions if each.kind == "burst.ended")
    assert ended.stays == ["cell-0"]
    assert [(each.rule, each.holds) for each in ended.reason] == [("fixed split", True), ("none of them withdrawn", False)]
