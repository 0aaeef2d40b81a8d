"""What an invariant is: a law with a name and a source, fed event by event, and what it may look at beside the log.

An invariant says by `@on(kind, ...)` which events it wants, so that an event costs only those whom it concerns. It is fed
in one of two orders: the log's, or the scheduler's (`replay.invariants.order`), in which every decision follows the input
on which it was taken, as if facts took no time to arrive. `scene` is the run before the event.

Invariants only read: they keep what they need, complain through `violated`, and say through `skip` why they had nothing
to look at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import msgspec

from schemas.envelope import Event
from services.mesh.bus import Stored

if TYPE_CHECKING:
    from replay.invariants.scene import Scene

F = TypeVar("F", bound=Callable[..., None])
EVERY = "*"
"""In place of a kind: every event."""


class Violation(msgspec.Struct, frozen=True, kw_only=True):
    invariant: str
    seq: int
    """Where in the log; 0 when it is about the log as a whole."""
    entity: str
    what: str

    def __str__(self) -> str:
        return f"{self.invariant}: sequence {self.seq} ({self.entity}): {self.what}"


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One model call as the harness lived it, repetitions of the same request included in one entry."""

    execution: str
    attempt: int
    request: str
    """What the answers of one request share: the id of the message, which is made of the request's digest."""
    answered: bool
    """Whether an answer arrived in full."""
    answer: str = ""
    """Digest of the answer's content; equal answers have equal ones."""
    records: int = 0
    """Last sequence of RECORDS when the answer arrived."""
    refused: int = 0
    """Status of the refusal with which the harness gave up; 0 when it just went."""


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """A call that a cell took."""

    cell: str
    epoch: int
    """That the call carried."""
    log: int
    """Last sequence of LOG when it was made."""


Tables = Mapping[str, Sequence[tuple[Any, ...]]]
"""Rows by table, as `services.trajectories.store.Store.dump` gives them."""


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a run beside its LOG; what is None is not looked at."""

    records: Sequence[Stored] | None = None
    """Every message of RECORDS, in order."""
    calls: Sequence[Call] | None = None
    """What the harnesses did and got."""
    served: Sequence[Served] | None = None
    """Calls that cells took and answered."""
    tables: Callable[[], Tables] | None = None
    """The projection as the running service left it."""
    rebuilt: Callable[[], Tables] | None = None
    """The projection made again from LOG and RECORDS alone."""
    complete: bool = False
    """Whether everything that had to follow has followed: nothing in the log may be left open then."""


class Invariant:
    """Base of all; subclasses have a docstring (the law, then a paragraph `Source: ...`) and set `name`."""

    name: ClassVar[str]
    order: ClassVar[Literal["log", "scheduler"]] = "log"
    handlers: ClassVar[dict[str, str]] = {}
    """Kind to the name of the method that takes it; `*` stands for every kind."""

    def __init_subclass__(cls) -> None:
        cls.handlers = {kind: name for name, member in vars(cls).items() for kind in getattr(member, "_kinds", ())}

    def __init__(self, scene: Scene, evidence: Evidence, found: list[Violation]) -> None:
        self.scene, self.evidence = scene, evidence
        self._found = found
        self.violations = 0
        self.skipped = ""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} [{self.violations} violations]>"

    def begin(self) -> None:
        """Make what is kept."""

    def see(self, event: Event) -> None:
        """One event, for whoever feeds a single invariant; the checker calls the handlers itself."""
        for kind in (event.kind, EVERY):
            if kind in self.handlers:
                getattr(self, self.handlers[kind])(event)

    def decided(self, event: Event) -> None:
        """In the scheduler's order: everything that it decided on the input `event` is in `scene`."""

    def end(self) -> None:
        """The log is over, or what there is of it."""

    def violated(self, event: Event, what: str) -> None:
        self.report(event.seq, event.entity, what)

    def report(self, seq: int, entity: str, what: str) -> None:
        """A violation that is not at one event."""
        self.violations += 1
        self._found.append(Violation(invariant=self.name, seq=seq, entity=entity, what=what))

    def skip(self, reason: str) -> None:
        """There was nothing to look at."""
        self.skipped = reason

    @classmethod
    def law(cls) -> str:
        """The docstring's first paragraph, on one line."""
        return _paragraphs(cls)[0]

    @classmethod
    def source(cls) -> str:
        """Where the law comes from."""
        return next(each.removeprefix("Source: ") for each in _paragraphs(cls) if each.startswith("Source: "))


def on(*kinds: str) -> Callable[[F], F]:
    """Marks the handler of these kinds; no kind at all stands for every event."""

    def mark(handler: F) -> F:
        handler._kinds = kinds or (EVERY,)  # type: ignore[attr-defined]
        return handler

    return mark


def _paragraphs(cls: type[Invariant]) -> list[str]:
    return [" ".join(part.split()) for part in (cls.__doc__ or "").strip().split("\n\n")]


def names(items: Iterable[str], most: int = 4) -> str:
    """A few names for a sentence."""
    known = sorted(items)
    return ", ".join(known[:most]) + (f" and {len(known) - most} more" if len(known) > most else "")
