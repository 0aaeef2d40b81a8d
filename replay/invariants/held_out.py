"""Invariants of held-out measurements: they are made, they end, and training never sees them. In the scheduler's order."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from replay.invariants.base import Invariant, names, on
from schemas import events as e
from schemas.envelope import Event

TOLERANCE = 1e-9


class HeldOutMeasured(Invariant):
    """Each measurement is of the version published last, dispatches the executions that it names, on held-out tasks, and
    closes once when all of them are settled, with their counts and their mean; only one that the end of a stopped run
    overtook stays open.

    Source: DESIGN sections 4 and 7 (a held-out task set, measured every so many steps)
    """

    name = "held_out_measured"
    order = "scheduler"

    def begin(self) -> None:
        self._tasks: dict[str, str] = {}
        self._trained: set[str] = set()
        self._open: dict[str, tuple[Event, list[str]]] = {}
        """Measurement to its opening and the executions dispatched for it."""
        self._settled: dict[str, e.ExecutionSettled] = {}
        self._measured = -1
        self._looked = 0

    @on("run.started")
    def started(self, event: Event) -> None:
        self._tasks = {task.name: task.digest for task in event.data.held_out}
        self._trained = {task.digest for task in event.data.tasks}

    @on("measurement.opened")
    def opened(self, event: Event) -> None:
        data: e.MeasurementOpened = event.data
        self._looked += 1
        if self._open:
            self.violated(event, f"opened while {names(self._open)} is open")
        if data.version != self.scene.published or data.version <= self._measured:
            self.violated(event, f"of version {data.version}, published is {self.scene.published}")
        if len(data.executions) != self.scene.rules.eval.executions:
            self.violated(event, f"{len(data.executions)} executions, not {self.scene.rules.eval.executions}")
        self._open[event.entity] = (event, [])
        self._measured = data.version

    @on("execution.dispatched")
    def dispatched(self, event: Event) -> None:
        data: e.ExecutionDispatched = event.data
        if not data.measurement:
            return
        if data.measurement in self._open:
            self._open[data.measurement][1].append(event.entity)
        if self._tasks.get(data.task) != data.task_digest or data.task_digest in self._trained:
            self.violated(event, f"{data.task} is not a held-out task")

    @on("execution.settled")
    def settled(self, event: Event) -> None:
        if event.entity in self.scene.executions and self.scene.executions[event.entity].held_out:
            self._settled[event.entity] = event.data

    @on("batch.opened")
    def trained(self, event: Event) -> None:
        scene, every = self.scene, self.scene.rules.eval.every
        if not every or not self._tasks or scene.burst_done or self._open:
            return
        if self._measured < 0 or scene.published - self._measured >= every:
            self.violated(event, f"opened before version {scene.published} was measured")

    @on("measurement.closed")
    def closed(self, event: Event) -> None:
        opened, dispatched = self._open.pop(event.entity, (None, []))
        if opened is None:
            self.violated(event, "closed and not open")
            return
        executions: list[str] = opened.data.executions
        if dispatched != executions:
            self.violated(opened, "its executions are not those that were dispatched for it")
        known = [self._settled.pop(name) for name in executions if name in self._settled]
        if len(known) < len(executions):
            self.violated(event, f"{len(executions) - len(known)} executions are not settled")
        data: e.MeasurementClosed = event.data
        counts = Counter[str](each.outcome for each in known)
        if (data.valid, data.placeholder, data.excluded) != (
            counts["valid"],
            counts["placeholder"],
            counts["excluded"],
        ):
            self.violated(event, f"its counts are not those of its executions, {dict(counts)}")
        rewards = [each.reward for each in known if each.outcome != "excluded"]
        mean = math.fsum(rewards) / len(rewards) if rewards else None
        if (mean is None) != (data.mean is None) or abs((mean or 0.0) - (data.mean or 0.0)) > TOLERANCE:
            self.violated(event, f"mean {data.mean}, its executions give {mean}")

    @on("run.finished")
    def finished(self, event: Event) -> None:
        data: e.RunFinished = event.data
        if data.reason != "steps_done":
            return
        for name, (opened, _) in self._open.items():
            self.violated(opened, f"{name} was open when the run was finished")
        if self._tasks and self.scene.rules.eval.every and self._measured < self.scene.published:
            self.violated(event, f"finished before version {self.scene.published} was measured")

    def end(self) -> None:
        if not self._looked:
            self.skip("nothing was measured on held-out tasks")


class HeldOutApart(Invariant):
    """Held-out executions are in no group, row or micro-step, and in no counter.

    Source: DESIGN section 7 (outside d, w and groups)
    """

    name = "held_out_apart"
    order = "scheduler"

    def begin(self) -> None:
        self._held_out: set[str] = set()

    @on("measurement.opened")
    def opened(self, event: Event) -> None:
        self._held_out.update(event.data.executions)

    @on("execution.dispatched")
    def dispatched(self, event: Event) -> None:
        data: e.ExecutionDispatched = event.data
        if (event.entity in self._held_out) != bool(data.measurement) or (data.measurement and data.group):
            self.violated(event, f"of group {data.group!r}, measurement {data.measurement!r}")

    @on("group.dispatched")
    def grouped(self, event: Event) -> None:
        self._holds(event, event.data.executions)

    @on("group.ready")
    def ready(self, event: Event) -> None:
        self._holds(event, (reward.execution for reward in event.data.rewards))

    @on("group.materialized", "micro-step.enqueued")
    def rows(self, event: Event) -> None:
        self._holds(event, (row.execution for row in event.data.rows))

    def _holds(self, event: Event, executions: Iterable[str]) -> None:
        for execution in sorted(self._held_out.intersection(executions)):
            self.violated(event, f"holds {execution}, which is held out")

    def end(self) -> None:
        if not self._held_out:
            self.skip("nothing was measured on held-out tasks")
