"""What LOG says of the executions, from the harness's side. Pure: events in, launches out.

    placed --proxy known--> due --taken--> running --execution.finished--> gone
                                              `--execution.lost--> waiting for the placement of the next attempt
    dispatched | placed | lost --execution.cancelled--> superfluous --taken--> ended without a start

Each attempt comes out of `due` once. After a restart `open` gives those that an earlier process of this service may have
launched. `said` chains what the service says of one execution: after `lost` nothing of that attempt can follow. Once
`execution.settled` tells the outcome, nothing of the execution is kept.
"""

from __future__ import annotations

import msgspec

from schemas import ids
from schemas.envelope import Event
from schemas.units import TaskRef


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One permission to start."""

    execution: str
    attempt: int
    task: str
    placed: str
    """Id of the decision; ids of the facts about this attempt derive from it."""
    causation: int
    """Sequence of the decision."""
    held_out: bool = False
    """Whether the task is one of the held-out set."""

    def fact_id(self, verb: str) -> str:
        return f"{self.placed}.{verb}.{self.attempt}"


class Book:
    def __init__(self, tasks: list[TaskRef], held_out: list[TaskRef] | None = None, *, proxies: int = 1) -> None:
        self._tasks = {(False, task.name): task for task in tasks}
        self._tasks |= {(True, task.name): task for task in held_out or []}
        self._proxies = proxies
        self._urls: dict[str, str] = {}
        """Where each proxy answered that joined last under its name."""
        self.over = False
        """The run is finished."""
        self.started_us: dict[str, int] = {}
        """When each execution started first: its overall budget begins there."""
        self._task_of: dict[str, tuple[bool, str]] = {}
        self._placed: dict[str, Attempt] = {}
        self._said: dict[str, int] = {}
        self._lost: dict[str, Attempt] = {}
        self._ended: dict[str, int] = {}
        self._begun: dict[str, int] = {}
        self._cancelled: dict[str, Event] = {}
        self._taken: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<Book [{len(self._placed)} placed, {len(self._taken)} taken{', over' if self.over else ''}]>"

    def apply(self, event: Event) -> None:
        """Take in one event of LOG, in order."""
        if event.owner == "harness" and event.kind.startswith("execution."):
            self.heard(event.entity, event.seq)
        match event.kind:
            case "execution.dispatched":
                self._task_of[event.entity] = (bool(event.data.measurement), event.data.task)
            case "execution.placed" if event.entity in self._task_of:
                known = self._placed.get(event.entity)
                self._lost.pop(event.entity, None)
                newest = max(known.attempt if known else -1, self._ended.get(event.entity, -1))
                if newest < event.data.attempt:
                    held_out, task = self._task_of[event.entity]
                    self._placed[event.entity] = Attempt(
                        execution=event.entity,
                        attempt=event.data.attempt,
                        task=task,
                        held_out=held_out,
                        placed=event.id,
                        causation=event.seq,
                    )
            case "execution.started":
                self.started_us.setdefault(event.entity, event.time_us)
                self._begun[event.entity] = max(self._begun.get(event.entity, -1), event.data.attempt)
            case "execution.lost" | "execution.finished":
                known = self._placed.get(event.entity)
                self._ended[event.entity] = max(self._ended.get(event.entity, -1), event.data.attempt)
                if known is not None and known.attempt <= event.data.attempt:
                    del self._placed[event.entity]
                    self._taken.pop(event.entity, None)
                    if event.kind == "execution.lost":
                        self._lost[event.entity] = known
                elif event.kind == "execution.finished":
                    self._lost.pop(event.entity, None)
            case "execution.cancelled" if event.entity in self._task_of:
                self._cancelled[event.entity] = event
            case "execution.settled":
                self._forget(event.entity)
            case "service.joined" if event.owner == "proxy":
                self._urls[event.entity] = event.data.url
            case "run.finished":
                self.over = True

    def task(self, attempt: Attempt) -> TaskRef:
        """What the run began with; without a digest where it knows no such task."""
        found = self._tasks.get((attempt.held_out, attempt.task))
        return found or TaskRef(name=attempt.task, digest="")

    def _forget(self, execution: str) -> None:
        """Its outcome is known, so it finished and nothing more is said of it: what is kept is bounded by what is open."""
        for known in (self._task_of, self._placed, self._said, self._lost, self._ended, self._begun, self._taken):
            known.pop(execution, None)
        self._cancelled.pop(execution, None)
        self.started_us.pop(execution, None)

    def heard(self, execution: str, seq: int) -> None:
        """LOG holds something that this service said of the execution."""
        self._said[execution] = max(self._said.get(execution, 0), seq)

    def said(self, execution: str) -> int:
        """Sequence of what this service said last of the execution; 0 when it said nothing."""
        return self._said.get(execution, 0)

    def proxy_of(self, execution: str) -> str:
        """Address of the proxy whose execution it is; empty until that one has joined."""
        return self._urls.get(ids.proxies_for(execution, self._proxies)[0], "")

    def has_ended(self, attempt: Attempt) -> bool:
        """Whether LOG says that this attempt is lost or finished."""
        return self._ended.get(attempt.execution, -1) >= attempt.attempt

    def age_us(self, execution: str, now_us: int) -> int:
        """How much of the execution's overall budget is gone: time since its first start, whatever happened in it."""
        return max(0, now_us - self.started_us.get(execution, now_us))

    def unplaced(self) -> list[Attempt]:
        """Of executions whose attempt was lost and that nobody placed again: the attempts that would be next."""
        lost, self._lost = self._lost, {}
        return [msgspec.structs.replace(known, attempt=known.attempt + 1) for known in lost.values()]

    def is_cancelled(self, execution: str) -> bool:
        """Whether nobody needs it any more, however it ends."""
        return execution in self._cancelled

    def superfluous(self) -> list[Attempt]:
        """Attempts of cancelled executions that nobody looks after, placed or not; they count as taken."""
        found = []
        for execution, cancelled in self._cancelled.items():
            attempt = self._placed.get(execution)
            if attempt is None and execution in self._lost:
                lost = self._lost.pop(execution)
                attempt = msgspec.structs.replace(lost, attempt=lost.attempt + 1)
            elif attempt is None and execution not in self._ended:
                attempt = self._unplaced(execution, cancelled)
            if attempt is not None and self._taken.get(execution, -1) < attempt.attempt:
                self.take(attempt)
                found.append(attempt)
        return found

    def _unplaced(self, execution: str, cancelled: Event) -> Attempt:
        """The attempt of an execution that never got an engine; its facts follow from the cancellation."""
        _, task = self._task_of[execution]
        return Attempt(execution=execution, attempt=0, task=task, placed=cancelled.id, causation=cancelled.seq)

    def was_started(self, attempt: Attempt) -> bool:
        """Whether LOG says that this attempt runs."""
        return self._begun.get(attempt.execution, -1) >= attempt.attempt

    def open(self) -> list[Attempt]:
        """Attempts that are neither finished nor taken, in the order of their placement."""
        return [known for known in self._placed.values() if self._taken.get(known.execution, -1) < known.attempt]

    def take(self, attempt: Attempt) -> None:
        """From now on somebody looks after this attempt."""
        self._taken[attempt.execution] = attempt.attempt

    def due(self) -> list[Attempt]:
        """Attempts that start now; they count as taken."""
        if self.over:
            return []
        due = [attempt for attempt in self.open() if self.proxy_of(attempt.execution)]
        for attempt in due:
            self.take(attempt)
        return due
