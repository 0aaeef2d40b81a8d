"""Events as they are cited: sequence, time, what is said in a few words, and the checks that it carries."""

from __future__ import annotations

import msgspec

from replay.timeline.notes import note, reasons
from schemas.envelope import Event
from schemas.units import Check


class Cited(msgspec.Struct, frozen=True, kw_only=True):
    seq: int
    time_s: float
    """Since the log's first event."""
    kind: str
    entity: str
    note: str
    checks: list[Check] = []


def cite(event: Event, start_us: int) -> Cited:
    return Cited(
        seq=event.seq,
        time_s=(event.time_us - start_us) / 1e6,
        kind=event.kind,
        entity=event.entity,
        note=note(event),
        checks=reasons(event),
    )
