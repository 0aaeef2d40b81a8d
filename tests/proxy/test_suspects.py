"""A call that kills every engine that has it is given up; those that happen to be there are not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest
from aiohttp import web

from schemas.records import CallRecord, GivenUp
from services.mesh.chat import ChatTokenizer
from services.proxy.suspects import READ_S, SHORTEST_TURN_S, Suspicion, Turns
from services.rollout.turns import Turns as TurnsAtCell
from tests.proxy import test_chat_completions as chat
from tests.proxy import test_responses as responses
from tests.proxy.bodies import body_of, parse_events
from tests.proxy.conftest import MakeWorld
from tests.proxy.engines import Engine
from tests.proxy.test_moves_random import VirtualLoop
from tests.proxy.test_proxies import Pair, pair  # noqa: F401
from tests.proxy.world import EXECUTION, World, until

DIALECTS: dict[str, Callable[..., dict[str, Any]]] = {
    "/v1/messages": lambda **more: body_of("hi", **more),
    "/v1/chat/completions": lambda **more: chat.body_of(chat.said("user", "hi"), **more),
    "/v1/responses": lambda **more: responses.body_of({"role": "user", "content": "hi"}, **more),
}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell whose engine died is looked at again at once."""
    monkeypatch.setattr("services.proxy.calls.LONGEST_WAIT_S", 0.01)


@pytest.mark.parametrize("path", DIALECTS)
async def test_a_call_that_kills_one_engine_after_the_other_is_refused_for_good(
    world: World, engine: Engine, path: str
) -> None:
    engine.script += ["lost"] * 100
    for again in range(2):
        async with world.post(DIALECTS[path](), path) as response:
            said = (await response.json())["error"]
        assert response.status == 400 and said["type"] == "invalid_request_error", again
        assert "given up: 3 times in a row the engine was lost" in said["message"] and "cell-0" in said["message"]
    assert len(engine.calls) == 3, "no further engine is killed"
    engine.script.clear()
    await world.ask(body_of("something else"))
    (entry, call) = await world.records()
    assert isinstance(entry, GivenUp) and entry.cells == ["cell-0"] * 3 and isinstance(call, CallRecord)
    assert entry.prompt_tokens == len(engine.calls[0]["input_ids"])
    await world.kill()
    await world.start()
    assert await world.status(DIALECTS[path](), path) == 400, "the next life of the proxy knows it from the record"
    assert len(engine.calls) == 4
    await world.finish()
    assert (await world.event("execution.sealed")).data.records == 2


async def test_a_stream_that_has_begun_ends_with_the_error(world: World, engine: Engine) -> None:
    engine.script += ["lost"] * 3
    async with world.post(body_of("hi", stream=True)) as response:
        events = parse_events(await response.read())
    assert events[0]["type"] == "message_start" and events[-1]["error"]["type"] == "invalid_request_error"


async def test_losses_count_over_all_engines(world: World, engine: Engine, tokenizer: ChatTokenizer) -> None:
    other = await Engine(tokenizer).start()
    try:
        await world.join("cell-1", other)
        engine.script += ["lost", *["gone"] * 1000]
        other.script += ["lost"] * 2
        ask = asyncio.create_task(world.status(body_of("hi")))
        await engine.until(2)
        await world.move("cell-0", "cell-1", 3)
        assert await ask == 400
        (entry,) = await world.records()
        assert isinstance(entry, GivenUp) and entry.cells == ["cell-0", "cell-1", "cell-1"]
    finally:
        await other.stop()


@pytest.mark.parametrize("most", [2, 5])
async def test_how_many_are_too_many_is_configured(make_world: MakeWorld, engine: Engine, most: int) -> None:
    world: World = await make_world(most_losses=most)
    engine.script += ["lost"] * (most - 1)
    await world.ask(body_of("hi"))
    engine.script += ["lost"] * most
    assert await world.status(body_of("ho")) == 400


async def test_an_engine_that_was_gone_before_or_says_something_says_nothing_of_the_call(
    world: World, engine: Engine
) -> None:
    engine.script += ["gone", "stale", "full", "failed"] * 3
    await world.ask(body_of("hi"))
    assert len(await world.records()) == 1


async def test_after_a_token_the_count_begins_anew(world: World, engine: Engine) -> None:
    engine.script += ["lost", "lost", engine.say("one ", finish="abort"), "lost", "lost", engine.say("two")]
    assert (await world.ask(body_of("hi")))["content"] == [{"type": "text", "text": "one two"}]


