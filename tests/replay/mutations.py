"""What goes wrong, made from a log in which nothing does: each mutation is a few events of it changed, moved or left out.

A case says which events it wants and what is to be different; logs are never written by hand here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from replay.invariants import Evidence
from schemas.envelope import Event

Log = list[Event]
Where = Callable[[Event], bool]


def of(kind: str, **data: Any) -> Where:
    """Events of a kind whose data has these values."""
    return lambda event: event.kind == kind and all(getattr(event.data, name) == value for name, value in data.items())


def find(log: Log, where: Where, number: int = 0) -> int:
    """Index of the event with this number among those that match; negative numbers count from the end."""
    return [index for index, event in enumerate(log) if where(event)][number]


def changed(log: Log, where: Where, number: int = 0, **values: Any) -> Log:
    """Fields of the event's data, or (`_entity` and so on) of the event itself, become others; functions get the old."""
    index = find(log, where, number)
    event = log[index]
    own = {name[1:]: value for name, value in values.items() if name.startswith("_")}
    data = {
        name: value(getattr(event.data, name)) if callable(value) else value
        for name, value in values.items()
        if not name.startswith("_")
    }
    new = msgspec.structs.replace(event, data=msgspec.structs.replace(event.data, **data), **own)
    return [*log[:index], new, *log[index + 1 :]]


def without(log: Log, where: Where, number: int = 0) -> Log:
    index = find(log, where, number)
    return renumbered([*log[:index], *log[index + 1 :]])


def repeated(log: Log, where: Where, number: int = 0, *, _id: str = "again", **values: Any) -> Log:
    """The event once more at the end of the log, under another id unless told otherwise."""
    event = log[find(log, where, number)]
    again = msgspec.structs.replace(
        event, seq=len(log) + 1, id=_id, data=msgspec.structs.replace(event.data, **values) if values else event.data
    )
    return [*log, again]


def later(log: Log, where: Where, behind: Where, number: int = 0) -> Log:
    """The event moves behind the first event after it that matches `behind`."""
    index = find(log, where, number)
    end = next(i for i in range(index + 1, len(log)) if behind(log[i]))
    return renumbered([*log[:index], *log[index + 1 : end + 1], log[index], *log[end + 1 :]])


def renumbered(log: Iterable[Event]) -> Log:
    """Sequences from 1 without a gap; causes follow their events, and lose those that are gone."""
    kept = list(log)
    number = {event.seq: index for index, event in enumerate(kept, start=1)}
    return [
        msgspec.structs.replace(event, seq=index, causation=number.get(event.causation, 0))
        for index, event in enumerate(kept, start=1)
    ]


def with_evidence(evidence: Evidence, **values: Any) -> Evidence:
    return msgspec.structs.replace(evidence, **values)


Case = tuple[Callable[[Log], Log] | None, Callable[[Evidence], Evidence] | None, str]
"""How the log is changed, how the evidence is, and a part of what must be said."""


def tampered(value: Any, **values: Any) -> Any:
    return msgspec.structs.replace(value, **values)


def raised(amount: int) -> Any:
    return lambda value: value + amount


def moved(target: str, phase: str) -> Any:
    return of("cell.role-transition", target=target, phase=phase)


def trained(kind: str) -> Any:
    """Events of a kind about executions that aren't held out."""
    return lambda event: event.kind == kind and not event.entity.startswith("e-h")


def after_its(log: Log, kind: str, behind: str) -> Log:
    """The first event of the kind about a training execution moves behind the other kind's of the same."""
    entity = log[find(log, trained(kind))].entity
    return later(log, trained(kind), lambda event: event.kind == behind and event.entity == entity)
