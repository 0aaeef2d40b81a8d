"""The life of an entity holds all that the log says of it, in order, and ends where nothing more can come."""

from __future__ import annotations

from pathlib import Path

import pytest

from replay.debugging.life import Life, entity_kind, life
from replay.debugging.moments import point
from replay.logfile import Log, read
from schemas.envelope import Event
from schemas.errors import ConfigError
from services.cli.app import app


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Log:
    path = tmp_path_factory.mktemp("log") / "small.gyre"
    assert app(["simulate", "small", "--set", "run.steps=6", "-o", str(path)]) == 0
    return read(Path(path))


@pytest.fixture(scope="module")
def events(log: Log) -> list[Event]:
    return list(log)


def cited(found: Life, title: str) -> list[str]:
    return next(([each.kind for each in c.cited] for c in found.chapters if c.title == title), [])


def moved(events: list[Event]) -> str:
    return next(each.entity for each in events if each.kind == "route.moved")


def test_an_execution_from_its_dispatch_to_its_batch(events: list[Event]) -> None:
    name = moved(events)
    found = life(events, name)
    titles = ["dispatch", "engines", "calls", "finish", "score", "trajectories", "micro-steps", "batch"]
    assert [each.title for each in found.chapters] == titles
    told = {each.seq for chapter in found.chapters for each in chapter.cited}
    assert told >= {each.seq for each in events if each.entity == name}
    assert cited(found, "engines") == ["execution.placed", "execution.started", "cell.role-transition", "route.moved"]
    assert cited(found, "micro-steps") == ["micro-step.enqueued", "micro-step.claimed", "micro-step.done"]
    assert cited(found, "batch") == [
        "batch.opened",
        "group.claimed",
        "batch.stepped",
        "group.consumed",
        "burst.ended",
    ]
    assert cited(found, "score")[-1] == "group.ready"
    for chapter in found.chapters:
        assert [each.seq for each in chapter.cited] == sorted(each.seq for each in chapter.cited)


def test_it_ends_where_nothing_more_can_come(events: list[Event]) -> None:
    name = moved(events)
    last = life(events, name).chapters[-1].cited[-1]
    read_to = []

    def reading() -> object:
        for each in events:
            read_to.append(each.seq)
            yield each

    assert life(reading(), name) == life(events, name)  # type: ignore[arg-type]
    assert read_to[-1] == last.seq < len(events)


def test_up_to_a_place(events: list[Event]) -> None:
    name = moved(events)
    move = next(each for each in events if each.kind == "route.moved")
    found = life(events, name, point(str(move.seq)))
    assert [each.title for each in found.chapters] == ["dispatch", "engines"]
    assert found.chapters[-1].cited[-1].seq == move.seq
    with pytest.raises(ConfigError, match=f"there is no execution {name} by 3"):
        life(events, name, point("3"))


def test_a_group_and_its_executions(events: list[Event]) -> None:
    found = life(events, "g-000003")
    assert [each.title for each in found.chapters] == [
        "dispatch",
        "executions",
        "rewards",
        "trajectories",
        "micro-steps",
        "batch",
    ]
    assert cited(found, "executions").count("execution.settled") == 4
    rewards = next(each.told for each in found.chapters if each.title == "rewards")
    assert [each.split(":")[0] for each in rewards] == [f"e-000003.{member:02d}" for member in range(4)]


def test_a_batch_and_its_cells(events: list[Event]) -> None:
    joins = next(
        each
        for each in events
        if each.kind == "cell.role-transition"
        and (each.data.target, each.data.phase, each.entity) == ("train", "decided", "cell-1")
    )
    opened = [each for each in events if each.kind == "batch.opened" and each.seq < joins.seq][-1]
    found = life(events, opened.entity)
    assert [each.title for each in found.chapters] == ["opening", "cells", "groups", "micro-steps", "batch"]
    assert cited(found, "cells")[0] == "cell.role-transition"
    assert cited(found, "groups") == ["group.claimed"] * 8
    said = next(each.told for each in found.chapters if each.title == "micro-steps")
    assert len(said) == 2 and said[0].startswith("cell-0 did ") and said[1].startswith("cell-1 did ")


def test_a_micro_step_and_its_rows(events: list[Event]) -> None:
    found = life(events, "m-000002.003")
    assert cited(found, "micro-steps") == ["micro-step.enqueued", "micro-step.claimed", "micro-step.done"]
    assert cited(found, "batch") == ["batch.opened", "batch.stepped", "burst.ended"]
    assert all(each.startswith("e-0000") for each in found.chapters[0].told)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("e-999999.00", "execution"),
        ("e-h000000.00", "execution"),
        ("g-999999", "group"),
        ("b-999999", "batch"),
        ("m-000001.999", "micro-step"),
    ],
)
def test_an_entity_that_the_log_does_not_know(events: list[Event], name: str, kind: str) -> None:
    with pytest.raises(ConfigError, match=rf"there is no {kind} {name}\n  -> the log has \S+ to \S+"):
        life(events, name)


@pytest.mark.parametrize("name", ["", "x", "e-12", "cell", "r-20260102-0304-5f3a", "e-000001.00 "])
def test_what_has_no_life_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is nothing that can be asked about"):
        entity_kind(name)
