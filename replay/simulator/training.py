"""The training side of a world: who claims micro-steps, how long they take, updates, and weights that go out.

Who claims is the free training cell of lowest index. Part of `replay.simulator.world`, which says what is not modelled.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Protocol

from replay.simulator.answers import Answers
from schemas import events as e
from schemas.envelope import Event
from schemas.ids import cell_id, cell_index
from schemas.units import GapStats

_GAP = GapStats()


class Say(Protocol):
    def __call__(
        self, owner: str, kind: str, entity: str, data: Any, *, id: str, cause: int, instance: str = ""
    ) -> None: ...


class Tell(Protocol):
    """Does `what` after so many microseconds, unless the fact of this key was heard meanwhile."""

    def __call__(self, after_us: int, key: Hashable, what: Callable[[], None]) -> None: ...


class Training:
    """`claim` gives free cells what waits; the rest hears events."""

    def __init__(self, answers: Answers, lr: float, *, say: Say, tell: Tell) -> None:
        self._answers, self._lr = answers, lr
        self._say, self._tell = say, tell
        self.held = False
        """Nobody claims: who did so is heard from a recording."""
        self.publication_us = 0
        """When every engine has the weights exposed last."""
        self.version = 0
        """Exposed for publication last."""
        self._cells: dict[str, int] = {}
        """Cell that trains to its epoch."""
        self._free: set[str] = set()
        """Training cells without a micro-step."""
        self._waiting: dict[str, Event] = {}
        """Micro-steps that nobody has claimed, in their order."""
        self._enqueued: dict[str, Event] = {}
        """Micro-step of the open batch to the event that enqueued it."""
        self._claimed: dict[str, str] = {}
        """Micro-step to the cell that has it."""
        self._batch: e.BatchOpened | None = None
        self._done: dict[str, e.MicroStepDone] = {}
        self._exposures: set[tuple[int, str]] = set()
        self.on: dict[str, Callable[[Event, Any], None]] = {
            "burst.ended": self._burst_ended,
            "batch.opened": self._batch_opened,
            "batch.join-closed": self._join_closed,
            "batch.stepped": self._batch_stepped,
            "micro-step.enqueued": self._micro_step_enqueued,
            "micro-step.claimed": self._micro_step_claimed,
            "micro-step.done": self._micro_step_done,
            "micro-step.released": self._micro_step_released,
        }

    def __repr__(self) -> str:
        return f"<Training {sorted(self._cells)} [{len(self._waiting)} micro-steps wait]>"

    def enter(self, cell: str, epoch: int) -> None:
        self._cells[cell] = epoch
        self._free.add(cell)
        self.claim()

    def leave(self, cell: str) -> None:
        self._cells.pop(cell, None)
        self._free.discard(cell)

    def claim(self) -> None:
        while self._waiting and self._free and not self.held:
            name, enqueued = next(iter(self._waiting.items()))
            del self._waiting[name]
            cell = min(self._free, key=cell_index)
            self._free.discard(cell)
            self._claim(name, enqueued, cell)

    def _claim(self, name: str, enqueued: Event, cell: str) -> None:
        claimed = e.MicroStepClaimed(batch=enqueued.data.batch, cell=cell, epoch=self._cells[cell])
        self._tell(
            self._answers.claimed(name, cell),
            ("micro-step.claimed", name),
            lambda: self._say(
                "trainer",
                "micro-step.claimed",
                name,
                claimed,
                id=f"{enqueued.id}.claimed.{cell}",
                cause=enqueued.seq,
                instance=f"trainer-{cell}",
            ),
        )

    def _burst_ended(self, event: Event, data: e.BurstEnded) -> None:
        """Who goes back takes nothing any more."""
        for cell in [each for each in self._cells if each not in data.stays]:
            self.leave(cell)

    def _batch_opened(self, event: Event, data: e.BatchOpened) -> None:
        self._batch = data
        self._done, self._enqueued, self._waiting, self._claimed = {}, {}, {}, {}
        self._expose(event, data.version, "join")

    def _micro_step_enqueued(self, event: Event, data: e.MicroStepEnqueued) -> None:
        self._enqueued[event.entity] = self._waiting[event.entity] = event
        self.claim()

    def _micro_step_claimed(self, event: Event, data: e.MicroStepClaimed) -> None:
        name, enqueued = event.entity, self._enqueued.get(event.entity)
        self._waiting.pop(name, None)
        self._free.discard(data.cell)
        if enqueued is None:
            return
        self._claimed[name] = data.cell
        after_us, done = self._answers.trained(name, enqueued.data, data.cell)
        self._tell(
            after_us,
            ("micro-step.done", name),
            lambda: self._say(
                "trainer",
                "micro-step.done",
                name,
                done,
                id=f"{enqueued.id}.done",
                cause=enqueued.seq,
                instance=event.instance,
            ),
        )

    def _micro_step_done(self, event: Event, data: e.MicroStepDone) -> None:
        self._done[event.entity] = data
        if self._claimed.pop(event.entity, data.cell) == data.cell and data.cell in self._cells:
            self._free.add(data.cell)
        self.claim()

    def _micro_step_released(self, event: Event, data: e.MicroStepReleased) -> None:
        cell = self._claimed.pop(event.entity, None)
        self._done.pop(event.entity, None)
        if cell in self._cells:
            self._free.add(cell)
        if event.entity in self._enqueued:
            self._waiting[event.entity] = self._enqueued[event.entity]
        self.claim()

    def _join_closed(self, event: Event, data: e.BatchJoinClosed) -> None:
        assert self._batch is not None
        batch, done = self._batch, list(self._done.values())
        version = batch.version + 1
        proposed = e.BatchStepped(
            step=batch.step,
            version=version,
            members=data.members,
            loss=0.0,
            grad_norm=0.0,
            lr=self._lr,
            micro_steps=len(done),
            tokens=sum(each.tokens for each in done),
            targets=sum(each.targets for each in done),
            executions=sum(each.executions for each in done),
            masked=0,
            reward=0.0,
            gap=_GAP,
            seconds=0.0,
            as_of=event.seq,
        )
        after_us, stepped = self._answers.stepped(proposed)

        def step() -> None:
            saved = e.CheckpointSaved(
                version=version, path=f"checkpoints/v{version:06d}", digest="simulated", log_sequence=event.seq
            )
            self._core("checkpoint.saved", f"v{version:06d}", saved, event, "saved")
            self._core("batch.stepped", event.entity, stepped, event, "stepped")

        self._tell(after_us, ("batch.stepped", event.entity), step)

    def _batch_stepped(self, event: Event, data: e.BatchStepped) -> None:
        if self._batch is not None and self._batch.final:
            self._expose(event, data.version, "publish")

    def _expose(self, event: Event, version: int, purpose: Any) -> None:
        if (version, purpose) in self._exposures:
            return
        exposed = e.WeightsExposed(version=version, purpose=purpose, address={}, bytes=0)
        self._tell(
            self._answers.exposed(version, purpose),
            ("weights.exposed", version, purpose),
            lambda: self._core("weights.exposed", cell_id(0), exposed, event, f"exposed.{purpose}"),
        )

    def exposed(self, event: Event, data: e.WeightsExposed) -> None:
        self._exposures.add((data.version, data.purpose))
        if data.purpose == "publish":
            self.version = data.version
            self.publication_us = event.time_us + max(
                (each[0] for each in self._answers.published(data.version)), default=0
            )

    def _core(self, kind: str, entity: str, data: Any, event: Event, verb: str) -> None:
        self._say("trainer", kind, entity, data, id=f"{event.id}.{verb}", cause=event.seq, instance="trainer-cell-0")