class Batch(Engine):
    """Dies with all that it has as soon as one of its calls holds `poison` and `fuse` is set, as it is from the beginning;
    it is there again at once. Others stay in its batch until `release` is set. Gives turns as a cell does."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        super().__init__(tokenizer)
        self.deaths = 0
        self.turns = TurnsAtCell()
        self.batch: list[web.Request] = []
        self.fuse = asyncio.Event()
        self.fuse.set()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = msgspec.json.decode(await request.read())
        turn = self.turns.take(request.headers)
        if turn is None:
            return web.Response(status=503)
        self.batch.append(request)
        try:
            if "poison" in self.tokenizer.decode(body["input_ids"]):
                await self.fuse.wait()
                self.deaths += 1
                batch, self.batch = self.batch, []
                for each in batch:
                    assert each.transport is not None
                    each.transport.abort()
                return web.Response()
            await self.release.wait()
            return web.json_response(self.say("fine"))
        finally:
            self.turns.give_back(turn)
            self.batch = [each for each in self.batch if each is not request]


@pytest.mark.parametrize("neighbours", [1, 7])
async def test_neighbours_in_the_batch_are_not_blamed(
    make_world: MakeWorld, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch, neighbours: int
) -> None:
    """They are lost as often as the one who kills, and stay longer at the engine than a turn lasts."""
    monkeypatch.setattr("services.proxy.suspects.SHORTEST_TURN_S", 0.05)
    world: World = await make_world()
    cell = await Batch(tokenizer).start()
    try:
        await world.join("cell-0", cell)
        innocent = [f"e-000002.{number:02d}" for number in range(neighbours)]
        for name in innocent:
            await world.place(name)
        asks = [asyncio.create_task(world.ask(body_of("hi"), execution=name)) for name in innocent]
        while len(cell.batch) < neighbours:
            await asyncio.sleep(0)
        assert await world.status(body_of("poison")) == 400
        assert cell.deaths == 3
        cell.release.set()
        assert all(answer["stop_reason"] == "end_turn" for answer in await asyncio.gather(*asks))
        given_up = [entry.execution for entry in await world.records() if isinstance(entry, GivenUp)]
        assert given_up == [EXECUTION]
    finally:
        cell.release.set()
        await cell.stop()


@pytest.mark.parametrize("neighbours", [1, 3])
async def test_neighbours_that_another_proxy_serves_are_not_blamed(
    pair: Pair,  # noqa: F811
    tokenizer: ChatTokenizer,
    monkeypatch: pytest.MonkeyPatch,
    neighbours: int,
) -> None:
    """Each proxy has a suspect whose turn has come; the cell gives the turn to one of them."""
    monkeypatch.setattr("services.proxy.suspects.SHORTEST_TURN_S", 0.05)
    cell = await Batch(tokenizer).start()
    try:
        await pair.own.join("cell-1", cell)
        innocent = [f"e-000002.{number:02d}" for number in range(neighbours)]
        for name in innocent:
            await pair.own.place(name)
        for name in (EXECUTION, *innocent):
            await pair.own.move("cell-0", "cell-1", 2, execution=name)
            for world in (pair.own, pair.other):
                await until(lambda world=world, name=name: (r := world.routes.of(name)) and r.cell == "cell-1")  # type: ignore[misc]
        asks = [asyncio.create_task(pair.other.status(body_of("hi"), execution=name)) for name in innocent]
        await until(lambda: len(cell.batch) == neighbours)
        assert await pair.own.status(body_of("poison")) == 400
        cell.release.set()
        assert await asyncio.gather(*asks) == [200] * neighbours
        given_up = [entry.execution for entry in await pair.own.records() if isinstance(entry, GivenUp)]
        assert given_up == [EXECUTION] and cell.deaths == 3
    finally:
        cell.release.set()
        await cell.stop()


async def test_what_one_proxy_gives_up_no_other_asks_for(
    pair: Pair,  # noqa: F811
    tokenizer: ChatTokenizer,
) -> None:
    """Also where another stored something meanwhile that the one hasn't read."""
    cell = await Batch(tokenizer).start()
    try:
        await pair.own.join("cell-1", cell)
        await pair.own.move("cell-0", "cell-1", 2)
        for world in (pair.own, pair.other):
            await until(lambda world=world: world.routes.of(EXECUTION).cell == "cell-1")  # type: ignore[misc, union-attr]
        cell.fuse.clear()
        cell.release.set()
        ask = asyncio.create_task(pair.own.status(body_of("poison")))
        await until(lambda: len(cell.batch) == 1)
        await pair.other.ask(body_of("hi"))
        cell.fuse.set()
        assert await ask == 400
        assert await pair.other.status(body_of("poison", stream=True)) == 400
        assert cell.deaths == 3
        assert [type(entry) for entry in await pair.own.records()] == [CallRecord, GivenUp]
        await pair.own.finish()
        sealed = await pair.own.event("execution.sealed")
        assert sealed.data.records == 2
    finally:
        await cell.stop()


