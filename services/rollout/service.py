"""A cell's rollout side: its engine behind a small gate, its changes of role, and the weights that it pulls.

Invariants: a call is accepted only with the cell's current epoch and only while it serves, so a lagging proxy is
harmless; an engine that (re)joins serves nobody before it holds the version published last, and where that can't be
pulled, because the process that exposed it is gone, it waits a bounded time for the next exposure; a cell that leaves
for training waits a bounded time for its calls to move away, then aborts what is left, so nobody can hold it back; an
abort is taken at any epoch; when the run is finished it changes nothing any more, and one that starts then rests.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from schemas import events as e
from schemas.errors import EngineError
from schemas.ids import cell_index
from schemas.units import Phase
from services.mesh.service import Context, announce, rest
from services.rollout.adapter import EngineAdapter, EngineDied, ReferenceAdapter
from services.rollout.cell_role import CellRole
from services.rollout.turns import Turns

EPOCH_HEADER = "x-gyre-epoch"
ABORT_AGAIN_S = 0.5
"""Seconds between two aborts of all calls that are left."""
PULL_AGAIN_S = 1.0
"""Seconds until the same exposure is tried again."""
EXPOSED_S = 300.0
"""How long the published weights may be out of reach before the cell gives up."""
ABOUT = ("cell", "weights", "service", "run")
"""What the process follows in LOG."""


async def serve(context: Context, *, adapter: EngineAdapter | None = None) -> None:
    config = context.config
    if adapter is None:
        adapter = ReferenceAdapter(
            config=config.rollout,
            model=context.path(config.policy.path),
            max_running=config.cells.capacity_of(context.cell) * 2,
            folder=context.folder / "engines" / context.cell,
        )
    cell = RolloutCell(context, adapter)
    try:
        await cell.run()
    finally:
        await adapter.stop()


class RolloutCell:
    def __init__(self, context: Context, adapter: EngineAdapter) -> None:
        self._context, self._adapter = context, adapter
        self.role = CellRole(cell=context.cell)
        self.version = 0
        """What the engine holds; -1 while its memory is released."""
        self.in_flight = 0
        self._turns = Turns()
        self._idle = asyncio.Event()
        self._idle.set()
        self._joined = False
        self._changed = asyncio.Event()
        """LOG was folded into `role`."""
        self._folded = 0
        self._unreachable: float | None = None
        """Since when the published weights can't be pulled; seconds of the loop."""

    def __repr__(self) -> str:
        role = self.role
        return f"<RolloutCell {role.cell} [{role.stand}, epoch {role.epoch}, v{self.version}, {self.in_flight} calls]>"

    async def run(self) -> None:
        """Until cancelled; raises EngineError when the engine's process ends."""
        context = self._context
        past, position = await context.history(about=ABOUT)
        for event in past:
            self.role.fold(event)
        if self.role.over:
            await rest(context)
        context.health.post("/generate", self.generate)
        context.health.post("/abort_request", self.abort)
        context.health.ready = lambda: "" if self._joined or self.role.over else "the engine is starting"
        context.health.gauge("gyre_calls_in_flight", "Calls at this cell's engine", lambda: self.in_flight)
        context.health.gauge("gyre_engine_version", "Policy version of the engine", lambda: self.version)
        self._folded = position
        await self._adapter.start()
        await announce(context)
        follow = asyncio.create_task(self._follow(position))
        work = asyncio.create_task(self._work())
        died = asyncio.create_task(self._adapter.died())
        tasks: list[asyncio.Task[Any]] = [follow, work, died]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if died.done():
                raise EngineError(
                    f"the engine ended with code {died.result()}",
                    where=str(context.folder / "engines" / context.cell / "engine.log"),
                    remedy="the supervisor starts it again; read its log when it keeps ending",
                )
            for each in (follow, work):
                if each.done():
                    each.result()
        finally:
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, position: int) -> None:
        async for event in self._context.events(position, about=ABOUT):
            self._folded = event.seq
            self.role.fold(event)
            self._changed.set()
            if self.role.given_up:
                raise EngineError(
                    "this process did not answer for so long that others took its executions",
                    where=self._context.instance,
                    remedy="its supervisor starts it again, and it joins anew",
                )

    async def _work(self) -> None:
        """What is to be done next, one thing at a time; `role` says what, LOG changes it meanwhile."""
        role = self.role
        # A fresh engine has its memory and the starting policy, which nobody exposes.
        starting = role.stand == "returning" and role.exposure is None
        if role.stand in ("training", "waiting", "returning") and not starting:
            await self._adapter.release_memory()
            self.version = -1
        while True:
            self._changed.clear()
            if role.over:
                await self._changed.wait()
            elif self._behind:
                await self._renew()
            elif not self._joined:
                await self._join()
            elif role.turn == "leave":
                await self._leave()
            elif role.turn == "return":
                await self._return()
            else:
                await self._changed.wait()

    @property
    def _behind(self) -> bool:
        """Whether the engine is to serve and holds another version than the one published last."""
        role = self.role
        return role.exposure is not None and role.stand in ("serving", "arrived") and self.version != role.published

    async def _leave(self) -> None:
        """draining -> drained -> released; what is in flight moves away first."""
        move = (self.role.cause, self.role.epoch)
        await self._say_phase("draining", 0.0, target="train", move=move)
        start = _now()
        await self._drain()
        await self._say_phase("drained", _now() - start, target="train", move=move)
        start = _now()
        await self._adapter.release_memory()
        self.version = -1
        await self._say_phase("released", _now() - start, target="train", move=move)

    async def _drain(self) -> None:
        """Until no call is here. The proxies move calls by themselves; this is the bound on how long they may take."""
        if await self._emptied(self._context.config.rollout.drain_s):
            return
        self._context.log.warning("calls that did not move are aborted", calls=self.in_flight)
        # Again and again: an abort that overtakes its call on the way to the engine finds nothing.
        while True:
            await self._adapter.abort_all()
            if await self._emptied(ABORT_AGAIN_S):
                return

    async def _emptied(self, seconds: float) -> bool:
        """Whether no call is left within the time."""
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def _return(self) -> None:
        """Memory again, the published weights, then `acquired` with their version."""
        start, move = _now(), (self.role.cause, self.role.epoch)
        if self.role.exposure is not None:
            await self._adapter.resume_memory()
            # Once more where others were published meanwhile: it never says that it came back with old ones.
            while not await self._pull() or self.version != self.role.published:
                if self.role.over:
                    return
        elif self.version < 0:
            raise EngineError(
                "the engine gave the starting policy away, and no version was published yet",
                where=self._context.instance,
                remedy="its supervisor starts it again, with the starting policy",
            )
        await self._say_phase("acquired", _now() - start, target="rollout", move=move)

    async def _renew(self) -> None:
        """The published weights, into an engine that serves or has just started. Said of those that were serving:
        whoever joins says its version then."""
        role, start = self.role, _now()
        (exposed, seq), size, kind = role.exposed, role.bytes, str((role.exposure or {}).get("kind", ""))
        if not await self._pull() or not self._joined:
            return
        seconds = _now() - start
        said = await self._context.say(
            "weights.published",
            role.cell,
            e.WeightsPublished(version=self.version, bytes=size, seconds=seconds, transport=kind),
            id=f"{exposed}.{role.cell}.published",
            causation=seq,
        )
        await self._until_folded(said)

    async def _pull(self) -> bool:
        """Whether the engine holds the published weights now. If not, they were out of reach and it is time to look at
        the role again: they are exposed anew, or a little later. Raises EngineError when that lasts too long."""
        role = self.role
        exposure, version, stand = role.exposure, role.published, role.stand
        assert exposure is not None, "memory comes back only after a publication"
        try:
            await self._adapter.pull_weights(exposure, version)
        except EngineError as error:
            now = _now()
            if self._unreachable is None:
                self._context.log.warning("published weights are out of reach", version=version, what=str(error))
            self._unreachable = self._unreachable or now
            if now - self._unreachable > EXPOSED_S and not role.over:
                raise
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PULL_AGAIN_S):
                    while role.exposure is exposure and role.stand == stand and not role.over:
                        self._changed.clear()
                        await self._changed.wait()
            return False
        self.version, self._unreachable = version, None
        return True

    async def _join(self) -> None:
        context = self._context
        await context.say(
            "cell.joined",
            self.role.cell,
            e.CellJoined(
                index=cell_index(self.role.cell),
                capacity=context.config.cells.capacity_of(self.role.cell),
                url=context.health.url,
                engine=self._adapter.engine,
                version=max(self.version, 0),
                capabilities=self._adapter.capabilities,
            ),
            id=f"{context.run}.{self.role.cell}.joined.{context.pid}.{context.clock.now_us()}",
        )
        self._joined = True

    async def _say_phase(
        self, phase: Phase, seconds: float, *, target: Literal["rollout", "train"], move: tuple[tuple[str, int], int]
    ) -> None:
        """`move` is the cause and the epoch that this is a phase of: another one may have been decided meanwhile. What an
        earlier process said of it isn't said again: its id may be forgotten."""
        (decision, seq), epoch = move
        if self.role.epoch == epoch and phase in self.role.said:
            return
        said = await self._context.say(
            "cell.role-transition",
            self.role.cell,
            e.CellRoleTransition(
                phase=phase,
                source="rollout" if target == "train" else "train",
                target=target,
                epoch=epoch,
                seconds=seconds,
                version=self.version,
            ),
            id=f"{decision}.{phase}.0",
            causation=seq,
        )
        await self._until_folded(said)

    async def _until_folded(self, seq: int) -> None:
        """Until `role` holds what was said, so that the next turn is taken on what follows from it."""
        while self._folded < seq:
            self._changed.clear()
            await self._changed.wait()

    async def generate(self, headers: Mapping[str, str], body: bytes) -> tuple[int, bytes]:
        """A call, as far as its epoch lets it: status and body."""
        epoch, role = headers.get(EPOCH_HEADER, ""), self.role
        if epoch != str(role.epoch) or not role.accepting or not self._joined:
            error = {
                "type": "stale_epoch",
                "epoch": role.epoch,
                "accepting": role.accepting,
                "message": f"{role.cell} is at epoch {role.epoch} ({role.stand}), the call at {epoch or 'none'}",
            }
            return 409, msgspec.json.encode({"error": error})
        turn = self._turns.take(headers)
        if turn is None:
            return 503, msgspec.json.encode({"error": {"type": "not_its_turn", "message": "another suspect has its turn"}})
        self.in_flight += 1
        self._idle.clear()
        try:
            return await self._adapter.generate(body)
        except EngineError as error:
            return _unreachable(error)
        finally:
            self._turns.give_back(turn)
            self.in_flight -= 1
            if self.in_flight == 0:
                self._idle.set()

    async def abort(self, headers: Mapping[str, str], body: bytes) -> tuple[int, bytes]:
        """Taken at any epoch."""
        try:
            return await self._adapter.abort(body)
        except EngineError as error:
            return _unreachable(error)


def _unreachable(error: EngineError) -> tuple[int, bytes]:
    kind = "engine_died" if isinstance(error, EngineDied) else "engine_unreachable"
    return 502, msgspec.json.encode({"error": {"type": kind, "message": error.what}})


def _now() -> float:
    """Seconds of the loop's clock, which a simulation moves."""
    return asyncio.get_running_loop().time()
