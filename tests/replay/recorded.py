"""Logs for the replayer's and checker's tests: a scheduler against its scripted world, written down as a stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from replay.logfile import Manifest
from replay.logwriter import LogWriter
from schemas import events as e
from schemas.envelope import Event
from schemas.ids import decision_id
from services.mesh import codec
from services.mesh.bus import Stored
from tests.facts import fact
from tests.scheduler.world import RUN, World, small_config


def recorded(
    *, seed: int = 0, lose: float = 0.0, lose_cells: float = 0.0, restore: float = 0.0, **overrides: Any
) -> list[Event]:
    """A whole run of the scheduler in its world: each input, and after it the decisions taken on it."""
    world = World(
        small_config(eval__path="held-out", **overrides), seed=seed, lose=lose, lose_cells=lose_cells, restore=restore
    )
    world.run()
    events: list[Event] = []
    moved: dict[int, int] = {}
    for each in world.log:
        seq = moved[each.seq] = len(events) + 1
        data = each.data
        if isinstance(data, e.CellLost):
            data = msgspec.structs.replace(data, process=moved[data.process])
        events.append(msgspec.structs.replace(each, seq=seq, id=f"fact-{seq}", data=data))
        for index, decision in enumerate(world.per_input[each.seq]):
            events.append(
                Event(
                    seq=len(events) + 1,
                    time_us=each.time_us,
                    kind=decision.kind,
                    entity=decision.entity,
                    owner="scheduler",
                    instance="scheduler",
                    causation=seq,
                    id=decision_id(RUN, "scheduler", seq, index),
                    data=decision.data,
                )
            )
    return events


def event(seq: int, kind: str, entity: str, data: Any, *, owner: str = "scheduler", causation: int = 0) -> Event:
    return fact(seq, owner, kind, entity, data, time_us=seq * 1000, causation=causation, id=f"id-{seq}")


def log_of(*said: tuple[str, str, Any]) -> list[Event]:
    """A log of (kind, entity, data), all of one cause."""
    return [event(seq, kind, entity, data) for seq, (kind, entity, data) in enumerate(said, start=1)]


def altered(events: Sequence[Event], seq: int, **changes: Any) -> list[Event]:
    """The log with fields of one event's data changed."""
    found = list(events)
    old = found[seq - 1]
    assert old.seq == seq
    found[seq - 1] = msgspec.structs.replace(old, data=msgspec.structs.replace(old.data, **changes))
    return found


def first(events: Iterable[Event], kind: str, *, after: int = 0) -> Event:
    return next(each for each in events if each.kind == kind and each.seq > after)


def stored(each: Event) -> Stored:
    return codec.stored(each, run=RUN)


def write(path: Path, events: Iterable[Event]) -> Manifest:
    with LogWriter(path) as writer:
        for each in events:
            writer.add(stored(each))
        return writer.finish()
