"""Training cells that share batches, in one process: killed at a chosen call, started again or never.

The cells of a test are trainers with real Megatron cells, each with a torch thread of its own and a prefix group over
real sockets; a lock keeps them apart inside Megatron, whose stand-ins for CUDA are the process's. Everything that can be
killed knows whose it is: a fault strikes the cell that it names and no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from schemas import events as e
from schemas.micro_steps import MicroStep
from services.mesh.health import Health
from services.mesh.service import Context
from services.mesh.weights.transport import WeightAddress, open_transport
from services.trainer.batch_view import CORE, BatchView, Meeting
from services.trainer.cell import Cell
from services.trainer.objective import ObjectiveStats, ObjectiveTerms
from services.trainer.prefix_group import PrefixGroup
from services.trainer.service import CellTrainer
from tests.trainer.stage import Stage

LOOSE = ObjectiveTerms(groups=2, executions=4, clip_low=0.0, clip_high=1e9)
"""No execution is masked after the first update, which moves this toy policy far."""
EXACT = 1e-5
MEGATRON = threading.RLock()


class Killed(Exception):
    """The process ends here."""


class Faults:
    """Ends a cell at the nth call of a method; holds micro-steps while `gate` or `slow` is closed."""

    def __init__(self) -> None:
        self.gate, self.slow = threading.Event(), threading.Event()
        """While `gate` is closed the core trains nothing, and the others as many micro-steps of a batch as `share` says;
        while `slow` is, they train nothing."""
        self.gate.set()
        self.slow.set()
        self.share = 1_000
        self.at: tuple[str, str, int] | None = None
        self.calls: Counter[tuple[str, str]] = Counter()
        self.fired = False

        self.gone: str | None = None
        """This cell isn't started again once it was killed."""
        self.stepping = threading.Event()
        """The core has the sum of all gradients and makes its step, when `may_step` is set."""
        self.may_step = threading.Event()
        self.may_step.set()

    def called(self, cell: str, method: str) -> None:
        self.calls[cell, method] += 1
        if self.at == (cell, method, self.calls[cell, method]):
            self.fired = True
            raise Killed(f"{cell} in {method}")


class SharedCell(Cell):
    """A cell beside others in this process, whose gradients are seen and which can be killed."""

    name: str
    faults: Faults
    seen: dict[int, torch.Tensor]
    """Version to the gradient that made it."""
    trained = 0
    """Micro-steps of the batch in hand."""

    def begin_batch(self) -> None:
        super().begin_batch()
        self.trained = 0

    def micro_step(self, micro_step: MicroStep, *, entropy: bool = False) -> ObjectiveStats:
        if self.name == CORE or self.trained >= self.faults.share:
            self.faults.gate.wait()
        if self.name != CORE:
            self.faults.slow.wait()
        with MEGATRON:
            stats = super().micro_step(micro_step, entropy=entropy)
        self.trained += 1
        self.faults.called(self.name, "micro_step")
        return stats

    def step(self) -> Any:
        self.faults.stepping.set()
        self.faults.may_step.wait()
        gradient = torch.cat(self.gradients())
        with MEGATRON:
            result = super().step()
        self.faults.called(self.name, "step")
        self.seen[result.version] = gradient
        return result

    def save(self, *args: Any) -> Any:
        saved = super().save(*args)
        self.faults.called(self.name, "save")
        return saved

    def acquire(self) -> None:
        with MEGATRON:
            super().acquire()

    def release(self) -> None:
        with MEGATRON:
            super().release()


class SharedGroup(PrefixGroup):
    """One cell's end, which can be killed before each of its calls, and after a reduction."""

    def __init__(self, cell: str, faults: Faults, *, host: bool) -> None:
        super().__init__(host=host)
        self._cell, self._faults = cell, faults

    def meet(self, meeting: Meeting, wait_s: float) -> bool:
        self._faults.called(self._cell, "meet")
        return super().meet(meeting, wait_s)

    def reduce(self, tensors: Sequence[torch.Tensor]) -> None:
        self._faults.called(self._cell, "reduce")
        super().reduce(tensors)
        self._faults.called(self._cell, "reduced")

    def broadcast(self, flat: np.ndarray) -> None:
        self._faults.called(self._cell, "broadcast")
        super().broadcast(flat)


class SharedHealth(Health):
    """Whoever lives answers, however busy the machine is. No probe is on its way to a process that ends: connections end
    with a process, not with a part of one."""

    def __init__(self, instance: str, living: dict[str, str]) -> None:
        super().__init__(service="trainer", instance=instance)
        self._instance, self._living = instance, living

    async def start(self, *, port: int = 0) -> str:
        url = await super().start(port=port)
        self._living[url] = self._instance
        return url

    async def answering(self, urls: Mapping[str, str], *, timeout_s: float) -> set[str]:
        return {instance for instance, url in urls.items() if self._living.get(url) == instance}

    async def stop(self) -> None:
        self._living.pop(self.url, None)
        await super().stop()


