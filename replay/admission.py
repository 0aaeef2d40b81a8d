"""Draws again what admission drew (equation 4): every row of `group.materialized` from the counts of its frozen tree.

The outcome decider draws too, when it is replayed; this looks at the draws alone, without its state, and tells them apart:
which leaf, which targets. Memory is bounded by the groups that are open.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from replay.divergence import Divergence, differences
from schemas import events as e
from schemas.envelope import Decision, Event
from schemas.ids import group_of
from schemas.units import RowPlan
from services.trajectories.core.admission import admit

NAME = "admission"
KINDS = {
    "run.started",
    "group.dispatched",
    "execution.tree-frozen",
    "execution.settled",
    "group.materialized",
    "group.discarded",
}
"""What is looked at."""


class Draws(msgspec.Struct, frozen=True, kw_only=True):
    """How the draws fared."""

    trees: int
    recorded: int
    """Rows in the log."""
    same: int
    """Rows that were drawn again, byte for byte."""
    divergences: int
    """Executions whose rows differ."""
    first: Divergence | None


class _Member(msgspec.Struct, kw_only=True):
    trees: dict[int, Event] = {}
    """By attempt."""
    valid: int = -1
    """The attempt whose rows count; -1 while there is none."""


class Admission:
    """`see` every event of a log, in order."""

    def __init__(self) -> None:
        self.first: Divergence | None = None
        self._limit, self._seed = 0, 0
        self._groups: dict[str, dict[str, _Member]] = {}
        """Open groups: execution to what is known of it."""
        self._count = self._recorded = self._same = self._found = 0

    def __repr__(self) -> str:
        return f"<Admission [{self._same} of {self._recorded} rows]>"

    def see(self, event: Event) -> None:
        if event.kind not in KINDS:
            return
        match event.data:
            case e.RunStarted() as data:
                self._limit, self._seed = data.config.trajectories.J_max, data.seed
            case e.GroupDispatched() as data:
                self._groups[event.entity] = {execution: _Member() for execution in data.executions}
            case e.ExecutionTreeFrozen() as data:
                self._count += 1
                member = self._member(event.entity)
                if member is not None:
                    member.trees.setdefault(data.attempt, event)
            case e.ExecutionSettled() as data:
                member = self._member(event.entity)
                if member is not None:
                    member.valid = data.attempt if data.outcome == "valid" else -1
            case e.GroupMaterialized() as data:
                self._compare(event, data.rows)
            case e.GroupDiscarded():
                self._groups.pop(event.entity, None)

    def result(self) -> Draws:
        return Draws(
            trees=self._count, recorded=self._recorded, same=self._same, divergences=self._found, first=self.first
        )

    def _compare(self, event: Event, rows: list[RowPlan]) -> None:
        drawn: dict[str, list[RowPlan]] = {}
        for row in rows:
            drawn.setdefault(row.execution, []).append(row)
        members = self._groups.pop(event.entity, {})
        self._recorded += len(rows)
        for execution in sorted({*drawn, *members}):
            member = members.get(execution) or _Member()
            tree = member.trees.get(member.valid)
            recorded, computed = drawn.get(execution, []), [] if tree is None else self._draw(execution, tree)
            if recorded == computed:
                self._same += len(recorded)
            else:
                self._found += 1
                self.first = self.first or _divergence(event, tree, recorded, computed)

    def _draw(self, execution: str, tree: Event) -> list[RowPlan]:
        return admit(tree.data, execution=execution, limit=self._limit, seed=self._seed)

    def _member(self, execution: str) -> _Member | None:
        """None for a held-out execution, and once the group is closed."""
        group = self._groups.get(group_of(execution))
        return group.get(execution) if group is not None else None


def _divergence(event: Event, tree: Event | None, recorded: list[RowPlan], computed: list[RowPlan]) -> Divergence:
    def decision(rows: list[RowPlan]) -> Decision:
        return Decision(kind=event.kind, entity=event.entity, data=e.GroupMaterialized(rows=rows))

    parts: Iterator[Any] = zip(recorded, computed, strict=False)
    index = next((i for i, (a, b) in enumerate(parts) if a != b), min(len(recorded), len(computed)))
    expected, actual = decision(recorded), decision(computed)
    return Divergence(
        decider=NAME,
        seq=tree.seq if tree is not None else event.causation,
        input=tree,
        index=index,
        recorded_seq=event.seq,
        expected=expected,
        actual=actual,
        differences=differences(expected, actual),
        shape="different",
        reason="different",
        evidence="",
        state=None,
        state_text="",
    )
