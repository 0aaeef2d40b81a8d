"""A proxy over several scripted engines, a mover that drains them at drawn points, and one harness that runs through it.

`check` compares what was recorded with what was played: every sampled token of every record with its log-probability,
version and engine, and every answer in exactly one record.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import msgspec

from schemas.records import CallRecord, Delivery
from services.mesh.chat import ChatTokenizer
from services.mesh.tokens import make_token
from tests.harnesses.engine import Live, ScriptedEngine
from tests.harnesses.sandbox import Sandbox, started
from tests.harnesses.script import Play, Rule, Script
from tests.proxy.world import EXECUTION, SECRET, World, until

ENGINES = 3
CONTEXT = 4_000_000
"""A token is a byte here, so contexts are some four times as long as with a tokenizer that merges."""
HARNESS_S = 300


class Stage:
    def __init__(self, world: World, script: Script, engines: list[ScriptedEngine], folder: Path) -> None:
        self.world, self.script, self.engines, self.folder = world, script, engines, folder
        self.home = folder / "home"
        self.work = folder / "work"
        self.output = folder / "output"
        self.home.mkdir()
        self.work.mkdir()
        self.cell, self.epoch = 0, 1
        self.moves: Counter[str] = Counter()
        self._sandbox: Sandbox | None = None

    @property
    def token(self) -> str:
        """What the harness has to show."""
        return make_token(SECRET, EXECUTION, 0)

    async def move(self, target: int) -> None:
        """The scheduler moves the execution; the engine that it leaves refuses calls of the old epoch from now on."""
        self.epoch += 1
        source, self.cell = self.cell, target
        self.engines[source].min_epoch = self.epoch
        await self.world.move(f"cell-{source}", f"cell-{target}", self.epoch)

    async def run(self, command: list[str], env: Mapping[str, str]) -> int:
        """The exit code of the harness. It has a home and a folder of its own, and no network but the proxy."""
        own = {"PATH": os.environ["PATH"], "HOME": str(self.home), "LANG": "C.UTF-8", "TERM": "dumb", **env}
        async with (
            started(command, url=self.world.url, env=own, cwd=self.work, output=self.output) as self._sandbox,
            asyncio.timeout(HARNESS_S),
        ):
            await self._serve()
            return await self._sandbox.process.wait()

    def cut(self) -> None:
        """Every connection to the proxy breaks."""
        assert self.world.context
        for connection in self.world.context.health._runner.server.connections:  # type: ignore[attr-defined]
            if connection.transport is not None:
                connection.transport.abort()

    async def restart(self, *, crash: bool) -> None:
        """The proxy ends, or dies with its connections, and another takes the execution over from the records."""
        if crash:
            self.cut()
        await self.world.kill()
        await until(lambda: not any(engine.live for engine in self.engines))
        self.script.forget({tuple(record.logprobs) for record in await self.records()})
        await self.world.start()
        await self._serve()

    async def _serve(self) -> None:
        if self._sandbox is not None:
            assert self.world.context
            await self._sandbox.serve(self.world.context.health._runner)  # type: ignore[attr-defined]

    def said(self) -> str:
        """What the harness printed, for the message of a failure."""
        return self.output.read_text() + self.output.with_suffix(".err").read_text()

    async def records(self) -> list[CallRecord]:
        """As they stand, with the deliveries that came later."""
        entries = await self.world.records()
        taken = {entry.call for entry in entries if isinstance(entry, Delivery)}
        return [
            msgspec.structs.replace(entry, delivered=entry.delivered or entry.call in taken)
            for entry in entries
            if isinstance(entry, CallRecord)
        ]

    async def check(self) -> list[CallRecord]:
        """The records, which hold exactly what was played."""
        assert not self.script.unscripted, self.script.unscripted[0].prompt[-2000:]
        assert not self.script.unused, f"never said: {self.script.unused}"
        records = await self.records()
        plays = {tuple(play.logprobs): play for play in self.script.plays}
        prompts: dict[str, list[int]] = {}
        for record in records:
            prompt = [*(prompts[record.parent] if record.parent else []), *record.input_ids]
            play = plays.pop(tuple(record.logprobs))
            assert record.output_ids == play.ids and prompt == play.prompt.tolist(), play
            assert record.finish == play.finish and record.versions == play.versions, play
            assert record.cell == play.cells[-1] and record.delivered, play
            prompts[record.call] = prompt + record.output_ids
        assert not plays, f"played, not recorded: {list(plays.values())}"
        rids = [call["rid"] for engine in self.engines for call in engine.calls]
        assert len(rids) == len(set(rids)) and {len(rid) for rid in rids} == {32}
        return records

    def by_name(self, records: list[CallRecord]) -> dict[str, CallRecord]:
        """Records by the rules that made them speak; a rule spoke once."""
        rules = {tuple(play.logprobs): play.rule for play in self.script.plays}
        named = {rules[tuple(record.logprobs)]: record for record in records}
        assert len(named) == len(records)
        return named


class Mover:
    """Holds calls at drawn points and moves the execution away: by the route alone, from an engine that gives all calls up
    first, or from one whose connections break. At some of these points the proxy is killed instead (`restarts` times at
    most), or the harness loses its connections just before an answer is there (`cuts` times at most)."""

    def __init__(self, stage: Stage, *, seed: int, often: float, restarts: int = 0, cuts: int = 0) -> None:
        self._stage, self._seed, self._often, self._restarts, self._cuts = stage, seed, often, restarts, cuts
        self._one = asyncio.Lock()

    def _draw(self, *of: object) -> random.Random:
        return random.Random("/".join(map(str, (self._seed, *of))))

    def hold(self, play: Play, start: int) -> int | None:
        draw = self._draw(play.rule, play.asked)
        return draw.randint(start, len(play.ids)) if draw.random() < self._often else None

    @contextlib.asynccontextmanager
    async def moving(self) -> AsyncIterator[None]:
        for engine in self._stage.engines:
            engine.hold = self.hold
        tasks = [asyncio.create_task(self._watch(engine)) for engine in self._stage.engines]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            done = await asyncio.gather(*tasks, return_exceptions=True)
            for error in done:
                if isinstance(error, Exception):
                    raise error

    async def _watch(self, engine: ScriptedEngine) -> None:
        stage = self._stage
        while True:
            live = await engine.held.get()
            async with self._one:
                if live.end.done() or live.rid not in engine.live:
                    continue
                if stage.engines[stage.cell] is engine and live.epoch == stage.epoch:
                    await self._disturb(engine, live)
                # Else its route moved already: it is about to be aborted.

    async def _disturb(self, engine: ScriptedEngine, live: Live) -> None:
        stage, here = self._stage, self._stage.engines.index(engine)
        draw = self._draw(live.play.rule, live.play.asked, "move")
        if self._restarts > stage.moves["restart"] and draw.random() < 0.5:
            stage.moves["restart"] += 1
            await stage.restart(crash=draw.random() < 0.5)
            return
        if self._cuts > stage.moves["cut"] and draw.random() < 0.5:
            stage.moves["cut"] += 1
            stage.cut()
            live.finish("release")
            return
        target = draw.choice([index for index in range(len(stage.engines)) if index != here])
        how = draw.choice(["moved", "drained", "lost"])
        stage.moves[how] += 1
        if how != "moved":
            engine.min_epoch = stage.epoch + 1
            engine.end_all("abort" if how == "drained" else "lose")
        await stage.move(target)


@contextlib.asynccontextmanager
async def staged(policy: Path, tokenizer: ChatTokenizer, folder: Path, rules: list[Rule]) -> AsyncIterator[Stage]:
    """A proxy with one execution, placed on the first of three engines of different policy versions."""
    script = Script(tokenizer, rules)
    engines = [
        ScriptedEngine(f"cell-{index}", script, version=7 + index, context_length=CONTEXT) for index in range(ENGINES)
    ]
    world = World(policy, folder / "proxy", context_length=CONTEXT, max_new_tokens=100_000)
    (folder / "proxy").mkdir()
    try:
        await world.bus.open_run()
        for engine in engines:
            await engine.start()
            await world.join(engine.cell, engine)
        await world.place()
        await world.start()
        yield Stage(world, script, engines, folder)
    finally:
        for engine in engines:
            engine.end_all("release")
        await world.stop()
        for engine in engines:
            await engine.stop()
