"""A training cell's process: follows LOG, changes roles, claims micro-steps, takes its part in updates, exposes weights.

The core trains, updates and exposes; a satellite pulls the core's weights, trains beside it and gives it its gradient.
Invariants: a micro-step is trained only by who won its claim, on the batch's version; what a process held when it ended
is released before anything of it is trained again; the version that engines serve can be pulled whenever the core runs;
a core that starts again says which version it goes on from, and none is older than what engines serve.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import msgspec

from schemas import events as e
from schemas import streams
from schemas.errors import Conflict
from schemas.units import CellRole, GapStats
from services.mesh.service import Context, announce, rest
from services.trainer.batch_view import CORE, BatchView, OpenBatch
from services.trainer.batch_work import BatchWork
from services.trainer.cell_process import CellProcess, Worker
from services.trainer.restoring import Restoring
from services.trainer.weights_exchange import WeightsExchange

if TYPE_CHECKING:
    from services.mesh.weights.transport import WeightAddress
    from services.trainer.cell import Cell
    from services.trainer.prefix_group import PrefixGroup
    from services.trainer.weights_exchange import Flat, Purpose


Build = Callable[[Context], "Cell"]
OpenGroup = Callable[[bool], "PrefixGroup"]
"""Whether this process lends the store on which groups meet; to its end of them."""
OpenExchange = Callable[[str], WeightsExchange]


async def serve(
    context: Context,
    *,
    build: Build | None = None,
    open_group: OpenGroup | None = None,
    open_exchange: OpenExchange = WeightsExchange,
    worker: Worker | None = None,
) -> None:
    """Runs until cancelled. A `worker` may also wait for what the parts of a simulation return."""
    trainer = CellTrainer(
        context,
        build=build or build_cell,
        open_group=open_group or open_prefix_group,
        open_exchange=open_exchange,
        worker=worker,
    )
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


def open_prefix_group(host: bool) -> PrefixGroup:
    """This process's end; `host` in the core, whose process lends the store."""
    from services.trainer.prefix_group import PrefixGroup

    return PrefixGroup(host=host)


