"""Invariants of the log itself: ids, causes, write-once kinds, timers."""

from __future__ import annotations

from replay.invariants.base import Invariant, on
from replay.invariants.order import decides
from schemas.envelope import Event
from schemas.ids import decision_id
from schemas.kinds import KINDS

_ONCE = frozenset(name for name, kind in KINDS.items() if kind.once)


class SaidOnce(Invariant):
    """No id occurs twice, and a write-once kind is said at most once of an entity.

    Source: DESIGN section 3
    """

    name = "said_once"

    def begin(self) -> None:
        self._ids: set[str] = set()
        self._once: set[tuple[str, str]] = set()

    @on()
    def every(self, event: Event) -> None:
        if event.id in self._ids:
            self.violated(event, f"the id {event.id} occurs twice")
        self._ids.add(event.id)
        if event.kind in _ONCE:
            key = (event.kind, event.entity)
            if key in self._once:
                self.violated(event, f"{event.kind} was said before")
            self._once.add(key)


class Decisions(Invariant):
    """The decisions of a decider answer its inputs in log order, those on one input numbered without a gap, each with the
    id {run}.{decider}.{n}.{i} of input n and number i; n is no decision of its own.

    Source: DESIGN section 1 (the loop)
    """

    name = "decisions"

    def begin(self) -> None:
        self._at: dict[str, tuple[int, int]] = {}
        """Decider to the input that it answered last and the number of decisions on it."""
        self._own: dict[str, set[int]] = {}

    @on()
    def every(self, event: Event) -> None:
        owner, cause = event.owner, event.causation
        if not decides(event, owner):
            return
        last, count = self._at.get(owner, (0, 0))
        own = self._own.setdefault(owner, set())
        if cause in own:
            self.violated(event, f"answers {cause}, a decision of {owner} itself")
        own.add(event.seq)
        if cause < last:
            self.violated(event, f"answers {cause} after {last}")
            return
        index = count if cause == last else 0
        self._at[owner] = (cause, index + 1)
        # run.started names the run; without it, the id is taken at its word.
        run = self.scene.run or event.id.partition(f".{owner}.")[0]
        right = decision_id(run, owner, cause, index)
        if event.id != right:
            self.violated(event, f"has the id {event.id}, decision {index} on {cause} is {right}")


class Causes(Invariant):
    """What led to an event lies before it in the log.

    Source: DESIGN section 3 (causation)
    """

    name = "causes"

    @on()
    def every(self, event: Event) -> None:
        if not 0 <= event.causation < event.seq:
            self.violated(event, f"has the cause {event.causation}")


class Timers(Invariant):
    """A timer fires once, after it was set, with the purpose for which it was set.

    Source: DESIGN section 1 (timers)
    """

    name = "timers"

    def begin(self) -> None:
        self._set: dict[str, str] = {}
        self._fired: set[str] = set()

    @on("timer.set")
    def armed(self, event: Event) -> None:
        self._set[event.entity] = event.data.purpose

    @on("timer.fired")
    def fired(self, event: Event) -> None:
        purpose = self._set.get(event.entity)
        if purpose is None:
            self.violated(event, "fired and was never set")
        elif purpose != event.data.purpose:
            self.violated(event, f"fired for {event.data.purpose}, it was set for {purpose}")
        if event.entity in self._fired:
            self.violated(event, "fired twice")
        self._fired.add(event.entity)
