"""What a decider is, and the one loop that feeds it: live, in recovery, in replay and in simulation.

A decider is pure, synchronous and total. `evolve` is the only place where its state changes; `decide` is a generator
over the state, and the driver applies each decision before it asks for the next, so a later decision sees the earlier.

    input n --evolve--> state --decide--> d0 --evolve--> state --> d1 --evolve--> ...   then input n + 1

Recovery and replay call the same `feed` with the decisions that the log holds for n.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar

import msgspec

from schemas.envelope import Decision, Event
from schemas.errors import DeciderError, LogBroken, SnapshotUnreadable
from schemas.kinds import is_decision
from services.mesh.codec import encode_data

S = TypeVar("S", bound=msgspec.Struct)

DECISION_LIMIT = 1_000_000
"""Decisions for one input, beyond any dispatch: who takes more goes in a circle, and would fill the memory."""


class Decider(Protocol[S]):
    """`name` is the owner under which it speaks; `state_type` decodes snapshots."""

    name: str
    state_type: type[S]

    def initial(self) -> S: ...

    def evolve(self, state: S, event: Event) -> None:
        """Apply one input or one own decision. Unknown kinds change nothing."""

    def decide(self, state: S, event: Event) -> Iterator[Decision]:
        """Decisions that follow from `event`, lazily: the driver evolves each before it asks for the next."""

    def timers(self, state: S) -> dict[str, tuple[str, int]]:
        """Timers set and not yet fired: id to (purpose, due in microseconds)."""


class Mismatch(msgspec.Struct, frozen=True, kw_only=True):
    """First place where the decisions computed for an input differ from the recorded ones."""

    seq: int
    index: int
    expected: Decision | None
    """As recorded; None where nothing more was recorded."""
    actual: Decision | None
    """As computed; None where nothing more was decided."""


class _Position(msgspec.Struct, frozen=True):
    state: msgspec.Raw
    now_us: int
    position: int


class Driver(Generic[S]):
    """State of one decider and its place in the log. `feed` takes inputs in log order, each once."""

    def __init__(self, decider: Decider[S], *, decision_limit: int = DECISION_LIMIT) -> None:
        self.decider, self._decision_limit = decider, decision_limit
        self.state = decider.initial()
        self.now_us = 0
        self.position = 0

    def __repr__(self) -> str:
        return f"<Driver {self.decider.name} [input {self.position}]>"

    def is_input(self, event: Event) -> bool:
        """Everything but the decider's own decisions, its own facts included."""
        return event.owner != self.decider.name or not is_decision(event.kind, event.owner)

    def feed(self, event: Event) -> list[Decision]:
        """Apply an input and every decision that follows from it; returns the decisions in order. Raises DeciderError
        when they don't end."""
        at = self.arrive(event)
        decisions: list[Decision] = []
        # A loop of its own: with `decide` between, an input costs a twentieth more.
        for decision in self.decider.decide(self.state, at):
            self.bound(len(decisions), decision, at)
            self.apply(decision, at)
            decisions.append(decision)
        return decisions

    def feed_recorded(self, event: Event, recorded: Sequence[Decision | Event]) -> None:
        """Apply an input and the decisions that the log holds for it, without deciding."""
        at = self.arrive(event)
        for decision in recorded:
            self.apply(decision, at)

    def feed_tail(self, event: Event, recorded: Sequence[Decision]) -> list[Decision]:
        """Like `feed` where the log holds the first decisions already; returns those it does not hold.

        Raises LogBroken when a recorded decision is not what is decided now.
        """
        mismatch, decisions = self.compare(event, recorded, apply_unrecorded=True)
        if mismatch is not None and mismatch.expected is not None:
            raise LogBroken(
                f"{self.decider.name} recorded another decision than it takes now: {mismatch}",
                where=f"sequence {event.seq}",
                remedy="finish the run with the code that began it, or replay it to see where they part",
            )
        return decisions[len(recorded) :]

    def compare(
        self, event: Event, recorded: Sequence[Decision], *, apply_unrecorded: bool = False
    ) -> tuple[Mismatch | None, list[Decision]]:
        """Decide again and compare with the log.

        The state afterwards holds the recorded decisions, and with `apply_unrecorded` also those beyond them. Returns
        the first difference, or None, and the decisions computed up to where they could be.
        """
        at = self.arrive(event)
        mismatch: Mismatch | None = None
        computed: list[Decision] = []
        for index, decision in enumerate(self.decide(at)):
            computed.append(decision)
            expected = recorded[index] if index < len(recorded) else None
            if expected is None:
                mismatch = mismatch or Mismatch(seq=event.seq, index=index, expected=None, actual=decision)
                if not apply_unrecorded:
                    return mismatch, computed
            elif not same(decision, expected):
                for rest in recorded[index:]:
                    self.apply(rest, at)
                return Mismatch(seq=event.seq, index=index, expected=expected, actual=decision), computed
            self.apply(decision, at)
        missing = recorded[len(computed) :]
        for rest in missing:
            self.apply(rest, at)
        if missing:
            mismatch = Mismatch(seq=event.seq, index=len(computed), expected=missing[0], actual=None)
        return mismatch, computed

    def snapshot(self) -> bytes:
        state = msgspec.Raw(msgspec.msgpack.encode(self.state, order="deterministic"))
        return msgspec.msgpack.encode(_Position(state, self.now_us, self.position))

    def restore(self, snapshot: bytes) -> None:
        """Go on from there. Raises SnapshotUnreadable; nothing has changed then."""
        try:
            saved = msgspec.msgpack.decode(snapshot, type=_Position)
            state = msgspec.msgpack.decode(saved.state, type=self.decider.state_type)
        except msgspec.MsgspecError as error:
            raise SnapshotUnreadable(
                f"no snapshot of the {self.decider.name}: {error}", remedy="read the log from its beginning instead"
            ) from None
        self.state, self.now_us, self.position = state, saved.now_us, saved.position

    def arrive(self, event: Event) -> Event:
        """Apply an input; returns it as the decider sees it, at the time that it has there."""
        if event.seq <= self.position:
            raise LogBroken(f"input {event.seq} after {self.position}", where=self.decider.name)
        self.position = event.seq
        if event.time_us >= self.now_us:
            self.now_us, at = event.time_us, event
        else:
            at = msgspec.structs.replace(event, time_us=self.now_us)
        self.decider.evolve(self.state, at)
        return at

    def decide(self, at: Event) -> Iterator[Decision]:
        """What is decided on an input that arrived, lazily: each decision is applied before the next is asked for."""
        for taken, decision in enumerate(self.decider.decide(self.state, at)):
            self.bound(taken, decision, at)
            yield decision

    def bound(self, taken: int, decision: Decision, at: Event) -> None:
        """Raises DeciderError when `decision`, after as many as were taken on the input, is one too many."""
        if taken == self._decision_limit:
            raise DeciderError(
                f"{self.decider.name} takes more than {self._decision_limit} decisions for one input, "
                f"now {decision.kind} of {decision.entity}",
                where=f"sequence {at.seq}",
                remedy="it goes in a circle: look at what evolve makes of this kind",
            )

    def apply(self, decision: Decision | Event, cause: Event) -> None:
        """Apply a decision, as it was taken or as it was recorded, on the input `cause`, as `arrive` returned it."""
        self.decider.evolve(
            self.state,
            Event(
                seq=cause.seq,
                time_us=cause.time_us,
                kind=decision.kind,
                entity=decision.entity,
                owner=self.decider.name,
                instance="",
                causation=cause.seq,
                id="",
                data=decision.data,
            ),
        )


def same(a: Decision, b: Decision) -> bool:
    """Whether two decisions say the same, byte for byte."""
    return a.kind == b.kind and a.entity == b.entity and encode_data(a.data) == encode_data(b.data)
