"""The rest of a run for the trainers of its cells: what scheduler, packer and rollout cells say, and what LOG answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from schemas import events as e
from schemas import streams
from schemas.config_file import from_tree
from schemas.envelope import Event
from schemas.errors import TrainerError
from schemas.events import RunStarted
from schemas.micro_steps import MicroStep, encode
from services.mesh.bus import Bus
from services.mesh.clock import SystemClock
from services.mesh.codec import decode
from services.mesh.publisher import Publisher
from services.mesh.service import Context
from services.trainer.cell import Cell
from services.trainer.service import CellTrainer
from tests.mesh.contexts import context_of

RUN = "r-trainer"


class Stage:
    def __init__(
        self,
        bus: Bus,
        tmp: Path,
        build: Callable[[Context], Cell],
        *,
        trainable: int = 1,
        run: str = RUN,
        lost_s: float = 60.0,
    ) -> None:
        tree = {
            "name": "t",
            "harness": {"command": ["true"]},
            "steps": 2,
            "cells": {"trainable": trainable},
            "scheduler": {"N": 4, "B": 2, "mu": 2, "phi": 0.0},
            "rollout": {"transport": "shared-memory"},
            "trainer": {"lost_s": lost_s},
        }
        self.bus, self.clock, self.build = bus, SystemClock(), build
        self.started = RunStarted(seed=0, config=from_tree(tree, where="test"), tasks=[], code="test")
        self.tmp = tmp
        self.run = run
        self._said = 0

    def context(self, cell: str = "cell-0") -> Context:
        return context_of("trainer", self.bus, self.tmp, started=self.started, clock=self.clock, cell=cell)

    async def say(self, owner: str, kind: str, entity: str, data: Any) -> int:
        self._said += 1
        publisher = Publisher(bus=self.bus, clock=self.clock, run=self.run, owner=owner, instance=owner)
        return await publisher.say(kind, entity, data, id=f"{owner}.{kind}.{self._said}")

    async def enter_training(self, cell: str = "cell-0", *, epoch: int = 1) -> None:
        await self.decide_training(cell, epoch=epoch)
        await self.seen("cell.role-transition", entity=cell, phase="acquired", epoch=epoch)
        completed = e.CellRoleTransition(phase="completed", source="rollout", target="train", epoch=epoch)
        await self.say("scheduler", "cell.role-transition", cell, completed)

    async def decide_training(self, cell: str, *, epoch: int = 1) -> None:
        decided = e.CellRoleTransition(phase="decided", source="rollout", target="train", epoch=epoch)
        await self.say("scheduler", "cell.role-transition", cell, decided)
        released = e.CellRoleTransition(phase="released", source="rollout", target="train", epoch=epoch)
        await self.say("rollout", "cell.role-transition", cell, released)

    async def put_out(self, cell: str) -> int:
        failed = e.CellRoleTransition(phase="failed", source="train", target="rollout", epoch=1)
        return await self.say("scheduler", "cell.role-transition", cell, failed)

    async def send_back(self, cell: str) -> None:
        """A cell that was put out, and lives."""
        decided = e.CellRoleTransition(phase="decided", source="train", target="rollout", epoch=2)
        await self.say("scheduler", "cell.role-transition", cell, decided)
        await self.seen("cell.role-transition", entity=cell, phase="released", epoch=2)

    async def open_batch(self, index: int, *, version: int, final: bool) -> None:
        opened = e.BatchOpened(step=index, version=version, burst="u-000001", final=final, groups=2, members=["cell-0"])
        await self.say("scheduler", "batch.opened", f"b-{index:06d}", opened)

    async def close(self, batch: str, micro_steps: int, members: Sequence[str] = ("cell-0",)) -> None:
        """The stream's end, and the join window's once every micro-step is done."""
        closed = e.BatchStreamClosed(micro_steps=micro_steps, groups=["g-000000"])
        await self.say("packer", "batch.stream-closed", batch, closed)
        done: set[str] = set()
        async with self.bus.read(streams.log_stream(self.run), 0) as reader:
            async for stored in reader:
                event = decode(stored)
                if event.kind == "micro-step.done" and event.data.batch == batch:
                    done.add(event.entity)
                elif event.kind == "micro-step.released":
                    done.discard(event.entity)
                if len(done) == micro_steps:
                    break
        join = e.BatchJoinClosed(members=list(members), epochs=[1] * len(members))
        await self.say("scheduler", "batch.join-closed", batch, join)

    async def all_done_by(self, cell: str, micro_steps: int) -> None:
        """Until LOG says that this cell holds every gradient."""
        holders: dict[str, str] = {}
        async with self.bus.read(streams.log_stream(self.run), 0) as reader:
            async for stored in reader:
                event = decode(stored)
                if event.kind == "micro-step.done":
                    holders[event.entity] = event.data.cell
                elif event.kind == "micro-step.released":
                    holders.pop(event.entity, None)
                if list(holders.values()).count(cell) == micro_steps:
                    return

    async def enqueue(self, micro_step: MicroStep) -> None:
        blob = streams.micro_step_blob(micro_step.micro_step)
        await self.bus.put_blob(blob, encode(micro_step))
        data = e.MicroStepEnqueued(batch=micro_step.batch, index=0, blob=blob, tokens=micro_step.token_count, rows=[])
        await self.say("packer", "micro-step.enqueued", micro_step.micro_step, data)

    async def seen(self, kind: str, count: int = 1, *, entity: str = "", **wanted: Any) -> Event:
        async with self.bus.read(streams.log_stream(self.run), 0) as reader:
            async for stored in reader:
                event = decode(stored)
                if event.kind != kind or (entity and event.entity != entity):
                    continue
                if all(getattr(event.data, key) == value for key, value in wanted.items()):
                    count -= 1
                    if count == 0:
                        return event
        raise AssertionError("the log ended")

    async def log(self) -> list[Event]:
        end = await self.bus.last_seq(streams.log_stream(self.run))
        return [decode(s) async for s in self.bus.read_range(streams.log_stream(self.run), 0, end)]


@contextlib.asynccontextmanager
async def running(stage: Stage) -> AsyncIterator[asyncio.Task[None]]:
    context = stage.context()
    trainer = CellTrainer(context, build=stage.build)
    task = asyncio.create_task(trainer.run())
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, TrainerError):
            await task
        await trainer.close()
        await context.health.stop()
