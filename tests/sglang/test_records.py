"""What the proxy records of a real SGLang is what the policy would say of the same ids: within 1e-3 in float32.

Two servers that hold other weights, or the same ones, and our proxy before them: conversations in three wire formats, calls
that move, that are aborted, that pause, that see new weights in the middle of an answer, clients that leave.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import EngineError
from schemas.events import CellJoined
from services.mesh.http import HttpClient
from services.proxy.engine import Engines
from services.proxy.routes import Route
from tests.proxy.bodies import body_of
from tests.proxy.world import World
from tests.sglang import talks
from tests.sglang.conftest import CONTEXT, Policies, Report
from tests.sglang.scoring import Gap, Sequence, by_engine, by_model, sequences
from tests.sglang.server import Server

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(900)]

BOUND = 1e-3
"""How far a recorded log-probability in float32 may be from a fresh one."""
SOME = 20
"""Tokens that are sampled at least before something happens to a call."""
LONG = 300

Pair = tuple[Server, Server]


def hold(server: Server, folder: Path, version: int) -> None:
    """The server holds these weights, and no keys or values of others."""
    body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": True}
    assert server.post("/update_weights_from_disk", body)["success"]


@asynccontextmanager
async def proxy(policy: Path, folder: Path, servers: Pair, **config: Any) -> AsyncIterator[World]:
    """Our proxy before both servers, cell-0 and cell-1; the execution is placed on the first."""
    world = World(policy, folder, context_length=CONTEXT, **config)
    await world.bus.open_run()
    for index, server in enumerate(servers):
        joined = CellJoined(index=index, capacity=8, url=server.url, engine="sglang", version=0, capabilities=[])
        await world.say("rollout", "cell.joined", f"cell-{index}", joined)
    await world.place()
    await world.start()
    try:
        yield world
    finally:
        await world.stop()


async def placed(world: World, start: int, end: int) -> list[str]:
    """More executions on the first cell: in one of them, the same question twice would be one call."""
    executions = [f"e-{number:06d}.00" for number in range(start + 2, end + 2)]
    for execution in executions:
        await world.place(execution)
    return executions


async def load(server: Server) -> tuple[int, int]:
    """Requests that run, and tokens that they hold."""
    (seen,) = (await asyncio.to_thread(server.get, "/v1/loads"))["loads"]
    return seen["num_running_reqs"], seen["num_used_tokens"]


async def midway(server: Server, asked: asyncio.Task[Any]) -> None:
    """Until its only call has sampled some tokens since we began to look, or is answered; asking is what waits."""
    while (begin := await load(server))[0] == 0 and not asked.done():
        pass
    while (await load(server))[1] < begin[1] + SOME and not asked.done():
        pass


async def answered(world: World, after: int = 0) -> list[Sequence]:
    return sequences(await world.records())[after:]


def checked(found: list[Sequence], versions: dict[int, Path]) -> Gap:
    for sequence in found:
        record = sequence.record
        assert len(record.output_ids) == len(record.logprobs) > 0
        ends = [0, *(span.end for span in record.versions)]
        assert [span.start for span in record.versions] == ends[:-1] and ends[-1] == len(record.output_ids)
    gap = by_model(found, versions)
    assert gap.largest < BOUND
    return gap


@pytest.mark.parametrize("talk", [talks.messages, talks.chat_completions, talks.responses])
async def test_conversations_with_tools(
    talk: talks.Talk, servers: Pair, policies: Policies, tmp_path: Path, report: Report
) -> None:
    server, _ = servers
    hold(server, policies.taught, 1)
    async with proxy(policies.taught, tmp_path, servers) as world:
        called = await asyncio.gather(*(talk(world, execution) for execution in await placed(world, 0, 4)))
        before = await answered(world)
        gap = checked(before, {1: policies.taught})
        report("conversations with tools, by our model", gap)
        report("conversations with tools, by SGLang", scored := by_engine(before, server))

        async def renew() -> None:
            await asyncio.to_thread(hold, server, policies.shaken, 2)

        # Between two turns come new weights: the next calls are of another version, what was said stays as it was.
        (execution,) = await placed(world, 4, 5)
        called.append(await talk(world, execution, renew))
        found = await answered(world)
    assert len(before) == 16 and len(found) == 20 and sum(called)
    assert scored.tokens == gap.tokens and scored.largest < BOUND
    assert sum(sequence.record.parent is None for sequence in found) == 5  # each conversation is one branch
    assert [span.version for each in found[16:] for span in each.record.versions] == [1, 1, 2, 2]
    gap = checked(found[16:], {1: policies.taught, 2: policies.shaken})
    report("new weights between two turns, by our model", gap)


async def test_another_temperature(servers: Pair, policies: Policies, tmp_path: Path, report: Report) -> None:
    hold(servers[0], policies.taught, 1)
    async with proxy(policies.taught, tmp_path, servers, temperature=0.6) as world:
        await asyncio.gather(*(talks.messages(world, execution) for execution in await placed(world, 0, 3)))
        found = await answered(world)
    assert {sequence.record.temperature for sequence in found} == {0.6}
    report("temperature 0.6, by our model", checked(found, {1: policies.taught}))


async def until_long(world: World, do: Callable[[asyncio.Task[Any]], Awaitable[None]]) -> Sequence:
    """The first call that went on after all of `do`, which may come too late on a busy machine."""
    for number in range(5):
        before = len(await answered(world))
        asked = asyncio.create_task(world.ask(body_of(f"say something long, {number}", max_tokens=LONG)))
        await do(asked)
        went_on = not asked.done()
        await asked
        (found,) = await answered(world, before)
        assert len(found.record.output_ids) == LONG
        if went_on:
            return found
    raise AssertionError("every answer was over too soon")


async def test_a_call_that_moves_twice(servers: Pair, policies: Policies, tmp_path: Path, report: Report) -> None:
    versions = {3: policies.wide, 4: policies.other}
    for server, (version, folder) in zip(servers, versions.items(), strict=True):
        hold(server, folder, version)
    epoch = 1
    async with proxy(policies.wide, tmp_path, servers) as world:

        async def move(asked: asyncio.Task[Any]) -> None:
            nonlocal epoch
            for source, target in ((0, 1), (1, 0)):
                await midway(servers[source], asked)
                epoch += 1
                await world.move(f"cell-{source}", f"cell-{target}", epoch)

        found = await until_long(world, move)
    assert [span.version for span in found.record.versions] == [3, 4, 3]
    assert all(span.end - span.start >= SOME for span in found.record.versions[:2])
    report("moved twice, three spans, by our model", checked([found], versions))
    for server in servers:
        scored = by_engine([found], server)
        assert scored.largest < BOUND
        report("moved twice, three spans, by SGLang", scored)
        assert (await load(server))[0] == 0


async def test_aborted_by_the_engine_and_asked_again(
    servers: Pair, policies: Policies, tmp_path: Path, report: Report
) -> None:
    """As a cell does that can't wait for its calls to move, but here it serves on."""
    server, _ = servers
    hold(server, policies.wide, 3)
    async with proxy(policies.wide, tmp_path, servers) as world:

        async def abort(asked: asyncio.Task[Any]) -> None:
            for _ in range(2):
                await midway(server, asked)
                await asyncio.to_thread(server.post, "/abort_request", {"rid": "", "abort_all": True})

        found = await until_long(world, abort)
    report("aborted twice and resumed, by our model", checked([found], {3: policies.wide}))
    report("aborted twice and resumed, by SGLang", scored := by_engine([found], server))
    assert scored.tokens == len(found.record.output_ids) and scored.largest < BOUND


