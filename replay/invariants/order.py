"""The two orders in which a run is told.

In LOG a decision may lie behind facts that its decider had not read. Laws about what the scheduler may decide are looked
at in its own order: each input, then what was decided on it.

    LOG              a  b  D(a)  c  D(c)
    scheduler order  a  D(a)  b  c  D(c)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from schemas.envelope import Event
from schemas.kinds import KINDS

_DECISIONS = frozenset(
    (name, owner) for name, kind in KINDS.items() for owner, nature in kind.owners.items() if nature == "decision"
)


def decides(event: Event, owner: str) -> bool:
    """Whether it is a decision of this decider."""
    return event.owner == owner and (event.kind, owner) in _DECISIONS


class SchedulerOrder:
    """Turns the log's order into the scheduler's."""

    def __init__(self) -> None:
        self._waiting: deque[Event] = deque()

    def take(self, event: Event) -> Iterator[Event]:
        """The events whose turn has come with this one."""
        if decides(event, "scheduler"):
            while self._waiting and self._waiting[0].seq <= event.causation:
                yield self._waiting.popleft()
            yield event
        else:
            self._waiting.append(event)

    def rest(self) -> Iterator[Event]:
        """Inputs after the last on which something was decided, when the log ends."""
        while self._waiting:
            yield self._waiting.popleft()
