"""How far a run is: what its log has come to, from which the live view, `gyre status` and the summary are drawn.

What an event changes in it is in `services.cli.projection`. Nothing here reads a clock: time is the events'.
"""

from __future__ import annotations

from collections import deque

import msgspec

from schemas.config import Config

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
    recent: deque[tuple[int, int]] = msgspec.field(default_factory=deque)
    """When tokens were sampled, and how many: the last minute's."""

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
        if not self.recent:
            return 0.0
        span = min(RATE_WINDOW_US, max(1, self.now_us - self.started_us))
        since = self.now_us - span
        return sum(tokens for at, tokens in self.recent if at >= since) / (span / 1e6)

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
