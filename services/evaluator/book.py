"""What LOG says of evaluations, from one evaluator's side. Pure: events in, requests out.

requested --nobody claimed--> waiting --due, taken--> claimed by us --scored | failed--> gone
                                 |--claimed by another--> gone until it is requested again

What failed before is due later, and each time twice as late: tests that can't give a reward, or a full disk, would
otherwise fill machine and log for as long as the execution's budget lasts.
"""

from __future__ import annotations

from collections import OrderedDict

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
    """Sequence of the request: what a claim answers."""
    data: EvaluationRequested
    due_us: int
    """When it may be claimed, in microseconds since the epoch; 0 for at once."""
    claimed: bool = False
    """It was claimed by this evaluator before it started again."""

    def fact_id(self, verb: str) -> str:
        return f"{self.id}.{verb}.{self.data.tries}"


class Book:
    def __init__(self, evaluator: str) -> None:
        self._evaluator = evaluator
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._claimed: OrderedDict[str, Request] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Book {self._evaluator} [{len(self._waiting)} waiting, {len(self._claimed)} claimed]>"

    def __len__(self) -> int:
        """Evaluations that nobody claimed, due or not."""
        return len(self._waiting)

    def apply(self, event: Event) -> None:
        """Take in one event of LOG, in order."""
        match event.kind:
            case "evaluation.requested":
                self._waiting[event.entity] = Request(
                    evaluation=event.entity, id=event.id, seq=event.seq, data=event.data, due_us=due_us(event)
                )
            case "evaluation.claimed":
                request = self._waiting.pop(event.entity, None)
                if request is not None and event.data.evaluator == self._evaluator:
                    self._claimed[event.entity] = request
            case "evaluation.scored" | "evaluation.failed":
                self._waiting.pop(event.entity, None)
                self._claimed.pop(event.entity, None)
            case "run.finished":
                self._waiting.clear()

    def take(self, now_us: int) -> Request | None:
        """The oldest that is due; None when there is none."""
        found = next((request for request in self._waiting.values() if request.due_us <= now_us), None)
        return self._waiting.pop(found.evaluation) if found is not None else None

    def dues(self) -> list[int]:
        """When those that nobody claimed may be."""
        return [request.due_us for request in self._waiting.values()]

    def left_undone(self) -> list[Request]:
        """After a restart: what an earlier process of this evaluator claimed and did not answer."""
        undone = [msgspec.structs.replace(request, claimed=True) for request in self._claimed.values()]
        self._claimed.clear()
        return undone


def due_us(requested: Event) -> int:
    """When a requested evaluation may be claimed: at once the first time, after a wait that doubles from then on."""
    tries: int = requested.data.tries
    if tries < 2:
        return 0
    # The exponent is bounded as well: tries have no limit but the budget.
    wait_s = min(LONGEST_RETRY_S, RETRY_S * float(2 ** min(tries - 2, 32)))
    return requested.time_us + round(wait_s * MICROSECONDS)