async def test_new_weights_in_the_middle_of_an_answer(
    servers: Pair, policies: Policies, tmp_path: Path, report: Report
) -> None:
    """The engine retracts what runs, so that keys and values are computed anew under the new weights."""
    server, _ = servers
    versions, current = {3: policies.wide, 4: policies.other}, 3
    hold(server, versions[current], current)
    async with proxy(policies.wide, tmp_path, servers) as world:

        async def renew(asked: asyncio.Task[Any]) -> None:
            nonlocal current
            await midway(server, asked)
            current = 7 - current
            await asyncio.to_thread(server.post, "/pause_generation", {"mode": "retract"})
            await asyncio.to_thread(hold, server, versions[current], current)
            await asyncio.to_thread(server.post, "/continue_generation", {})

        found = await until_long(world, renew)
    assert [span.version for span in found.record.versions] == [7 - current, current]
    report("new weights in mid-answer, two spans, by our model", checked([found], versions))
    report("new weights in mid-answer, two spans, by SGLang", scored := by_engine([found], server))
    assert 0 < scored.tokens < LONG and scored.largest < BOUND


async def test_a_call_that_leaves_a_paused_engine(
    servers: Pair, policies: Policies, tmp_path: Path, report: Report
) -> None:
    """SGLang gives a retracted call back with every fiftieth token only; what it keeps to itself is sampled again."""
    zero, one = servers
    hold(zero, policies.wide, 3)
    hold(one, policies.other, 4)
    epoch = 1
    async with proxy(policies.wide, tmp_path, servers) as world:

        async def leave(asked: asyncio.Task[Any]) -> None:
            nonlocal epoch
            for _ in range(3):
                await midway(zero, asked)
            await asyncio.to_thread(zero.post, "/pause_generation", {"mode": "retract"})
            await world.move("cell-0", "cell-1", epoch + 1)
            await midway(one, asked)
            await asyncio.to_thread(zero.post, "/continue_generation", {})
            epoch += 2
            await world.move("cell-1", "cell-0", epoch)

        found = await until_long(world, leave)
    assert found.record.versions[0].end % 50 == 0
    report("left a paused engine, by our model", checked([found], {3: policies.wide, 4: policies.other}))


