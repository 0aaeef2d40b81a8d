"""What a simulated run leaves beside its log, for the invariants: RECORDS, what the agents lived, rows and rows made again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from replay.fault.mesh import Mesh
from replay.fault.setting import RUN
from replay.invariants import Call, Evidence
from replay.invariants.base import Served, Tables
from replay.invariants.recorded import Attempt, attempt_of
from replay.worlds.world import Asked
from schemas import streams
from schemas.envelope import Event
from schemas.events import ExecutionTreeFrozen
from schemas.records import FrozenTree, RecordEntry
from services.mesh.bus import Stored
from services.mesh.tree_codec import decode_record, encode_tree
from services.trajectories.store import PROJECTED
from services.trajectories.tree import freeze


def evidence_of(mesh: Mesh, log: Sequence[Event], *, complete: bool) -> Evidence:
    """`complete`: the run ended by itself, so everything that had to follow has followed."""
    records = mesh.stored(streams.records_stream(RUN))
    return Evidence(
        records=records,
        calls=[_call(asked) for asked in mesh.world.asked],
        served=[Served(cell=each.cell, epoch=each.epoch, log=each.log) for each in mesh.world.served],
        tables=(lambda: _tables(mesh.rows.applied)) if complete else None,
        rebuilt=(lambda: _rebuilt(log, records)) if complete else None,
        complete=complete,
    )


def _call(asked: Asked) -> Call:
    return Call(
        execution=asked.execution,
        attempt=asked.attempt,
        request=asked.message,
        answered=asked.outcome == "answered",
        answer=asked.answer,
        records=asked.records,
        refused=asked.status,
    )


def _tables(applied: Sequence[tuple[Event, FrozenTree | None]]) -> Tables:
    return {"applied": [_row(event, tree) for event, tree in applied]}


def _rebuilt(log: Sequence[Event], records: Sequence[Stored]) -> Tables:
    """What a projection applies that reads LOG and RECORDS from the beginning."""
    entries: dict[Attempt, list[RecordEntry]] = defaultdict(list)
    for stored in records:
        entries[attempt_of(stored)].append(decode_record(stored.data))
    rows = []
    for event in log:
        if isinstance(event.data, PROJECTED):
            tree = None
            if isinstance(event.data, ExecutionTreeFrozen) and event.data.blob:
                attempt = event.data.attempt
                tree = freeze(event.entity, attempt, entries[event.entity, attempt])
            rows.append(_row(event, tree))
    return {"applied": rows}


def _row(event: Event, tree: FrozenTree | None) -> tuple[Any, ...]:
    return (event.seq, event.kind, event.entity, encode_tree(tree) if tree is not None else b"")
