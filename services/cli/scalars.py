"""A run's curves: a pure projection of its log, one point a curve at every training step.

Held-out curves have a point at every version that was measured.

What a curve means is in `CURVES`. Points of a step come when it is made; its staleness when its groups are consumed.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from schemas import events as e
from schemas.envelope import Event
from services.cli.progress import Progress
from services.cli.projection import evolve

CURVES = {
    "train/reward": "mean reward of the batch's executions in a baseline",
    "train/loss": "loss of the batch",
    "train/grad_norm": "norm of the gradient before clipping",
    "train/masked_share": "executions whose clip mask was zero, of all in the batch",
    "held_out/reward": "mean reward on the held-out tasks, by the version that was measured",
    "held_out/excluded": "executions of that measurement that are not in the mean",
    "logprob_gap/mean": "engine against trainer log-probabilities at equal version, absolute",
    "logprob_gap/max": "the largest such difference",
    "staleness/mean": "versions between dispatch and training, over the batch's groups",
    "staleness/max": "the largest of them",
    "mesh/waterlevel": "w = d - f when the step was made",
    "mesh/capacity": "C_R of equation (1) when the step was made",
    "speed/seconds": "since the step before, or since the run began",
    "speed/trained_tokens_per_s": "tokens of the step's rows over those seconds",
    "speed/sampled_tokens_per_s": "tokens that our engines sampled, over the last minute",
    "cells/{cell}": "1 in the training role, 0 in the rollout role, when the step was made",
}


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One value of one curve."""

    curve: str
    step: int
    value: float
    time_s: float
    """Of the event that it comes from."""


class Scalars:
    """Fed every event of LOG in order, gives the points that it makes known."""

    def __init__(self) -> None:
        self.progress = Progress()
        self._steps: dict[str, int] = {}
        self._groups: dict[str, int] = {}
        self._staleness: dict[str, list[int]] = {}

    def apply(self, event: Event) -> list[Point]:
        before = len(self.progress.steps)
        evolve(self.progress, event)
        data, values = event.data, []
        if isinstance(data, e.BatchOpened):
            self._steps[event.entity], self._groups[event.entity] = data.step, data.groups
        elif isinstance(data, e.BatchStepped) and len(self.progress.steps) > before:
            values = list(self._step(data))
        elif isinstance(data, e.MeasurementClosed):
            values = list(self._measured(data))
        elif isinstance(data, e.GroupConsumed):
            values = list(self._consumed(data))
        return [Point(curve=curve, step=at, value=value, time_s=event.time_us / 1e6) for curve, at, value in values]

    def _step(self, data: e.BatchStepped) -> Iterator[tuple[str, int, float]]:
        progress, step = self.progress, self.progress.steps[-1]
        yield "train/reward", step.step, step.reward
        yield "train/loss", step.step, step.loss
        yield "train/grad_norm", step.step, step.grad_norm
        if step.executions:
            yield "train/masked_share", step.step, step.masked / step.executions
        # Without a token sampled at the trained version there is nothing to compare.
        if data.gap.count:
            yield "logprob_gap/mean", step.step, step.gap
            yield "logprob_gap/max", step.step, data.gap.max_abs
        yield "mesh/waterlevel", step.step, progress.waterlevel
        yield "mesh/capacity", step.step, progress.capacity
        yield "speed/seconds", step.step, step.seconds
        if step.seconds > 0:
            yield "speed/trained_tokens_per_s", step.step, step.tokens / step.seconds
        yield "speed/sampled_tokens_per_s", step.step, progress.tokens_per_s
        for name, cell in sorted(progress.cells.items()):
            yield f"cells/{name}", step.step, float(cell.role == "train")

    def _measured(self, data: e.MeasurementClosed) -> Iterator[tuple[str, int, float]]:
        if data.mean is not None:
            yield "held_out/reward", data.version, data.mean
        yield "held_out/excluded", data.version, data.excluded

    def _consumed(self, data: e.GroupConsumed) -> Iterator[tuple[str, int, float]]:
        ages = self._staleness.setdefault(data.batch, [])
        ages.append(data.staleness)
        if len(ages) == self._groups.get(data.batch):
            step = self._steps.pop(data.batch)
            yield "staleness/mean", step, sum(ages) / len(ages)
            yield "staleness/max", step, max(ages)
            del self._staleness[data.batch], self._groups[data.batch]