async def test_a_client_that_leaves_frees_the_engine(servers: Pair, policies: Policies, tmp_path: Path) -> None:
    """By the exact rid: the other call of the engine is not touched."""
    server, _ = servers
    hold(server, policies.wide, 3)
    async with proxy(policies.wide, tmp_path, servers, grace_s=0.01) as world:
        stays = asyncio.create_task(world.ask(body_of("stay", max_tokens=LONG)))
        leaves = asyncio.create_task(world.ask(body_of("leave", max_tokens=500)))
        while (await load(server))[0] < 2:
            assert not leaves.done() and not stays.done()
        leaves.cancel()
        while (await load(server))[0] > 1:
            pass
        # It is the proxy that asked for it: the answer of the call that was left came, and is no record.
        await stays
        while (await load(server))[0]:
            pass
        (found,) = await answered(world)
    assert found.record.delivered and checked([found], {3: policies.wide}).tokens == len(found.record.output_ids)


async def test_a_stop_sequence(servers: Pair, policies: Policies, tmp_path: Path, report: Report) -> None:
    hold(servers[0], policies.wide, 3)
    async with proxy(policies.wide, tmp_path, servers) as world:
        answer = await world.ask(body_of("say something", max_tokens=LONG, stop_sequences=list("abcdefgh")))
        found = await answered(world)
    assert answer["stop_reason"] == "stop_sequence" and found[0].record.finish == "stop"
    report("ended by a stop sequence, by our model", checked(found, {3: policies.wide}))


async def test_the_longest_prompt_that_the_proxy_sends(servers: Pair, policies: Policies) -> None:
    """One token more than the server's margin allows for is refused, which is no loss of the engine."""
    server, _ = servers
    hold(server, policies.wide, 3)
    client = HttpClient()
    engines = Engines(client)
    route = Route(attempt=0, cell="cell-0", epoch=1, url=server.url)

    async def ask(tokens: int) -> Any:
        ids = [b"5"] * tokens
        rid = f"{tokens:032x}"
        sampling: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 1, "stop_ids": [0]}
        return await engines.generate(route, rid=rid, input_ids=ids, **sampling)

    try:
        sampled = await ask(CONTEXT - 1)
        assert len(sampled.ids) == 1 and sampled.versions[0].version == 3
        with pytest.raises(EngineError, match="exceeds the maximum allowed length"):
            await ask(CONTEXT)
    finally:
        await client.aclose()
