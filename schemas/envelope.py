"""What is stored in LOG: one envelope an event. Stored time and sequence come from the stream, never from the writer."""

from __future__ import annotations

from typing import Any

import msgspec


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """One event as it lies in the stream; `data` is decoded by `kind` through the table in `schemas.kinds`."""

    id: str
    """Unique over the run; the `Nats-Msg-Id`. Derived for decisions, `{decision id}.{verb}.{attempt}` for facts."""
    run: str
    kind: str
    """`entity.verb`, for example `execution.placed`."""
    entity: str
    """Id of the entity that the event is about."""
    owner: str
    """The service that says it."""
    instance: str = ""
    """Which process of that service, for example `rollout/cell-1`."""
    causation: int = 0
    """Stream sequence of the event that led to this one; 0 when nothing in the log did."""
    v: int = 1
    """Schema version of the kind."""
    data: msgspec.Raw = msgspec.Raw(b"{}")


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """An event as a decider or a projector sees it: decoded, with its place in the log."""

    seq: int
    """Stream sequence. A decision that its own decider applies before it is stored carries its cause's sequence."""
    time_us: int
    """Stored time in whole microseconds since the epoch, never decreasing along the log as deciders see it."""
    kind: str
    entity: str
    owner: str
    instance: str
    causation: int
    id: str
    data: Any


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What a decider wants said. The shell gives it its id, subject and causation."""

    kind: str
    entity: str
    data: Any
