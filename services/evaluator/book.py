"""What LOG says of evaluations, from one evaluator's side. Pure: events in, requests out.

requested --nobody claimed--> waiting --taken--> claimed by us --scored | failed--> gone
                                 |--claimed by another--> gone until it is requested again
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from schemas.envelope import Event
from schemas.events import EvaluationRequested


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation to make."""

    evaluation: str
    id: str
    """Id of the request; ids of the facts that answer it derive from it."""
    seq: int
    """Sequence of the request: what a claim answers."""
    data: EvaluationRequested
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
        """Evaluations that `take` would give."""
        return len(self._waiting)

    def apply(self, event: Event) -> None:
        """Take in one event of LOG, in order."""
        match event.kind:
            case "evaluation.requested":
                self._waiting[event.entity] = Request(
                    evaluation=event.entity, id=event.id, seq=event.seq, data=event.data
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

    def take(self) -> Request:
        """The oldest that waits."""
        return self._waiting.popitem(last=False)[1]

    def left_undone(self) -> list[Request]:
        """After a restart: what an earlier process of this evaluator claimed and did not answer."""
        undone = [msgspec.structs.replace(request, claimed=True) for request in self._claimed.values()]
        self._claimed.clear()
        return undone
