"""How a cell's part of a batch begins and ends: gradients to the core, the update, new weights to the satellites.

Invariants: one optimizer step a batch, in the core, when the batch is settled and every member's gradient is added up;
a version is durable before `batch.stepped` names it, and so before it is exposed; the members add up copies, so that
after a failure each still has its own gradient, until LOG says that the batch was stepped. What was added up is what
LOG said as of one sequence, which `batch.stepped` names: a member that starts again, or is put out, between the sum and
that event gives back what is in the sum already, and what comes of it is dropped with the batch.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from schemas import events as e
from schemas import streams
from schemas.errors import TrainerError, TransportError
from schemas.units import GapStats
from services.trainer.batch_view import Meeting, OpenBatch
from services.trainer.cell_process import CellProcess

if TYPE_CHECKING:
    from services.trainer.cell import Cell, StepResult
    from services.trainer.prefix_group import PrefixGroup
    from services.trainer.weights_exchange import WeightsExchange

PATIENCE_S = 120.0
"""How long a member whose reduction failed waits for the one that is gone; then its own process is the one to blame."""
_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.2, 5.0
"""While members are missing, how long to wait for them before a look whether the meeting still stands: doubled each time."""


class BatchWork:
    """begin() -> micro-steps -> reduce() in a satellite, update() in the core -> finish() -> renew() in a satellite."""

    def __init__(self, process: CellProcess, cell: Cell, group: PrefixGroup, exchange: WeightsExchange) -> None:
        self._process, self._cell, self._group, self._exchange = process, cell, group, exchange
        self.reduced: Meeting | None = None
        """Where this satellite gave its gradient of the batch in hand."""
        self._batch = ""
        """Whose gradients the cell has."""
        self._as_of = 0
        """Sequence up to which LOG said what was added up last."""
        self._began = 0.0
        """When the batch in hand was first worked on; seconds of the loop."""

    async def begin(self, batch: OpenBatch) -> None:
        """Opens the batch in the cell, if it isn't open there."""
        if self._cell.phase == "idle":
            await self._process.in_thread(self._cell.begin_batch)
            self._batch, self._began = batch.id, self._process.now()

    async def finish(self) -> None:
        """Drops what the cell kept of a batch that LOG says was stepped or undone, or that goes on without it."""
        batch, role = self._process.view.batch, self._process.view.role
        if self._cell.phase == "batch" and (batch is None or batch.id != self._batch or role != "train"):
            await self._process.in_thread(self._cell.drop_batch)

    async def part(self) -> None:
        """Leaves the group, before the cell gives its memory away."""
        self.reduced = None
        await self._process.in_thread(self._group.leave)

    async def reduce(self, batch: OpenBatch) -> None:
        """A satellite's gradient goes to the core; zeros where it trained no micro-step."""
        meeting = self._process.view.meeting
        assert meeting is not None
        await self.begin(batch)
        if await self._add_up(meeting):
            self.reduced = meeting

    async def update(self, batch: OpenBatch) -> None:
        """The core's update, its checkpoint, and only then the event that names the new version."""
        process, cell, join = self._process, self._cell, batch.join
        assert join is not None
        await self.begin(batch)
        done = list(batch.done.values())
        self._as_of = process.folded
        if len(join.members) > 1:
            meeting = process.view.meeting
            assert meeting is not None
            if not await self._add_up(meeting):
                return
        result = await process.in_thread(cell.step)
        await self._save(batch, result)
        # With the process that made it an update is gone, unless it was said before.
        await process.say_next(
            "batch.stepped",
            batch.id,
            self._stepped(batch, join, done, result, as_of=self._as_of),
            id=f"{process.context.run}.{batch.id}.stepped",
        )
        if len(join.members) > 1 and not batch.data.final:
            await self._send_weights()
        await process.in_thread(self._drop_old_checkpoints)

    async def renew(self) -> None:
        """A satellite's weights after a step: the core's broadcast, or else what the core exposes, as after the burst's
        last step, when nothing is broadcast."""
        process, cell = self._process, self._cell
        sent = self.reduced is not None and self._group.joined and not process.view.final
        if sent and cell.version + 1 == process.view.stepped:
            self.reduced = None
            try:
                await self._receive(process.view.stepped)
            except TrainerError as error:
                process.context.log.warning("no broadcast", error=str(error))
        elif process.view.joinable:
            await self.pull()
        else:
            await process.changed.wait()

    async def pull(self) -> None:
        """Takes the newest exposure. Where it can't be read, waits for another one, but looks again after a second. Where
        there is none any more, the next turn shows what to do."""
        process, exposure = self._process, self._process.view.exposure
        if exposure is None:
            return
        try:
            await process.in_thread(lambda: self._exchange.pull(exposure.data, self._cell))
        except TransportError as error:
            process.context.log.warning("weights can't be pulled", version=exposure.data.version, error=str(error))
            await process.until(lambda: process.view.exposure is not exposure, timeout_s=1.0)

    async def _add_up(self, meeting: Meeting) -> bool:
        """Whether this member's gradient is in the core's; False when the meeting came to nothing, and the next turn
        shows what to do. Raises TrainerError where the reduction failed although nobody started again."""
        process, view = self._process, self._process.view
        gradients, trouble, look_s = await process.in_thread(self._cell.gradients), "", _FIRST_LOOK_S
        try:
            while not await process.in_thread(partial(self._group.meet, meeting, look_s)):
                look_s = min(2 * look_s, _LONGEST_LOOK_S)
                if view.meeting != meeting:
                    return False
                if self._group.trouble != trouble:
                    trouble = self._group.trouble
                    process.context.log.warning("the core's store", trouble=trouble or "answers again")
            await process.in_thread(lambda: self._group.reduce(gradients))
        except TrainerError as error:
            process.context.log.warning("gradients were not added up", error=str(error))
            patience = max(PATIENCE_S, 2 * process.context.config.trainer.lost_s)
            if not await process.until(lambda: view.meeting != meeting, timeout_s=patience):
                raise
            return False
        if view.meeting != meeting:
            # A member started again just now. What it trained would be in the sum, but LOG has taken it back.
            return False
        self._as_of = process.folded
        if meeting.rank == 0:
            await process.in_thread(lambda: self._cell.set_gradients(gradients))
        return True

    async def _send_weights(self) -> None:
        try:
            flat = await self._process.in_thread(self._cell.flat_weights)
            await self._process.in_thread(lambda: self._group.broadcast(flat))
        except TrainerError as error:
            # Whoever missed them pulls the exposure that follows.
            self._process.context.log.warning("weights were not sent", error=str(error))

    async def _receive(self, version: int) -> None:
        in_thread = self._process.in_thread
        flat = await in_thread(self._cell.flat_weights)
        await in_thread(lambda: self._group.broadcast(flat))
        await in_thread(lambda: self._cell.load_flat(flat, version=version))

    async def _save(self, batch: OpenBatch, result: StepResult) -> None:
        process, context = self._process, self._process.context
        path = f"checkpoints/v{result.version:06d}"
        manifest = await process.in_thread(lambda: self._cell.save(context.folder / path))
        saved = e.CheckpointSaved(
            version=result.version,
            path=path,
            digest=manifest.digest,
            log_sequence=await context.bus.last_seq(streams.log_stream(context.run)),
        )
        await process.say_next(
            "checkpoint.saved",
            f"v{result.version:06d}",
            saved,
            # Another process, after one that ended before its step, may have trained it again to the same bit.
            id=f"{context.run}.{batch.id}.saved.{process.view.processes[context.cell]}.{manifest.digest}",
        )

    def _stepped(
        self,
        batch: OpenBatch,
        join: e.BatchJoinClosed,
        done: list[e.MicroStepDone],
        result: StepResult,
        *,
        as_of: int,
    ) -> e.BatchStepped:
        return e.BatchStepped(
            step=batch.data.step,
            version=result.version,
            members=join.members,
            loss=math.fsum(each.loss for each in done),
            grad_norm=result.grad_norm,
            lr=result.lr,
            micro_steps=len(done),
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
            seconds=self._process.now() - self._began,
            as_of=as_of,
        )

    def _drop_old_checkpoints(self) -> None:
        context, view, checkpoints = self._process.context, self._process.view, self._process.view.checkpoints
        for version in sorted(checkpoints)[: -context.config.trainer.keep_checkpoints]:
            # The core exposes it again when it starts again, and goes back to it where nothing later can be loaded.
            if version == view.exposed:
                continue
            self._cell.discard(context.folder / checkpoints[version].path)
