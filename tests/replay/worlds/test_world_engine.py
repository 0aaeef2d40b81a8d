"""The scripted engine: what it samples, what moves and new weights make of an answer, and its faults."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from replay.virtual.life import Life
from replay.virtual.loop import VirtualLoop
from replay.worlds.encoder import ASSISTANT, CLOSE, END, OPEN
from replay.worlds.engine import WorldEngine, sample
from replay.worlds.world import EngineScript, Flat, World
from schemas.errors import EngineError
from services.proxy.engine import read_answer

SCRIPT = EngineScript(start_s=1, prefill_s=1, token_s=1, memory_s=1, pull_s=1)
RID = f"{7 << 8 | 3:032x}"
PROMPT = [2, 20, END, ASSISTANT]
Act = Callable[[WorldEngine], Awaitable[None]]


def play(loop: VirtualLoop, world: World, act: Act) -> None:
    """Runs `act` with a started engine, in the engine's life."""
    life = Life(loop, "rollout-cell-0")

    async def main() -> None:
        engine = WorldEngine(world, "cell-0", SCRIPT, life)
        await engine.start()
        await act(engine)

    life.begin(main())
    loop.run_until_complete(life.ended)


def asked(prompt: list[int], rid: str = RID, limit: int = 16) -> bytes:
    return msgspec.json.encode({"rid": rid, "input_ids": prompt, "sampling_params": {"max_new_tokens": limit}})


def test_an_answer_is_what_the_proxy_reads(loop: VirtualLoop, world: World) -> None:
    async def act(engine: WorldEngine) -> None:
        began = loop.time()
        status, data = await engine.generate(asked(PROMPT))
        sampled = read_answer(data, where="test")
        assert status == 200 and sampled.finish == "stop" and sampled.ids[-1] == END
        assert [(span.version, span.start, span.end) for span in sampled.versions] == [(0, 0, len(sampled.ids))]
        assert loop.time() - began == 1 + len(sampled.ids)

    play(loop, world, act)


def test_an_abort_gives_the_ids_so_far_and_the_rest_goes_on_from_them(loop: VirtualLoop, world: World) -> None:
    async def act(engine: WorldEngine) -> None:
        whole = sample(PROMPT, RID, 16)[0]
        assert OPEN in whole
        for count in range(len(whole)):
            call = asyncio.ensure_future(engine.generate(asked(PROMPT)))
            await asyncio.sleep(1 + count + 0.5)
            await engine.abort(b'{"rid":"another"}')
            await engine.abort(msgspec.json.encode({"rid": RID}))
            part = read_answer((await call)[1], where="test")
            assert (part.finish, part.ids) == ("abort", whole[:count])
            rest = read_answer((await engine.generate(asked(PROMPT + part.ids, rid=f"{5:032x}")))[1], where="test")
            both = part.ids + rest.ids
            assert both[-1] == END and both.count(OPEN) <= 1 and both.count(OPEN) == both.count(CLOSE)

    play(loop, world, act)


def test_a_limit_cuts(loop: VirtualLoop, world: World) -> None:
    async def act(engine: WorldEngine) -> None:
        sampled = read_answer((await engine.generate(asked(PROMPT, limit=2)))[1], where="test")
        assert (len(sampled.ids), sampled.finish) == (2, "length")

    play(loop, world, act)


def test_new_weights_in_mid_answer_make_two_spans(loop: VirtualLoop, world: World) -> None:
    trainer = Life(loop, "trainer")

    async def act(engine: WorldEngine) -> None:
        name = world.expose(Flat("abc", 3), 3, trainer)
        call = asyncio.ensure_future(engine.generate(asked(PROMPT)))
        await asyncio.sleep(2.5)
        await engine.pull_weights({"name": name}, 3)
        sampled = read_answer((await call)[1], where="test")
        assert [span.version for span in sampled.versions] == [0, 3]
        assert sampled.versions[0].end == 2
        trainer.kill()
        with pytest.raises(EngineError, match="nobody exposes"):
            await engine.pull_weights({"name": name}, 3)

    play(loop, world, act)
    assert world.violations == []


def test_weights_of_another_version_are_seen(loop: VirtualLoop, world: World) -> None:
    trainer = Life(loop, "trainer")

    async def act(engine: WorldEngine) -> None:
        await engine.pull_weights({"name": world.expose(Flat("abc", 2), 3, trainer)}, 3)

    play(loop, world, act)
    assert len(world.violations) == 1


def test_death_ends_every_request(loop: VirtualLoop, world: World) -> None:
    async def act(engine: WorldEngine) -> None:
        call = asyncio.ensure_future(engine.generate(asked(PROMPT)))
        await asyncio.sleep(0.5)
        world.engines["cell-0"].die(9)
        assert await engine.died() == 9
        for again in (call, engine.generate(asked(PROMPT)), engine.abort_all()):
            with pytest.raises(EngineError):
                await again
        assert world.engines == {}

    play(loop, world, act)


def test_a_hanging_engine_answers_nothing_until_it_wakes(loop: VirtualLoop, world: World) -> None:
    async def act(engine: WorldEngine) -> None:
        call = asyncio.ensure_future(engine.generate(asked(PROMPT)))
        await asyncio.sleep(0.5)
        began = loop.time()
        engine.hang(1000)
        with pytest.raises(EngineError, match="no answer"):
            await engine.abort(msgspec.json.encode({"rid": RID}))
        assert loop.time() - began == 120
        await call
        assert loop.time() - began == 1000

    play(loop, world, act)


def test_slow_is_for_a_time_and_memory_is_needed(loop: VirtualLoop, world: World) -> None:
    async def act(engine: WorldEngine) -> None:
        tokens = len(sample(PROMPT, RID, 16)[0])
        engine.slow(10, 5)
        for factor in (10, 1):
            began = loop.time()
            await engine.generate(asked(PROMPT))
            assert loop.time() - began == pytest.approx(factor * (1 + tokens))
        call = asyncio.ensure_future(engine.generate(asked(PROMPT)))
        await asyncio.sleep(0)
        await engine.release_memory()
        assert read_answer((await call)[1], where="test").finish == "abort"
        assert (await engine.generate(asked(PROMPT)))[0] == 503
        await engine.resume_memory()
        assert (await engine.generate(asked(PROMPT)))[0] == 200

    play(loop, world, act)


def test_scripts_depend_on_their_entity_alone(loop: VirtualLoop, world: World) -> None:
    def scripts(order: list[int]) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for index in order:
            name = f"e-{index:06d}.00"
            found[index] = (
                world.agent_script(name, 0),
                world.score_script(f"v-{index:06d}.00-0.1"),
                world.engine_script(f"cell-{index}", 0),
                world.cell_script(f"cell-{index}", 0),
            )
        return found

    assert scripts([0, 1, 2]) == scripts([2, 0, 1])
    assert world.score_script("v-000001.00-0.1").score == world.score_script("v-000001.00-0.2").score