async def test_who_waits_for_a_turn_follows_its_route_and_ends_with_its_execution(
    world: World, engine: Engine, tokenizer: ChatTokenizer
) -> None:
    names = ["e-000002.00", "e-000002.01", "e-000002.02"]
    for name in names:
        await world.place(name)
    other = await Engine(tokenizer).start()
    try:
        await world.join("cell-1", other)
        engine.script += ["lost"] * 6
        engine.hold = True
        asks = [asyncio.create_task(world.ask(body_of("hi"), execution=name)) for name in names]
        await engine.until(7)
        (first,) = [name for name in names if world.flight(name)._suspicion._turn is not None]
        second, third = (name for name in names if name != first)
        await world.move("cell-0", "cell-1", 3, execution=second)
        await asks[names.index(second)]
        assert len(other.calls) == 1
        await world.finish(third)
        sealed = await world.event("execution.sealed")
        assert sealed.entity == third and sealed.data.records == 0
        engine.release.set()
        await asks[names.index(first)]
        await asyncio.gather(*asks, return_exceptions=True)
        assert len(engine.calls) == 7
    finally:
        await other.stop()


# one call's count, in virtual time


def in_virtual_time(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())


def call_of(turns: Turns, *, most: int = 3, tokens: int = 0, prompt: bytes = b"1,2") -> Suspicion:
    return Suspicion(turns, most=most, prompt_tokens=tokens, prompt=lambda: [prompt])


async def asked(call: Suspicion, seconds: float, *, lost: bool = True) -> bool:
    """One engine has the call for so long. Whether it is given up."""
    if call.suspect:
        await call.turn("cell-0")
    call.begin()
    try:
        await asyncio.sleep(seconds)
        return lost and call.lost("cell-0")
    finally:
        call.end()


def test_hosts_that_are_lost_one_after_the_other_in_a_long_call_are_not_its_fault() -> None:
    async def main() -> None:
        call = call_of(Turns(), tokens=100_000)
        for _ in range(20):
            assert not await asked(call, READ_S + 101.0)
        assert not await asked(call, 1.0) and not await asked(call, 1.0)
        assert not await asked(call, 3600.0), "an engine lived with it"
        assert not call.suspect

    in_virtual_time(main)


def test_one_that_kills_late_is_found_by_longer_turns() -> None:
    async def main() -> None:
        call = call_of(Turns())
        assert [await asked(call, seconds) for seconds in (1.0, 1.0, 25.0, 25.0)] == [False, False, False, True]
        assert len(call.cells) == 3

    in_virtual_time(main)


def test_turns_are_taken_one_after_the_other_at_each_cell() -> None:
    async def main() -> None:
        turns = Turns()
        calls = [call_of(turns, most=2, prompt=b"%d" % number) for number in range(3)]
        assert [await asked(call, 1.0) for call in calls] == [False] * 3
        clock = asyncio.get_running_loop().time
        begun, began = [], clock()

        async def holds(call: Suspicion) -> None:
            await call.turn("cell-0")
            begun.append(clock() - began)
            call.begin()
            await asyncio.sleep(4 * SHORTEST_TURN_S)
            assert not call.lost("cell-0"), "its turn was over"
            call.end()

        async with asyncio.TaskGroup() as tasks:
            for call in calls:
                tasks.create_task(holds(call))
            await calls[0]._turns.at("cell-1").acquire()
        assert begun == pytest.approx([0.0, SHORTEST_TURN_S, 2 * SHORTEST_TURN_S])

    in_virtual_time(main)


def test_the_same_prompt_again_is_given_up_at_its_first_loss() -> None:
    """The members of a group that begin alike don't cost three engines each."""

    async def main() -> None:
        turns = Turns()
        first, same, other = call_of(turns), call_of(turns), call_of(turns, prompt=b"1,2,3")
        assert [await asked(first, 1.0) for _ in range(3)] == [False, False, True]
        assert not await asked(same, READ_S + 1.0), "an engine lived with it"
        assert await asked(same, 1.0) and len(same.cells) == 1
        assert not await asked(other, 1.0)

    in_virtual_time(main)
