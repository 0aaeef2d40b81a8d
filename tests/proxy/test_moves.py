"""Calls in flight move when the route of their execution moves: one answer, one exact record."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from schemas.records import CallRecord
from services.mesh.chat import ChatTokenizer
from services.proxy.calls import FAILED_TRIES
from tests.proxy.bodies import body_of
from tests.proxy.engines import Play, Player
from tests.proxy.world import EXECUTION, World, until

TEXT = "A longer answer that is given by several engines."


class Stage:
    """A proxy over three cells with players; the execution is placed on cell-0."""

    def __init__(self, world: World, players: list[Player], play: Play) -> None:
        self.world, self.players, self.play = world, players, play
        self.epoch = 1

    async def move(self, source: int, target: int) -> None:
        self.epoch += 1
        await self.world.move(f"cell-{source}", f"cell-{target}", self.epoch)

    async def record(self) -> CallRecord:
        """The only record, whose ids and log-probabilities are those of the play."""
        (record,) = await self.world.records()
        assert isinstance(record, CallRecord)
        assert record.output_ids == self.play.ids[: len(record.output_ids)]
        assert record.logprobs == [self.play.logprob(at) for at in range(len(record.output_ids))]
        assert record.versions[0].start == 0 and record.versions[-1].end == len(record.output_ids)
        rids = [call["rid"] for player in self.players for call in player.calls]
        assert len(rids) == len(set(rids)) and {len(rid) for rid in rids} == {32}
        return record

    def known(self, player: int) -> list[int]:
        """How many tokens of the answer each call of this player brought."""
        assert self.play.prompt is not None
        return [len(call["input_ids"]) - len(self.play.prompt) for call in self.players[player].calls]


def spans(record: CallRecord) -> list[tuple[int, int, int]]:
    return [(span.version, span.start, span.end) for span in record.versions]


@pytest.fixture
async def stage(policy: Path, tmp_path: Path, tokenizer: ChatTokenizer) -> AsyncIterator[Stage]:
    play = Play([*tokenizer.encode(TEXT), tokenizer.eos_token_id])
    world = World(policy, tmp_path)
    await world.bus.open_run()
    players = [Player(tokenizer, play, version=7 + index) for index in range(3)]
    for index, player in enumerate(players):
        await player.start()
        await world.join(f"cell-{index}", player)
    await world.place()
    await world.start()
    yield Stage(world, players, play)
    for player in players:
        player.release.set()
    await world.stop()
    for player in players:
        await player.stop()


async def test_a_call_in_flight_goes_on_at_the_target(stage: Stage) -> None:
    zero, one, _ = stage.players
    zero.sampled = 3
    ask = asyncio.create_task(stage.world.ask(body_of("hi", stream=True)))
    await zero.until(1)
    one.release.set()
    await stage.move(0, 1)
    answer = await ask
    assert answer["content"] == [{"type": "text", "text": TEXT}] and answer["stop_reason"] == "end_turn"
    assert zero.aborted == [zero.calls[0]["rid"]]
    assert one.calls[0]["input_ids"] == zero.calls[0]["input_ids"] + stage.play.ids[:3]
    sampling = [player.calls[0]["sampling_params"] for player in (zero, one)]
    assert sampling[1] == {**sampling[0], "max_new_tokens": 297}
    assert (zero.epochs, one.epochs, one.aborted) == (["1"], ["2"], [])
    record = await stage.record()
    assert (record.finish, record.cell, record.output_ids) == ("stop", "cell-1", stage.play.ids)
    assert spans(record) == [(7, 0, 3), (8, 3, len(stage.play.ids))]
    assert await stage.world.ask(body_of("hi")) == answer and len(one.calls) == 1


async def test_several_moves_in_a_row_and_back(stage: Stage) -> None:
    zero, one, two = stage.players
    zero.sampled, one.sampled, two.sampled = 2, 3, 4
    ask = asyncio.create_task(stage.world.ask(body_of("hi")))
    await zero.until(1)
    await stage.move(0, 1)
    await one.until(1)
    await stage.move(1, 2)
    await two.until(1)
    await stage.move(2, 0)
    await zero.until(2)
    zero.release.set()
    await ask
    record = await stage.record()
    assert spans(record) == [(7, 0, 2), (8, 2, 5), (9, 5, 9), (7, 9, len(stage.play.ids))]
    assert (stage.known(0), stage.known(1), stage.known(2)) == ([0, 9], [2], [5])
    assert (zero.epochs, one.epochs, two.epochs) == (["1", "4"], ["2"], ["3"])


async def test_two_moves_at_once_take_the_call_to_the_last_target(stage: Stage) -> None:
    zero, one, two = stage.players
    zero.sampled, zero.deaf = 5, 1
    ask = asyncio.create_task(stage.world.ask(body_of("hi")))
    await zero.until(1)
    await stage.move(0, 1)
    await zero.abort_seen.wait()
    two.release.set()
    await stage.move(1, 2)
    await ask
    assert one.calls == [] and stage.known(2) == [5] and two.epochs == ["3"]
    assert (await stage.record()).cell == "cell-2"


async def test_a_move_before_the_call_is_nothing_special(stage: Stage) -> None:
    await stage.move(0, 1)
    stage.players[1].release.set()
    await stage.world.ask(body_of("hi"))
    assert stage.players[0].calls == [] and stage.players[0].aborted == []
    assert spans(await stage.record()) == [(8, 0, len(stage.play.ids))]


async def test_an_abort_that_overtakes_its_call_is_repeated(stage: Stage) -> None:
    zero, one, _ = stage.players
    zero.deaf, zero.sampled = 2, 1
    ask = asyncio.create_task(stage.world.ask(body_of("hi")))
    await zero.until(1)
    one.release.set()
    await stage.move(0, 1)
    await ask
    assert zero.aborted == [zero.calls[0]["rid"]] * 3
    assert spans(await stage.record()) == [(7, 0, 1), (8, 1, len(stage.play.ids))]


async def test_a_call_that_the_source_refuses_while_it_is_posted_starts_at_the_target(stage: Stage) -> None:
    zero, one, _ = stage.players
    zero.script.append("stale_epoch")
    one.release.set()
    ask = asyncio.create_task(stage.world.ask(body_of("hi")))
    await zero.until(1)
    await stage.move(0, 1)
    await ask
    assert len(zero.calls) == 1 and stage.known(1) == [0] and (await stage.record()).cell == "cell-1"


async def test_a_final_answer_is_not_moved_while_it_is_stored(stage: Stage) -> None:
    zero, one, _ = stage.players
    assert stage.world.context
    bus: Any = stage.world.context.bus
    storing, store, publish = asyncio.Event(), asyncio.Event(), bus.publish

    async def slowly(*arguments: Any, **options: Any) -> int:
        storing.set()
        await store.wait()
        seq: int = await publish(*arguments, **options)
        return seq

    bus.publish = slowly
    zero.release.set()
    ask = asyncio.create_task(stage.world.ask(body_of("hi")))
    await storing.wait()
    routes = stage.world.flight()._routes
    await stage.move(0, 1)
    await until(lambda: (route := routes.of(EXECUTION)) is not None and route.cell == "cell-1")
    store.set()
    await ask
    assert zero.aborted == [] and one.calls == [] and (await stage.record()).cell == "cell-0"


@pytest.mark.parametrize("finish", ["stop", "abort"])
async def test_an_abort_after_the_last_token_is_the_final_answer(stage: Stage, finish: str) -> None:
    zero, one, _ = stage.players
    zero.sampled, zero.finish = len(stage.play.ids), finish
    ask = asyncio.create_task(stage.world.ask(body_of("hi")))
    await zero.until(1)
    await stage.move(0, 1)
    assert (await ask)["stop_reason"] == "end_turn"
    record = await stage.record()
    assert (record.finish, record.cell, record.output_ids) == ("stop", "cell-0", stage.play.ids) and one.calls == []


async def test_an_abort_at_the_bound_of_the_length_is_the_final_answer(stage: Stage) -> None:
    zero, one, two = stage.players
    zero.sampled, one.sampled = 4, 6
    ask = asyncio.create_task(stage.world.ask(body_of("hi", max_tokens=10)))
    await zero.until(1)
    await stage.move(0, 1)
    await one.until(1)
    assert one.calls[0]["sampling_params"]["max_new_tokens"] == 6
    await stage.move(1, 2)
    assert (await ask)["stop_reason"] == "max_tokens"
    record = await stage.record()
    assert (record.finish, len(record.output_ids)) == ("length", 10) and two.calls == []


async def test_moves_without_a_token_are_no_failures(stage: Stage) -> None:
    ask = asyncio.create_task(stage.world.ask(body_of("hi")))
    for turn in range(FAILED_TRIES + 3):
        await stage.players[turn % 3].until(turn // 3 + 1)
        await stage.move(turn % 3, (turn + 1) % 3)
    stage.players[(FAILED_TRIES + 3) % 3].release.set()
    await ask
    assert {known for player in range(3) for known in stage.known(player)} == {0}
    assert len((await stage.record()).versions) == 1


async def test_a_target_that_is_not_ready_is_waited_for(stage: Stage) -> None:
    zero, one, _ = stage.players
    zero.sampled = 2
    one.script += ["stale_epoch", "stale_epoch"]
    one.release.set()
    ask = asyncio.create_task(stage.world.ask(body_of("hi")))
    await zero.until(1)
    await stage.move(0, 1)
    await ask
    assert stage.known(1) == [2, 2, 2] and len(zero.calls) == 1
    assert spans(await stage.record()) == [(7, 0, 2), (8, 2, len(stage.play.ids))]


async def test_from_a_source_that_is_lost_the_call_starts_from_what_is_known(stage: Stage) -> None:
    zero, one, two = stage.players
    zero.sampled = 3
    one.sampled, one.lose = 5, True
    two.release.set()
    ask = asyncio.create_task(stage.world.ask(body_of("hi")))
    await zero.until(1)
    await stage.move(0, 1)
    await one.until(1)
    await stage.move(1, 2)
    await ask
    assert (stage.known(1), stage.known(2)) == ([3], [3])
    assert spans(await stage.record()) == [(7, 0, 3), (9, 3, len(stage.play.ids))]


async def test_sources_that_end_when_they_are_left_are_not_the_fault_of_the_call(stage: Stage) -> None:
    for player in stage.players:
        player.lose = True
    ask = asyncio.create_task(stage.world.ask(body_of("hi")))
    for turn in range(6):
        await stage.players[turn % 3].until(turn // 3 + 1)
        await stage.move(turn % 3, (turn + 1) % 3)
    stage.players[0].release.set()
    await ask
    assert spans(await stage.record()) == [(7, 0, len(stage.play.ids))]


async def test_a_source_that_does_not_let_go_is_left(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.proxy.calls.LEAVE_S", 0.25)
    zero, one, _ = stage.players
    zero.deaf = 1000
    one.release.set()
    ask = asyncio.create_task(stage.world.ask(body_of("hi")))
    await zero.until(1)
    await stage.move(0, 1)
    await ask
    # The connection is closed, so that the source ends what nobody reads.
    await zero.left.wait()
    assert set(zero.aborted) == {zero.calls[0]["rid"]} and len(zero.aborted) >= 2
    assert spans(await stage.record()) == [(8, 0, len(stage.play.ids))]


async def test_the_cell_aborts_before_the_proxy_sees_the_move(stage: Stage) -> None:
    zero, one, _ = stage.players
    zero.sampled = 4
    ask = asyncio.create_task(stage.world.ask(body_of("hi")))
    await zero.until(1)
    zero.script += ["stale_epoch"] * 100
    (own,) = zero.live.values()
    own.set_result(None)
    await zero.until(2)
    one.release.set()
    await stage.move(0, 1)
    await ask
    assert zero.aborted == [] and set(stage.known(0)[1:]) == {4} and stage.known(1) == [4]
    assert spans(await stage.record()) == [(7, 0, 4), (8, 4, len(stage.play.ids))]


async def test_the_end_of_an_execution_that_moves_is_its_end(stage: Stage) -> None:
    zero, one, _ = stage.players
    zero.deaf = 1000
    ask = asyncio.create_task(stage.world.status(body_of("hi")))
    await zero.until(1)
    await stage.move(0, 1)
    await zero.abort_seen.wait()
    await stage.world.finish()
    assert (await stage.world.event("execution.sealed")).data.records == 0
    assert await ask == 401 and one.calls == []


async def test_only_the_calls_of_the_execution_that_moves_are_aborted(stage: Stage) -> None:
    zero, one, _ = stage.players
    await stage.world.place("e-000001.01")
    asks = [asyncio.create_task(stage.world.ask(body_of("hi", stream=True)))]
    await zero.until(1)
    asks.append(asyncio.create_task(stage.world.ask(body_of("hi"), execution="e-000001.01")))
    await zero.until(2)
    await stage.move(0, 1)
    await one.until(1)
    assert zero.aborted == [zero.calls[0]["rid"]]
    for player in stage.players:
        player.release.set()
    assert [answer["stop_reason"] for answer in await asyncio.gather(*asks)] == ["end_turn"] * 2
    assert len(await stage.world.records()) == 2 and len(zero.calls) == 2