class Cells:
    """Trainers by cell, started again as often as they are killed."""

    def __init__(self, stage: Stage, faults: Faults, make: Callable[[str], SharedCell]) -> None:
        self.stage, self.faults, self.make = stage, faults, make
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.addresses: dict[str, str] = {}
        """Of the processes that live, and what each is called."""
        self.seen: dict[int, torch.Tensor] = {}
        """Version to the gradient that made it."""

    def build(self, context: Context) -> Cell:
        with MEGATRON:
            cell = self.make(context.cell)
        cell.name, cell.faults, cell.seen = context.cell, self.faults, self.seen
        return cell

    async def start_again(self, cell: str) -> None:
        """Killed from outside, wherever it is, and started."""
        self.tasks[cell].cancel()
        await asyncio.gather(self.tasks[cell], return_exceptions=True)
        self.tasks[cell] = asyncio.create_task(self.live(cell))

    async def live(self, cell: str) -> None:
        while True:
            context = self.stage.context(cell)
            context.health = SharedHealth(context.instance, self.addresses)
            trainer = CellTrainer(
                context,
                build=self.build,
                open_group=lambda host: SharedGroup(cell, self.faults, host=host),
            )
            try:
                await trainer.run()
            except Killed:
                if self.faults.gone == cell:
                    break
            finally:
                await trainer.close()
                await context.health.stop()

    @contextlib.asynccontextmanager
    async def living(self, *cells: str) -> AsyncIterator[None]:
        self.tasks = {cell: asyncio.create_task(self.live(cell)) for cell in cells}
        try:
            yield
        finally:
            self.faults.gate.set()
            self.faults.slow.set()
            self.faults.may_step.set()
            for task in self.tasks.values():
                task.cancel()
            ended = await asyncio.gather(*self.tasks.values(), return_exceptions=True)
            assert all(end is None or isinstance(end, asyncio.CancelledError) for end in ended), ended


class Membership:
    """The scheduler's part in a batch: it puts out cells that are lost and those above them, and closes the join window."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.view = BatchView(cell="", shared=True)
        self._changed = asyncio.Event()
        self._said = 0

    @contextlib.asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._follow())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def all_hold_some(self, name: str) -> bool:
        """Every satellite that still trains has a gradient of the batch."""
        batch = self.view.batch
        if batch is None or batch.id != name:
            return False
        return self.view.trains - {CORE} <= {done.cell for done in batch.done.values()}

    async def _follow(self) -> None:
        async for event in self._stage.context().events():
            self.view.fold(event)
            if isinstance(event.data, e.CellLost):
                for cell in sorted(self.view.trains, reverse=True):
                    if cell >= event.entity:
                        self._said = await self._stage.put_out(cell)
            batch = self.view.batch
            if event.seq >= self._said and batch is not None and not batch.join and batch.closed == len(batch.done):
                members = sorted(self.view.trains)
                joined = e.BatchJoinClosed(members=members, epochs=[self.view.epochs[cell] for cell in members])
                self._said = await self._stage.say("scheduler", "batch.join-closed", batch.id, joined)
            self._changed.set()


class Alone(msgspec.Struct):
    """What the core makes of the batches by itself."""

    gradients: list[Any]
    results: list[Any]
    weights: Any


async def published(stage: Stage) -> np.ndarray:
    exposed = (await stage.seen("weights.exposed", purpose="publish")).data
    with open_transport("shared-memory") as transport:
        flat = np.zeros(exposed.bytes // 4, np.float32)
        transport.pull(WeightAddress(**exposed.address), flat)
    return flat


async def same_as_alone(stage: Stage, cells: Cells, expected: Alone) -> None:
    """Gradients, norms, losses and weights; and LOG counts every micro-step once."""
    for version, (gradient, result) in enumerate(zip(expected.gradients, expected.results, strict=True), start=1):
        stepped = (await stage.seen("batch.stepped", version=version)).data
        assert float((cells.seen[version] - gradient).norm() / gradient.norm()) < EXACT
        assert stepped.grad_norm == pytest.approx(result.grad_norm, rel=EXACT)
        assert stepped.loss == pytest.approx(result.loss, rel=EXACT)
        assert stepped.micro_steps == result.micro_steps
    weights = await published(stage)
    assert np.linalg.norm(weights - expected.weights) / np.linalg.norm(expected.weights) < EXACT
    assert len(cells.seen) == len(expected.gradients)
