"""How far a run is: a pure projection of its log, from which the live view, `gyre status` and the summary are drawn.

`Progress.apply` takes events in log order, each once. Nothing here reads a clock: time is the events'.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from schemas import events as e
from schemas.config import Config
from schemas.envelope import Event

RATE_WINDOW_US = 60_000_000
SETTLING_BURSTS = 4
"""Staleness is reported over bursts after this one, when there are any."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One training step as it was made."""

    step: int
    version: int
    reward: float
    loss: float
    grad_norm: float
    tokens: int
    targets: int
    executions: int
    masked: int
    gap: float
    """Mean absolute difference of engine and trainer log-probabilities."""
    seconds: float
    """Since the step before, or since the run began."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One held-out measurement as it was closed."""

    version: int
    mean: float | None
    """None when every outcome was excluded."""
    std: float | None
    averaged: int
    excluded: int
    late: int


class CellView(msgspec.Struct, kw_only=True):
    """One cell as the log shows it."""

    index: int
    capacity: int
    role: str = "rollout"
    phase: str = ""
    """Phase of a transition that is under way; empty when the role is settled."""
    version: int = 0
    load: int = 0
    """Executions placed here and not finished."""

    @property
    def serves(self) -> bool:
        return self.role == "rollout" and not self.phase


class Progress(msgspec.Struct, kw_only=True):
    """State of the projection; begins empty."""

    run: str = ""
    config: Config | None = None
    started_us: int = 0
    now_us: int = 0
    down_us: int = 0
    """Time in which the run's services were stopped: from the last that was said before to `run.continued`."""
    finished_us: int = 0
    finished: str = ""
    """Reason of `run.finished`; empty while the run goes on."""
    d: int = 0
    p: int = 0
    f: int = 0
    """Executions dispatched, started, finished; held-out ones are in none of them."""
    lost: dict[str, int] = {}
    """Executions of which an attempt was lost with its host, to how many attempts."""
    open: dict[str, str] = {}
    """Executions dispatched and not finished: the cell that serves each, empty while queued."""
    running: set[str] = set()
    surplus: int = 0
    """Executions that were given up because their group was complete without them."""
    cancelled: set[str] = set()
    """Those of them that were cancelled and are not finished."""
    cells: dict[str, CellView] = {}
    measured: list[Measured] = []
    measuring: int = -1
    """Version that is being measured; -1 when none is."""
    held_out: set[str] = set()
    """Executions of that measurement which are not settled."""
    steps: list[Step] = []
    batch_open: bool = False
    burst: int = 0
    burst_of: dict[str, int] = {}
    """Batch to the index of its burst."""
    staleness: list[tuple[int, int, int]] = []
    """(burst, version trained, staleness) of every consumed group."""
    groups_ready: int = 0
    groups_consumed: int = 0
    groups_discarded: int = 0
    transitions: int = 0
    harness_calls: int = 0
    harness_errors: int = 0
    reconnects: int = 0
    gap_sum: float = 0.0
    gap_max: float = 0.0
    gap_count: int = 0
    sampled: int = 0
    """Tokens that our engines sampled, of frozen trees."""
    published: int = 0
    """Version served by every engine."""
    checkpoint: str = ""
    services: dict[str, str] = {}
    """Instance to URL of its HTTP server."""
    last_error: str = ""
    _recent: deque[tuple[int, int]] = msgspec.field(default_factory=deque)

    @property
    def waterlevel(self) -> int:
        """w = d - f."""
        return self.d - self.f

    @property
    def capacity(self) -> int:
        """C_R of equation (1): what the cells in the rollout role take."""
        return sum(cell.capacity for cell in self.cells.values() if cell.serves)

    @property
    def seconds(self) -> float:
        """From the run's beginning to its end or to now, by the log's time, without the time in which it was stopped."""
        return ((self.finished_us or self.now_us) - self.started_us - self.down_us) / 1e6

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens a second over the last minute of the log."""
        if not self._recent:
            return 0.0
        span = min(RATE_WINDOW_US, max(1, self.now_us - self.started_us))
        since = self.now_us - span
        return sum(tokens for at, tokens in self._recent if at >= since) / (span / 1e6)

    @property
    def staleness_mean(self) -> float | None:
        """Over groups of bursts after the fourth, else over all; None before the first step."""
        settled = [value for burst, _, value in self.staleness if burst > SETTLING_BURSTS]
        values = settled or [value for _, _, value in self.staleness]
        return sum(values) / len(values) if values else None

    @property
    def logprob_gap(self) -> float | None:
        """Mean absolute difference of engine and trainer log-probabilities at equal version."""
        return self.gap_sum / self.gap_count if self.gap_count else None

    def mean_reward(self, first: bool, width: int = 5) -> float | None:
        """Mean reward of the first or the last steps."""
        chosen = self.steps[:width] if first else self.steps[-width:]
        return sum(step.reward for step in chosen) / len(chosen) if chosen else None

    def measured_reward(self, first: bool) -> float | None:
        """Held-out reward of the first or the last measurement that has one."""
        means = [each.mean for each in self.measured if each.mean is not None]
        return (means[0] if first else means[-1]) if means else None

    def apply(self, event: Event) -> None:
        if event.kind == "run.continued":
            self.down_us += max(0, event.time_us - self.now_us)
        self.now_us = max(self.now_us, event.time_us)
        change = _CHANGES.get(event.kind)
        if change is not None and not isinstance(event.data, msgspec.Raw):
            change(self, event)


def _run_started(self: Progress, event: Event) -> None:
    data: e.RunStarted = event.data
    self.run, self.config, self.started_us = event.entity, data.config, event.time_us


def _run_finished(self: Progress, event: Event) -> None:
    data: e.RunFinished = event.data
    if not self.finished:
        self.finished, self.finished_us = data.reason, event.time_us


def _dispatched(self: Progress, event: Event) -> None:
    data: e.ExecutionDispatched = event.data
    if event.entity not in self.open:
        self.open[event.entity] = ""
        if not data.measurement:
            self.d += 1


def _placed(self: Progress, event: Event) -> None:
    data: e.ExecutionPlaced = event.data
    _move(self, event.entity, data.cell)


def _route_moved(self: Progress, event: Event) -> None:
    data: e.RouteMoved = event.data
    _move(self, event.entity, data.target)


def _move(self: Progress, execution: str, cell: str) -> None:
    if execution not in self.open:
        return
    before = self.open[execution]
    if before in self.cells:
        self.cells[before].load -= 1
    if cell in self.cells:
        self.cells[cell].load += 1
    self.open[execution] = cell


def _started(self: Progress, event: Event) -> None:
    if event.entity in self.open and event.entity not in self.running:
        self.running.add(event.entity)
        self.p += event.entity not in self.held_out


def _lost(self: Progress, event: Event) -> None:
    data: e.ExecutionLost = event.data
    # Attempts count from zero, and each is lost once.
    self.lost[event.entity] = max(self.lost.get(event.entity, 0), data.attempt + 1)


def _finished(self: Progress, event: Event) -> None:
    data: e.ExecutionFinished = event.data
    if event.entity not in self.cancelled and not _end(self, event.entity):
        return
    self.harness_calls += data.counters.calls
    self.reconnects += data.counters.reconnects
    # What is cancelled is refused: for its harness that is an error, and for us as it should be.
    if event.entity not in self.cancelled:
        self.harness_errors += data.counters.harness_errors
    self.cancelled.discard(event.entity)


def _cancelled(self: Progress, event: Event) -> None:
    if _end(self, event.entity):
        self.cancelled.add(event.entity)


def _end(self: Progress, execution: str) -> bool:
    """Whether it was open: it is not any more."""
    if execution not in self.open:
        return False
    _move(self, execution, "")
    del self.open[execution]
    trains = execution not in self.held_out
    if execution in self.running:
        self.running.discard(execution)
    else:
        self.p += trains
    self.f += trains
    return True


def _settled(self: Progress, event: Event) -> None:
    data: e.ExecutionSettled = event.data
    self.held_out.discard(event.entity)
    self.surplus += data.reason == "surplus"


def _measurement_opened(self: Progress, event: Event) -> None:
    data: e.MeasurementOpened = event.data
    self.measuring = data.version
    self.held_out.update(data.executions)


def _measurement_closed(self: Progress, event: Event) -> None:
    data: e.MeasurementClosed = event.data
    self.measuring = -1
    self.measured.append(
        Measured(
            version=data.version,
            mean=data.mean,
            std=data.std,
            averaged=data.valid + data.placeholder,
            excluded=data.excluded,
            late=data.late,
        )
    )


def _tree_frozen(self: Progress, event: Event) -> None:
    data: e.ExecutionTreeFrozen = event.data
    tokens = sum(data.trainable)
    self.sampled += tokens
    self._recent.append((event.time_us, tokens))
    while self._recent and self._recent[0][0] < event.time_us - RATE_WINDOW_US:
        self._recent.popleft()


def _group_ready(self: Progress, event: Event) -> None:
    self.groups_ready += 1


def _group_discarded(self: Progress, event: Event) -> None:
    self.groups_discarded += 1


def _group_consumed(self: Progress, event: Event) -> None:
    data: e.GroupConsumed = event.data
    self.groups_consumed += 1
    self.staleness.append((self.burst_of.get(data.batch, 0), data.version_trained, data.staleness))


def _restored(self: Progress, event: Event) -> None:
    """Steps that made later versions count no more."""
    data: e.CheckpointRestored = event.data
    self.steps = [step for step in self.steps if step.version <= data.version]
    self.staleness = [each for each in self.staleness if each[1] < data.version]
    self.groups_consumed = len(self.staleness)
    self.batch_open = False


def _cell_lost(self: Progress, event: Event) -> None:
    if event.entity in self.cells:
        self.cells[event.entity].phase = "lost"


def _cell_joined(self: Progress, event: Event) -> None:
    data: e.CellJoined = event.data
    cell = self.cells.get(event.entity)
    if cell is None:
        self.cells[event.entity] = CellView(index=data.index, capacity=data.capacity, version=data.version)
    else:
        cell.version = max(cell.version, data.version)
        if cell.phase == "lost" and cell.role == "rollout":
            cell.phase = ""


def _role_transition(self: Progress, event: Event) -> None:
    data: e.CellRoleTransition = event.data
    cell = self.cells.get(event.entity)
    if cell is None:
        return
    if data.phase == "completed":
        cell.role, cell.phase = data.target, ""
        self.transitions += 1
    elif data.phase == "failed":
        cell.phase = "out"
    else:
        cell.phase = f"{data.phase} to {data.target}"
    if data.version >= 0:
        cell.version = max(cell.version, data.version)


def _burst_opened(self: Progress, event: Event) -> None:
    data: e.BurstOpened = event.data
    self.burst = data.index


def _burst_ended(self: Progress, event: Event) -> None:
    data: e.BurstEnded = event.data
    self.published = data.version


def _batch_opened(self: Progress, event: Event) -> None:
    self.batch_open = True
    self.burst_of[event.entity] = self.burst


def _batch_stepped(self: Progress, event: Event) -> None:
    data: e.BatchStepped = event.data
    if self.steps and data.step <= self.steps[-1].step:
        return
    before = self.started_us + round(sum(step.seconds for step in self.steps) * 1e6)
    self.batch_open = False
    self.steps.append(
        Step(
            step=data.step,
            version=data.version,
            reward=data.reward,
            loss=data.loss,
            grad_norm=data.grad_norm,
            tokens=data.tokens,
            targets=data.targets,
            executions=data.executions,
            masked=data.masked,
            gap=data.gap.sum_abs / data.gap.count if data.gap.count else 0.0,
            seconds=(event.time_us - self.down_us - before) / 1e6,
        )
    )
    self.gap_sum += data.gap.sum_abs
    self.gap_count += data.gap.count
    self.gap_max = max(self.gap_max, data.gap.max_abs)


def _batch_failed(self: Progress, event: Event) -> None:
    data: e.BatchFailed = event.data
    self.last_error = f"{event.entity}: {data.reason}"


def _published(self: Progress, event: Event) -> None:
    data: e.WeightsPublished = event.data
    if event.entity in self.cells:
        self.cells[event.entity].version = max(self.cells[event.entity].version, data.version)


def _saved(self: Progress, event: Event) -> None:
    data: e.CheckpointSaved = event.data
    self.checkpoint = data.path


def _joined(self: Progress, event: Event) -> None:
    data: e.ServiceJoined = event.data
    self.services[event.entity] = data.url


def _left(self: Progress, event: Event) -> None:
    self.services.pop(event.entity, None)


_CHANGES: dict[str, Callable[[Progress, Any], None]] = {
    "run.started": _run_started,
    "run.finished": _run_finished,
    "execution.dispatched": _dispatched,
    "execution.placed": _placed,
    "execution.started": _started,
    "execution.lost": _lost,
    "execution.finished": _finished,
    "execution.cancelled": _cancelled,
    "execution.settled": _settled,
    "execution.tree-frozen": _tree_frozen,
    "measurement.opened": _measurement_opened,
    "measurement.closed": _measurement_closed,
    "route.moved": _route_moved,
    "group.ready": _group_ready,
    "group.discarded": _group_discarded,
    "group.consumed": _group_consumed,
    "cell.joined": _cell_joined,
    "cell.role-transition": _role_transition,
    "burst.opened": _burst_opened,
    "burst.ended": _burst_ended,
    "batch.opened": _batch_opened,
    "batch.stepped": _batch_stepped,
    "batch.failed": _batch_failed,
    "weights.published": _published,
    "checkpoint.saved": _saved,
    "checkpoint.restored": _restored,
    "cell.lost": _cell_lost,
    "service.joined": _joined,
    "service.left": _left,
}
