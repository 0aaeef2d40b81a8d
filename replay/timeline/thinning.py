"""A document of a long log made small enough for a page. What is left out is said in the document."""

from __future__ import annotations

from typing import TypeVar

from replay.timeline.model import Changes, Document, Events, Reasons

LEAST_TELLING = (
    "evaluation.claimed",
    "execution.sealed",
    "evaluation.requested",
    "execution.tree-frozen",
    "micro-step.enqueued",
    "execution.dispatched",
    "evaluation.scored",
    "execution.started",
    "execution.settled",
    "micro-step.done",
    "micro-step.claimed",
    "route.moved",
    "execution.placed",
    "execution.finished",
    "group.materialized",
    "group.claimed",
    "group.consumed",
    "group.ready",
    "group.dispatched",
)
"""Kinds that are left out, in this order, until the rest is few enough. Others are always listed."""
COUNTS = frozenset({"d", "p", "f", "held_out", "load", "ready", "supply", "claimed", "enqueued", "done", "micro_step"})
"""Series of which the last value of every interval is enough; roles, steps and publications are kept whole."""
CHANGES = 500_000
_INTERVALS = 6000
_T = TypeVar("_T", Events, Changes, Reasons)


def thin(document: Document, limit: int) -> None:
    """At most about `limit` events and `CHANGES` changes; in place."""
    for kind in LEAST_TELLING:
        # What was left out once is left out to the end.
        if len(document.events.seq) > limit or kind in document.left_out:
            _leave_out(document, kind)
    if len(document.changes.seq) > CHANGES:
        document.resolution = max(1, document.resolution, document.changes.t[-1] // _INTERVALS)
        _coarsen(document, document.resolution)


def forget_names(document: Document) -> None:
    """Names that nothing in the document refers to any more become empty; the others keep their index."""
    if not document.left_out:
        return
    named = {index for index, each in enumerate(document.series) if each.name in ("micro_step", "batch")}
    rows = document.changes
    used = {value for series, value in zip(rows.series, rows.value, strict=True) if series in named}
    used.update(document.events.entity)
    document.names = [name if index in used else "" for index, name in enumerate(document.names)]


def _leave_out(document: Document, kind: str) -> None:
    says = {index for index, each in enumerate(document.says) if each.kind == kind}
    rows = document.events
    kept = [index for index, each in enumerate(rows.says) if each not in says]
    if len(kept) == len(rows.says):
        return
    gone = {seq for seq, each in zip(rows.seq, rows.says, strict=True) if each in says}
    document.left_out[kind] = document.left_out.get(kind, 0) + len(gone)
    document.events = _select(rows, kept)
    document.reasons = _select(
        document.reasons, [index for index, seq in enumerate(document.reasons.seq) if seq not in gone]
    )


def _coarsen(document: Document, interval: int) -> None:
    """Of the counts, the last change in every interval is kept."""
    counts = {index for index, each in enumerate(document.series) if each.name in COUNTS}
    rows, last = document.changes, dict[int, int]()
    kept = []
    for index in range(len(rows.seq) - 1, -1, -1):
        series, slot = rows.series[index], rows.t[index] // interval
        if series not in counts or last.get(series) != slot:
            kept.append(index)
            last[series] = slot
    document.changes = _select(rows, kept[::-1])


def _select(table: _T, kept: list[int]) -> _T:
    columns = {name: [getattr(table, name)[index] for index in kept] for name in table.__struct_fields__}
    return type(table)(**columns)