class CellTrainer:
    """The view is what LOG says, the cell what the hardware holds; `_work` makes the second follow the first."""

    def __init__(
        self,
        context: Context,
        *,
        build: Build,
        open_group: OpenGroup = open_prefix_group,
        open_exchange: OpenExchange = WeightsExchange,
        worker: Worker | None = None,
    ) -> None:
        self._context, self._build = context, build
        self._open_group, self._open_exchange = open_group, open_exchange
        self._process = CellProcess(context, worker)
        self._restoring = Restoring(self._process)
        self._core = context.cell == CORE
        self._cell: Cell | None = None
        self._group: PrefixGroup | None = None
        self._exchange: WeightsExchange | None = None
        self._overtaken: Flat | None = None
        """Weights of the published version, which an earlier process exposed and whose training has gone on since."""

    @property
    def view(self) -> BatchView:
        return self._process.view

    @property
    def cell(self) -> Cell:
        assert self._cell is not None
        return self._cell

    async def run(self) -> None:
        """Until cancelled. Raises TrainerError where a batch cannot be trained."""
        context, process = self._context, self._process
        await process.read_past()
        if self.view.over:
            await rest(context)
        context.health.ready = lambda: "" if self._cell else "building the model"
        context.health.gauge("gyre_training_version", "Version in the training cell", lambda: self.view.stepped)
        self._cell = await process.in_thread(self._start_cell)
        self._group = await process.in_thread(lambda: self._open_group(self._core and self.view.shared))
        self._exchange = await process.in_thread(lambda: self._open_exchange(context.config.rollout.transport))
        context.log.info("weights travel", kind=self._exchange.kind, reason=self._exchange.reason)
        await announce(context)
        follow = asyncio.create_task(process.follow())
        watch = asyncio.create_task(self._watch())
        work = asyncio.create_task(self._work(BatchWork(process, self._cell, self._group, self._exchange)))
        try:
            done, _ = await asyncio.wait({follow, watch, work}, return_when=asyncio.FIRST_COMPLETED)
            for finished in done:
                finished.result()
        finally:
            for task in (follow, watch, work):
                task.cancel()
            await asyncio.gather(follow, watch, work, return_exceptions=True)

    async def close(self) -> None:
        for held in (self._exchange, self._group, self._cell):
            if held is not None:
                await self._process.in_thread(held.close)
        self._process.close()

    async def _watch(self) -> None:
        """The core waits for satellites, and nobody else does; without any there is nobody to look after."""
        if self._core and self.view.shared:
            await self._process.watch.run()
        else:
            await asyncio.Event().wait()

    async def _work(self, work: BatchWork) -> None:
        process, cell = self._process, self.cell
        await process.until_folded(self._context.joined)
        if self._core and not self.view.over:
            await self._restoring.tell(cell)
        while True:
            process.changed.clear()
            await work.finish()
            reissuable = self._overtaken is not None
            turn = self.view.turn(version=cell.version, reduced=work.reduced, reissuable=reissuable)
            if turn == "acquire":
                await self._acquire(work)
            elif turn == "release":
                start, cause, epoch = process.now(), self.view.cause, self.view.epoch
                await work.part()
                await process.in_thread(cell.release)
                await self._say_phase("released", "rollout", process.now() - start, cause, epoch)
            elif turn == "reissue":
                await self._reissue()
            elif turn == "expose":
                await self._expose()
            elif turn == "give-back":
                await self._give_back(self._open_batch())
            elif turn == "renew":
                await work.renew()
            elif turn == "reduce":
                await work.reduce(self._open_batch())
            elif turn == "update":
                await work.update(self._open_batch())
            elif turn == "claim":
                await self._micro_step(work, self._open_batch())
            else:
                await process.changed.wait()

    def _open_batch(self) -> OpenBatch:
        assert self.view.batch is not None
        return self.view.batch

    def _start_cell(self) -> Cell:
        """In the role that the log gives it; the core with the last version that was stepped, which others pull."""
        cell = self._build(self._context)
        if self._core:
            self._overtaken = self._restoring.load(cell)
        if not self.view.holds_memory:
            cell.release()
        return cell

    async def _give_back(self, batch: OpenBatch) -> None:
        """What nobody holds any more is free again: the gradients are gone with a process or with a cell's place."""
        context, process = self._context, self._process
        for name in self.view.astray:
            scope = streams.aggregate_filter(context.run, "micro-step", name)
            last = await context.bus.last_for(streams.log_stream(context.run), scope)
            assert last is not None
            await process.until_folded(last.seq)
            if self.view.batch is not batch or name not in self.view.astray:
                continue
            mine = batch.claimed[name] == context.cell
            released = e.MicroStepReleased(
                batch=batch.id, reason="the cell started again" if mine else f"{batch.claimed[name]} was put out"
            )
            # Somebody said something of it meanwhile: the next turn looks again.
            with contextlib.suppress(Conflict):
                await process.say(
                    "micro-step.released",
                    name,
                    released,
                    id=f"{context.run}.{name}.released.{last.seq}",
                    claim=(scope, last.seq),
                )

    async def _acquire(self, work: BatchWork) -> None:
        """Training memory and, in a satellite, the weights of the batch that is open or will be next."""
        start, cause, epoch = self._process.now(), self.view.cause, self.view.epoch
        await self._process.in_thread(self.cell.acquire)
        if not self._core:
            await work.pull()
            if self.cell.version != self.view.stepped:
                return
        await self._say_phase("acquired", "train", self._process.now() - start, cause, epoch)

    async def _say_phase(
        self,
        phase: Literal["acquired", "released"],
        target: CellRole,
        seconds: float,
        cause: tuple[str, int],
        epoch: int,
    ) -> None:
        """`cause` and `epoch` of the move that this is a phase of: another one may have been decided meanwhile."""
        decision, seq = cause
        await self._process.say(
            "cell.role-transition",
            self._context.cell,
            e.CellRoleTransition(
                phase=phase,
                source="rollout" if target == "train" else "train",
                target=target,
                epoch=epoch,
                seconds=seconds,
                version=self.cell.version,
            ),
            id=f"{decision}.{phase}.0",
            causation=seq,
        )

    async def _micro_step(self, work: BatchWork, batch: OpenBatch) -> None:
        from schemas.micro_steps import decode as decode_micro_step

        context, process, cell = self._context, self._process, self.cell
        name, free = min(batch.free.items(), key=lambda item: item[1].seq)
        scope = streams.aggregate_filter(context.run, "micro-step", name)
        me = context.joined
        claimed = e.MicroStepClaimed(batch=batch.id, cell=context.cell, epoch=self.view.epoch, process=me)
        try:
            seq = await process.say(
                "micro-step.claimed",
                name,
                claimed,
                id=f"{free.id}.claimed.{context.cell}.{me}",
                causation=free.seq,
                claim=(scope, free.seq),
            )
        except Conflict:
            # What won lies in LOG behind `free`, and `view` will show it.
            await process.until(lambda: self.view.batch is not batch or batch.free.get(name) != free)
            return
        await work.begin(batch)
        micro_step = decode_micro_step(await context.bus.get_blob(free.blob))
        start = process.now()
        stats = await process.in_thread(lambda: cell.micro_step(micro_step))
        done = e.MicroStepDone(
            batch=batch.id,
            cell=context.cell,
            loss=stats.loss,
            tokens=stats.tokens,
            targets=stats.targets,
            executions=len(stats.masked),
            masked=sum(stats.masked),
            gap=GapStats(sum_abs=stats.gap_sum, max_abs=stats.gap_max, count=stats.gap_count),
            seconds=process.now() - start,
        )
        id = f"{free.id}.done.{context.cell}.{me}"
        try:
            # It answers the claim: what a process says late, after its end, may not follow the release.
            await process.say("micro-step.done", name, done, id=id, causation=seq, claim=(scope, seq))
        except Conflict:
            # Only what this cell lost is released by another: LOG has put it out before that, and `finish` drops the
            # batch with this gradient. No update is due meanwhile, since the micro-step isn't done.
            await process.until(lambda: self.view.batch is not batch or batch.claimed.get(name) != context.cell)

    async def _expose(self) -> None:
        cell, exchange, purpose = self.cell, self._exchange, self.view.due
        assert exchange is not None and purpose != ""
        address = await self._process.in_thread(lambda: exchange.expose(cell, purpose))
        await self._say_exposed(address, purpose)

    async def _reissue(self) -> None:
        """The published weights once more: those who exposed them are gone, and engines may start again."""
        flat, exchange, version = self._overtaken, self._exchange, self.view.exposed
        assert exchange is not None and flat is not None
        address = await self._process.in_thread(lambda: exchange.expose_flat(flat, version, "publish"))
        await self._say_exposed(address, "publish")
        self._overtaken = None

    async def _say_exposed(self, address: WeightAddress, purpose: Purpose) -> None:
        context, group = self._context, self._group
        assert group is not None
        where = f"{address.peer}.{address.pointer}{address.name}"
        await self._process.say(
            "weights.exposed",
            context.cell,
            e.WeightsExposed(
                version=address.version,
                purpose=purpose,
                address=msgspec.to_builtins(address),
                bytes=address.bytes,
                rendezvous=group.rendezvous,
            ),
            # With the process that exposes it weights are gone: what is heard of them later counts for nobody.
            causation=context.joined,
            # Another process may expose at the same place.
            id=f"{context.run}.{context.cell}.exposed.{address.version}.{self.view.processes[context.cell]}.{where}",
        )
