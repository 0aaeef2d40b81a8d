"""What LOG says of evaluations, from one evaluator's side. Pure: events in, requests out.

requested --nobody claimed--> waiting --due, taken--> claimed by us --scored | failed--> gone
                                |   ^                                  ^
                                |   `--lapsed: who claimed is dead     |
                                `--claimed by another------------------'

What failed before is due later, and each time twice as late: tests that can't give a reward, or a full disk, would
otherwise fill machine and log for as long as the execution's budget lasts. Waits run from when this evaluator heard of
them, by its own clock: that of the event bus may show another hour. A claim names its process and holds as long
as an evaluator that lives can need, or until a later process of the same evaluator reads it, be it stored before that one
joined or after: then whoever is free claims again, in answer to the claim that lapsed. If both answer, the first counts.
Surplus executions of a group that is ready wait for nothing: nobody claims their evaluations any more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import msgspec

from schemas.envelope import Event
from schemas.events import EvaluationRequested
from services.mesh.clock import MICROSECONDS

RETRY_S = 0.5
"""Wait before the second try."""
LONGEST_RETRY_S = 60.0


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation to make."""

    evaluation: str
    id: str
    """Id of the request; ids of the facts that answer it derive from it."""
    seq: int
    """Sequence of the request."""
    after: int
    """What a claim answers: the request, or the claim that lapsed."""
    data: EvaluationRequested
    due_us: int
    """When it may be claimed, by this evaluator's clock; 0 for at once."""
    holder: str = ""
    """Another evaluator, which claimed it and has until `due_us` to answer."""

    def fact_id(self, verb: str) -> str:
        return f"{self.id}.{verb}.{self.data.tries}"


class Book:
    def __init__(self, evaluator: str, holds_us: Callable[[EvaluationRequested], int]) -> None:
        """`holds_us` tells for how long a claim of such an evaluation holds."""
        self._evaluator, self._holds_us = evaluator, holds_us
        self.process = 0
        """Sequence at which this process joined; 0 before, when no claim is its own."""
        self._taken: dict[str, Request] = {}
        """Those that a worker of ours is about to claim."""
        self._waiting: OrderedDict[str, Request] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Book {self._evaluator} [{len(self._waiting)} waiting]>"

    def __len__(self) -> int:
        """Evaluations that nobody claimed, due or not."""
        return sum(not request.holder for request in self._waiting.values())

    def apply(self, event: Event, heard_us: int) -> None:
        """Take in one event of LOG, in order, and when it was heard by this evaluator's clock."""
        match event.kind:
            case "evaluation.requested":
                self._waiting[event.entity] = Request(
                    evaluation=event.entity,
                    id=event.id,
                    seq=event.seq,
                    after=event.seq,
                    data=event.data,
                    due_us=_due_us(event.data, heard_us),
                )
            case "evaluation.claimed":
                self._claimed(event, heard_us)
            case "evaluation.scored" | "evaluation.failed":
                self._known(event.entity)
            case "group.ready" if event.data.surplus:
                self._drop(event.data.surplus)
            case "run.finished":
                self._waiting.clear()

    def take(self, now_us: int) -> Request | None:
        """The oldest that is due; None when there is none."""
        found = next((request for request in self._waiting.values() if request.due_us <= now_us), None)
        if found is not None:
            self._taken[found.evaluation] = self._waiting.pop(found.evaluation)
        return found

    def _claimed(self, event: Event, heard_us: int) -> None:
        request, claimed = self._known(event.entity), event.data
        if request is None:
            return
        same = claimed.evaluator == self._evaluator
        if same and self.process and claimed.process == self.process:
            return
        if same and (not self.process or claimed.process < self.process):
            # An earlier process of this evaluator, which is dead: nobody will answer.
            after, holder, due = event.seq, "", 0
        else:
            after, holder, due = event.seq, claimed.evaluator, heard_us + self._holds_us(request.data)
        self._waiting[event.entity] = msgspec.structs.replace(request, after=after, holder=holder, due_us=due)

    def _known(self, evaluation: str) -> Request | None:
        """Whatever is known of it, which is forgotten."""
        found = [known.pop(evaluation, None) for known in (self._waiting, self._taken)]
        return next((request for request in found if request is not None), None)

    def _drop(self, executions: list[str]) -> None:
        for name in [name for name, request in self._waiting.items() if request.data.execution in executions]:
            del self._waiting[name]

    def due(self, evaluation: str) -> int | None:
        """When it may be claimed; None when it may not."""
        request = self._waiting.get(evaluation)
        return request.due_us if request is not None else None

    def dues(self) -> list[int]:
        """When each that may be claimed may be."""
        return [request.due_us for request in self._waiting.values()]


def _due_us(requested: EvaluationRequested, heard_us: int) -> int:
    """When it may be claimed: at once the first time, after a wait that doubles from then on."""
    tries = requested.tries
    if tries < 2:
        return 0
    # The exponent is bounded as well: tries have no limit but the budget.
    wait_s = min(LONGEST_RETRY_S, RETRY_S * float(2 ** min(tries - 2, 32)))
    return heard_us + round(wait_s * MICROSECONDS)
