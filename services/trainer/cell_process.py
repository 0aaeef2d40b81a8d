"""What a training cell's process stands on: LOG folded into its view, facts said into LOG, and a thread for torch.

Invariants: `view` is changed by LOG alone, and what was said counts once LOG has shown it; torch work runs in one thread
of its own, so the process keeps reading the log meanwhile. One task at a time waits for changes of the view.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from schemas import streams
from schemas.envelope import Event
from schemas.errors import Conflict, TrainerError
from schemas.units import Value
from services.mesh.liveness import Watch
from services.mesh.service import Context
from services.trainer.batch_view import BatchView

T = TypeVar("T")
ABOUT = ("cell", "batch", "micro-step", "group", "checkpoint", "weights", "burst", "service", "run")
"""What the process follows in LOG."""


class Worker(Protocol):
    """Where what blocks is done, one thing at a time; `TorchThread` here, no thread at all in a simulation."""

    async def __call__(self, act: Callable[[], Any]) -> Any:
        """What `act` returns."""

    def close(self) -> None:
        """Returns when nothing runs any more."""


class TorchThread:
    """Implements `Worker`."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="torch")

    async def __call__(self, act: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, act)

    def close(self) -> None:
        self._thread.shutdown(wait=True)


class CellProcess:
    """`read_past()` once, then `follow()` for as long as the process lives; `changed` is set by every event that may
    change the view."""

    def __init__(self, context: Context, worker: Worker | None = None) -> None:
        self.context = context
        self._worker = worker or TorchThread()
        self.view = BatchView(cell=context.cell, shared=context.config.cells.trainable > 1)
        self.watch = Watch(context, service="trainer", lost_s=context.config.trainer.lost_s)
        """Of the satellites. The core probes them: it is the one who waits for them."""
        self.changed = asyncio.Event()
        self._folded = 0

    async def read_past(self) -> int:
        """Folds everything in LOG now; returns the sequence to go on after."""
        past, self._folded = await self.context.history(about=ABOUT)
        for event in past:
            self._fold(event)
        return self._folded

    @property
    def folded(self) -> int:
        """Sequence up to which `view` holds LOG."""
        return self._folded

    async def follow(self) -> None:
        """Once it has joined, without end. Raises TrainerError when the others went on without this process."""
        async for event in self.context.events(self._folded, about=ABOUT):
            self._folded = event.seq
            self._fold(event)
            self.changed.set()
            if self.view.processes.get(self.context.cell, 0) > self.context.joined:
                # From here on LOG counts nothing that this process holds, whoever that was: perhaps the one before it,
                # which is gone and was heard late.
                raise TrainerError(
                    "another process of this cell has joined",
                    where=self.context.instance,
                    remedy="its supervisor starts it again, and it joins anew",
                )
            if self.view.given_up:
                raise TrainerError(
                    "this process did not answer for so long that its batch went on without it",
                    where=self.context.instance,
                    remedy="its supervisor starts it again, and it joins anew",
                )

    def _fold(self, event: Event) -> None:
        self.view.fold(event)
        self.watch.fold(event)

    async def until(self, condition: Callable[[], bool], *, timeout_s: float | None = None) -> bool:
        """Whether the condition over `view` came true, at the latest after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            return False
        return True

    async def until_folded(self, seq: int) -> None:
        """Until `view` holds LOG up to `seq`."""
        await self.until(lambda: self._folded >= seq)

    async def say(
        self,
        kind: str,
        entity: str,
        data: Value,
        *,
        id: str,
        causation: int = 0,
        claim: tuple[str, int] | None = None,
    ) -> int:
        """Says a fact and returns when `view` holds it, so that the next turn is taken on what follows from it."""
        seq = await self.context.say(kind, entity, data, id=id, causation=causation, claim=claim)
        await self.until_folded(seq)
        return seq

    async def say_next(
        self, kind: str, entity: str, data: Value, *, id: str, check: Callable[[], None] = lambda: None
    ) -> None:
        """Says a fact as the next of all that trainers say: what a process says late, after its end, is refused, because the
        one that took its place has spoken. `check` looks at `view` before each attempt, and raises where the fact is none
        any more."""
        scope, log = streams.owner_filter(self.context.run, "trainer"), streams.log_stream(self.context.run)
        while True:
            last = await self.context.bus.last_for(log, scope)
            assert last is not None, "whoever says something has joined"
            await self.until_folded(last.seq)
            check()
            try:
                await self.say(kind, entity, data, id=id, claim=(scope, last.seq))
            except Conflict:
                await asyncio.sleep(0)
            else:
                return

    async def in_thread(self, act: Callable[[], T]) -> T:
        done: T = await self._worker(act)
        return done

    def now(self) -> float:
        """Seconds of the loop's clock, which a simulation moves."""
        return asyncio.get_running_loop().time()

    def close(self) -> None:
        """Waits for what runs in the thread."""
        self._worker.close()
