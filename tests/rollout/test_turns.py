"""A cell gives one turn at a time, whoever asks."""

from __future__ import annotations

import asyncio

import pytest

from services.mesh.http import HttpClient
from services.proxy.engine import TURN_HEADER as SENT
from services.proxy.engine import EngineBusy, EngineError, Engines
from services.proxy.routes import Route
from services.rollout.turns import TURN_HEADER, Turns
from tests.proxy.test_moves_random import VirtualLoop
from tests.rollout.stage import Stage, running


async def test_of_two_suspects_one_is_sent_away_until_the_other_has_its_answer(stage: Stage) -> None:
    async with running(stage):
        url = (await stage.seen("cell.joined")).data.url
        route = Route(attempt=0, cell="cell-0", epoch=0, url=url)
        client = HttpClient()

        async def ask(turn_s: float) -> None:
            """What the engine on the stage says is no answer of SGLang's."""
            with pytest.raises(EngineError) as error:
                await Engines(client).generate(
                    route, rid="r", input_ids=[b"1"], temperature=1.0, max_new_tokens=1, stop_ids=[], turn_s=turn_s
                )
            if isinstance(error.value, EngineBusy):
                raise error.value

        first = asyncio.create_task(ask(3600.0))
        await stage.engine.started.wait()
        with pytest.raises(EngineBusy, match="another suspect"):
            await ask(3600.0)
        stage.engine.started.clear()
        neighbour = asyncio.create_task(ask(0.0))
        await stage.engine.started.wait()
        stage.engine.release.set()
        await asyncio.gather(first, neighbour)
        await ask(3600.0)
        await client.aclose()


def test_a_turn_ends_by_itself_and_is_given_back_once() -> None:
    async def main() -> None:
        turns = Turns()
        headers = {TURN_HEADER: "10.0"}
        first = turns.take(headers)
        assert first is not None and turns.take(headers) is None and turns.take({}) is not None
        await asyncio.sleep(10.0)
        second = turns.take(headers)
        assert second is not None
        turns.give_back(first)
        assert turns.take(headers) is None, "the second still has it"
        turns.give_back(second)
        assert turns.take(headers) is not None

    assert SENT == TURN_HEADER
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())
