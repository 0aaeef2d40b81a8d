"""A training cell's process: follows LOG, claims micro-steps, makes the update, keeps checkpoints, exposes weights.

Invariants: a micro-step is trained only by who won its claim; one optimizer step a batch, when every micro-step of the
closed stream is done; a version is durable before `batch.stepped` names it, and so before it is published; `view` is
changed by LOG alone, and what was said counts once LOG has shown it. Torch work runs in one thread of its own, so the
process keeps reading the log meanwhile.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec

from schemas import events as e
from schemas import streams
from schemas.errors import Conflict, TrainerError
from schemas.units import CellRole, GapStats, Value
from services.mesh.service import Context, announce
from services.mesh.weights.transport import Transport, WeightAddress, open_transport
from services.trainer.batch_view import BatchView, Free, OpenBatch

if TYPE_CHECKING:
    from services.trainer.cell import Cell

T = TypeVar("T")


async def serve(context: Context) -> None:
    trainer = CellTrainer(context, build=build_cell)
    try:
        await trainer.run()
    finally:
        await trainer.close()


def build_cell(context: Context) -> Cell:
    """The cell of this process, alone in its torch world, with the starting policy."""
    from services.trainer.cell import Cell
    from services.trainer.megatron import CellRanks, open_world
    from services.trainer.objective import ObjectiveTerms

    settings, s = context.config.trainer, context.config.scheduler
    open_world(CellRanks())
    return Cell(
        context.path(context.config.policy.path),
        settings,
        ObjectiveTerms(
            groups=s.B,
            executions=s.N,
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            ratio_cap=settings.ratio_cap,
            loss_cap=settings.loss_cap,
        ),
        scratch=context.folder / "training" / context.cell,
    )


class CellTrainer:
    """`view` is what LOG says, `_cell` what the hardware holds; `_work` makes the second follow the first."""

    def __init__(self, context: Context, *, build: Callable[[Context], Cell]) -> None:
        self._context, self._build = context, build
        self.view = BatchView(cell=context.cell)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="torch")
        self._changed = asyncio.Event()
        self._folded = 0
        """Sequence up to which `view` holds LOG."""
        self._cell: Cell | None = None
        self._transport: Transport | None = None
        self._exposures: list[WeightAddress] = []
        self._began = 0.0
        """When the batch in hand was first worked on; monotonic seconds."""

    @property
    def cell(self) -> Cell:
        assert self._cell is not None
        return self._cell

    async def run(self) -> None:
        """Until cancelled. Raises TrainerError where a batch cannot be trained."""
        context = self._context
        past, self._folded = await context.history()
        for event in past:
            self.view.fold(event)
        context.health.ready = lambda: "" if self._cell else "building the model"
        context.health.gauge("gyre_training_version", "Version in the training cell", lambda: self.view.stepped)
        self._cell = await self._in_thread(self._start_cell)
        self._transport = await self._in_thread(lambda: open_transport(context.config.rollout.transport))
        context.log.info("weights travel", kind=self._transport.kind, reason=self._transport.reason)
        await announce(context)
        follow = asyncio.create_task(self._follow(self._folded))
        work = asyncio.create_task(self._work())
        try:
            done, _ = await asyncio.wait({follow, work}, return_when=asyncio.FIRST_COMPLETED)
            for finished in done:
                finished.result()
        finally:
            follow.cancel()
            work.cancel()
            await asyncio.gather(follow, work, return_exceptions=True)

    async def close(self) -> None:
        if self._transport is not None:
            await self._in_thread(self._transport.close)
        if self._cell is not None:
            await self._in_thread(self._cell.close)
        self._thread.shutdown(wait=True)

    async def _follow(self, position: int) -> None:
        async for event in self._context.events(position):
            self.view.fold(event)
            self._folded = event.seq
            self._changed.set()

    async def _say(
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
        seq = await self._context.say(kind, entity, data, id=id, causation=causation, claim=claim)
        while self._folded < seq:
            self._changed.clear()
            await self._changed.wait()
        return seq

    async def _work(self) -> None:
        await self._resume()
        while True:
            self._changed.clear()
            turn = self.view.turn
            if turn == "acquire":
                await self._change_role("acquired", "train", self.cell.acquire)
            elif turn == "release":
                await self._change_role("released", "rollout", self.cell.release)
            elif turn == "expose":
                await self._expose(self.view.stepped)
            elif turn == "step":
                await self._step(self._open_batch())
            elif turn == "claim":
                await self._micro_step(self._open_batch())
            else:
                await self._changed.wait()

    def _open_batch(self) -> OpenBatch:
        assert self.view.batch is not None
        return self.view.batch

    def _start_cell(self) -> Cell:
        """With the last version that was stepped, in the role that the log gives it."""
        context, view = self._context, self.view
        cell = self._build(context)
        if view.stepped:
            path = view.checkpoints.get(view.stepped)
            if path is None:
                raise TrainerError(
                    f"version {view.stepped} has no checkpoint in the log",
                    where=context.instance,
                    remedy="start a new run; this one lost its last version",
                )
            cell.load(context.folder / path)
        if view.role != "train":
            cell.release()
        return cell

    async def _resume(self) -> None:
        """After a restart: gradients of the open batch are gone with the process, and so are the exposed weights."""
        view, context = self.view, self._context
        if view.batch is not None:
            mine = [name for name, cell in view.batch.claimed.items() if cell == context.cell]
            for name in sorted(mine):
                last = await context.bus.last_for(
                    streams.log_stream(context.run), streams.aggregate_filter(context.run, "micro-step", name)
                )
                assert last is not None
                await self._say(
                    "micro-step.released",
                    name,
                    e.MicroStepReleased(batch=view.batch.id, reason="the cell started again"),
                    id=f"{context.run}.{name}.released.{last.seq}",
                )
        if view.exposed and view.exposed == view.stepped:
            await self._expose(view.exposed)

    async def _change_role(
        self, phase: Literal["acquired", "released"], target: CellRole, act: Callable[[], None]
    ) -> None:
        start = time.monotonic()
        await self._in_thread(act)
        decision, seq = self.view.cause
        await self._say(
            "cell.role-transition",
            self._context.cell,
            e.CellRoleTransition(
                phase=phase,
                source="rollout" if target == "train" else "train",
                target=target,
                epoch=self.view.epoch,
                seconds=time.monotonic() - start,
                version=self.cell.version,
            ),
            id=f"{decision}.{phase}.0",
            causation=seq,
        )

    async def _micro_step(self, batch: OpenBatch) -> None:
        from schemas.micro_steps import decode as decode_micro_step

        context, cell = self._context, self.cell
        name, free = min(batch.free.items(), key=lambda item: item[1].seq)
        claim = (streams.aggregate_filter(context.run, "micro-step", name), free.seq)
        claimed = e.MicroStepClaimed(batch=batch.id, cell=context.cell, epoch=self.view.epoch)
        try:
            seq = await self._say(
                "micro-step.claimed",
                name,
                claimed,
                id=f"{free.id}.claimed.{context.cell}",
                causation=free.seq,
                claim=claim,
            )
        except Conflict:
            # What won lies in LOG behind `free`, and `view` will show it.
            await self._changed_from(name, free)
            return
        if cell.phase == "idle":
            cell.begin_batch()
            self._began = time.monotonic()
        micro_step = decode_micro_step(await context.bus.get_blob(free.blob))
        start = time.monotonic()
        stats = await self._in_thread(lambda: cell.micro_step(micro_step))
        done = e.MicroStepDone(
            batch=batch.id,
            cell=context.cell,
            loss=stats.loss,
            tokens=stats.tokens,
            targets=stats.targets,
            executions=len(stats.masked),
            masked=sum(stats.masked),
            gap=GapStats(sum_abs=stats.gap_sum, max_abs=stats.gap_max, count=stats.gap_count),
            seconds=time.monotonic() - start,
        )
        await self._say("micro-step.done", name, done, id=f"{free.id}.done.{context.cell}", causation=seq)

    async def _changed_from(self, name: str, free: Free) -> None:
        while self.view.batch is not None and self.view.batch.free.get(name) == free:
            self._changed.clear()
            await self._changed.wait()

    async def _step(self, batch: OpenBatch) -> None:
        """The update, its checkpoint, and only then the event that names the new version."""
        context, cell = self._context, self.cell
        if cell.phase == "idle":  # a batch whose groups had nothing to train
            cell.begin_batch()
            self._began = time.monotonic()
        result = await self._in_thread(cell.step)
        path = f"checkpoints/v{result.version:06d}"
        manifest = await self._in_thread(lambda: cell.save(context.folder / path))
        saved = e.CheckpointSaved(
            version=result.version,
            path=path,
            digest=manifest.digest,
            log_sequence=await context.bus.last_seq(streams.log_stream(context.run)),
        )
        cause = f"{context.run}.{batch.id}"
        await self._say("checkpoint.saved", f"v{result.version:06d}", saved, id=f"{cause}.saved.{manifest.digest}")
        done = batch.done.values()
        await self._say(
            "batch.stepped",
            batch.id,
            e.BatchStepped(
                step=batch.data.step,
                version=result.version,
                members=batch.data.members,
                loss=result.loss,
                grad_norm=result.grad_norm,
                lr=result.lr,
                micro_steps=result.micro_steps,
                tokens=sum(each.tokens for each in done),
                targets=sum(each.targets for each in done),
                executions=sum(each.executions for each in done),
                masked=sum(each.masked for each in done),
                reward=math.fsum(batch.rewards) / max(1, len(batch.rewards)),
                gap=GapStats(
                    sum_abs=math.fsum(each.gap.sum_abs for each in done),
                    max_abs=max((each.gap.max_abs for each in done), default=0.0),
                    count=sum(each.gap.count for each in done),
                ),
                seconds=time.monotonic() - self._began,
            ),
            id=f"{cause}.stepped",
        )
        await self._in_thread(self._drop_old_checkpoints)

    async def _expose(self, version: int) -> None:
        transport, cell = self._transport, self.cell
        assert transport is not None

        def expose() -> WeightAddress:
            return transport.expose(cell.flat_weights(), version)

        address = await self._in_thread(expose)
        self._exposures.append(address)
        # The version before is kept: an engine that started its pull late still finds what it was told.
        while len(self._exposures) > 2:
            old = self._exposures.pop(0)
            await self._in_thread(partial(transport.withdraw, old))
        await self._say(
            "weights.exposed",
            self._context.cell,
            e.WeightsExposed(
                version=version, purpose="publish", address=msgspec.to_builtins(address), bytes=address.bytes
            ),
            id=f"{self._context.run}.{self._context.cell}.exposed.{version}.{address.peer}.{address.pointer}{address.name}",
        )

    def _drop_old_checkpoints(self) -> None:
        keep = self._context.config.trainer.keep_checkpoints
        for version in sorted(self.view.checkpoints)[:-keep]:
            path = self._context.folder / self.view.checkpoints[version]
            if Path(path).exists():
                shutil.rmtree(path)

    async def _in_thread(self, act: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, act)
