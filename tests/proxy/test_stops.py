"""Stop sequences: ids stay through the token that completes one, the text ends before it, whoever noticed it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schemas.records import CallRecord
from services.mesh.chat import ChatTokenizer
from services.proxy.conversation import Block, Call, Text, Thinking
from services.proxy.encoder import Encoder, Stop, cut_at, first_stop
from tests.proxy.bodies import body_of, call_text
from tests.proxy.engines import Engine, Play, Player
from tests.proxy.test_chat_completions import body_of as chat_body
from tests.proxy.test_chat_completions import said
from tests.proxy.world import World


async def the_record(world: World) -> CallRecord:
    (record,) = await world.records()
    assert isinstance(record, CallRecord)
    return record


@pytest.mark.parametrize("stream", [True, False])
async def test_messages_say_which_sequence_it_was(
    world: World, engine: Engine, tokenizer: ChatTokenizer, stream: bool
) -> None:
    engine.script.append(engine.say("one END two", finish="stop"))  # an engine that doesn't stop by itself
    answer = await world.ask(body_of("hi", stop_sequences=["never", "END"], stream=stream))
    assert answer["content"] == [{"type": "text", "text": "one"}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "END")
    sampling = engine.calls[0]["sampling_params"]
    assert sampling["stop"] == ["never", "END"] and sampling["no_stop_trim"] is True
    record = await the_record(world)
    assert tokenizer.decode(record.output_ids) == "one END" and record.finish == "stop"
    assert len(record.logprobs) == len(record.output_ids) == record.versions[-1].end
    assert answer["usage"]["output_tokens"] == len(record.output_ids)


async def test_a_turn_that_was_stopped_is_continued_after_what_was_sampled(
    world: World, engine: Engine, tokenizer: ChatTokenizer
) -> None:
    engine.script.append(engine.say("one END", finish="stop"))
    engine.script[0]["output_ids"].pop()
    engine.script[0]["meta_info"]["output_token_logprobs"].pop()
    engine.script[0]["meta_info"]["completion_tokens"] -= 1
    content = (await world.ask(body_of("hi", stop_sequences=["END"])))["content"]
    await world.ask(body_of("hi", content, "and?", stop_sequences=["END"]))
    one, two = await world.records()
    assert isinstance(one, CallRecord) and isinstance(two, CallRecord) and two.parent == one.call
    assert tokenizer.decode(engine.calls[1]["input_ids"]).count("one END<|im_end|>\n<|im_start|>user\nand?") == 1


@pytest.mark.parametrize("stop", ["END", ["END"], ["never", "END"]])
async def test_chat_completions_end_with_stop(world: World, engine: Engine, stop: Any) -> None:
    engine.script.append(engine.say("one END two"))
    async with world.post(chat_body(said("user", "hi"), stop=stop), "/v1/chat/completions") as response:
        (choice,) = (await response.json())["choices"]
    assert choice["message"]["content"] == "one" and choice["finish_reason"] == "stop"


async def test_without_the_sequence_nothing_is_different(world: World, engine: Engine) -> None:
    engine.script.append(engine.say("one two"))
    answer = await world.ask(body_of("hi", stop_sequences=["END"]))
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    assert (await the_record(world)).output_ids[-1] == engine.end
    await world.ask(body_of("ho"))
    assert "stop" not in engine.calls[1]["sampling_params"]


async def test_an_answer_from_the_record_says_the_same(world: World, engine: Engine) -> None:
    engine.script.append(engine.say("one END two"))
    body = body_of("hi", stop_sequences=["END"])
    assert await world.ask(body) == await world.ask({**body, "stream": True}) and len(engine.calls) == 1


async def test_an_engine_that_stops_for_no_reason_is_an_error_of_ours(world: World, engine: Engine) -> None:
    line = engine.say("one two", finish="length")
    line["meta_info"]["finish_reason"] = {"type": "stop", "matched": "END"}
    engine.script.append(line)
    async with world.post(body_of("hi", stop_sequences=["END"])) as response:
        assert response.status == 500 and "stopped without a stop token" in await response.text()


@pytest.fixture
async def players(policy: Path, tmp_path: Path, tokenizer: ChatTokenizer) -> AsyncIterator[tuple[World, list[Player]]]:
    play = Play([*tokenizer.encode("one END two"), tokenizer.eos_token_id])
    world = World(policy, tmp_path)
    await world.bus.open_run()
    both = [Player(tokenizer, play, version=7 + index) for index in range(2)]
    for index, player in enumerate(both):
        await player.start()
        await world.join(f"cell-{index}", player)
    await world.place()
    await world.start()
    yield world, both
    await world.stop()
    for player in both:
        await player.stop()


async def test_a_sequence_that_two_engines_sampled_together_is_found(
    players: tuple[World, list[Player]], tokenizer: ChatTokenizer
) -> None:
    world, (source, target) = players
    source.sampled = len(tokenizer.encode("one EN"))
    target.release.set()
    asking = asyncio.create_task(world.ask(body_of("hi", stop_sequences=["END"])))
    await source.until(1)
    await world.move("cell-0", "cell-1", 2)
    answer = await asking
    assert answer["content"] == [{"type": "text", "text": "one"}] and answer["stop_sequence"] == "END"
    record = await the_record(world)
    assert tokenizer.decode(record.output_ids) == "one END"
    assert [(span.version, span.start, span.end) for span in record.versions] == [(7, 0, 6), (8, 6, 7)]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text("abé ", max_size=12), st.lists(st.text("abé ", min_size=1, max_size=3), max_size=3))
def test_the_first_completed_sequence_wins(tokenizer: ChatTokenizer, text: str, stops: list[str]) -> None:
    ids = tokenizer.encode(text)
    found = first_stop(tokenizer.decode, ids, stops)
    expected = next(
        (n for n in range(1, len(ids) + 1) if any(stop in tokenizer.decode(ids[:n]) for stop in stops)), None
    )
    assert (found.tokens if found else None) == expected
    if found:
        assert found.text in stops and found.text in tokenizer.decode(ids[: found.tokens])


def test_of_two_that_end_together_the_one_that_begins_first() -> None:
    assert first_stop(lambda ids: "ab"[: len(ids)], [0, 1], ["b", "ab"]) == Stop("ab", 2)


CALL = Call(id="t", name="f", input={})


@pytest.mark.parametrize(
    ("blocks", "stop", "left"),
    [
        ([Text(text="one END")], "END", [Text(text="one")]),
        ([Text(text="one END.")], "END", [Text(text="one")]),
        ([Text(text="END")], "END", []),
        ([Text(text="one END")], "END ", [Text(text="one")]),  # the blank is gone by now
        ([Text(text="one")], "e\n\n", [Text(text="on")]),
        ([Thinking(thinking="hm END")], "END", [Thinking(thinking="hm")]),
        ([Thinking(thinking="hm"), Text(text="one END")], "END", [Thinking(thinking="hm"), Text(text="one")]),
        ([Text(text="one"), CALL], "}", [Text(text="one"), CALL]),  # inside a call that is whole
        ([], "END", []),
    ],
)
def test_the_text_ends_before_the_sequence(blocks: list[Block], stop: str, left: list[Block]) -> None:
    assert cut_at(blocks, stop) == left


async def test_a_call_that_a_sequence_cut_off_is_text(world: World, engine: Engine, encoder: Encoder) -> None:
    engine.script.append(engine.say("Look.\n" + call_text("bash", {"command": "STOP it"})))
    answer = await world.ask(body_of("hi", stop_sequences=["STOP"]))
    (block,) = answer["content"]
    assert block["type"] == "text" and block["text"].endswith('{"command": "') and answer["stop_sequence"] == "STOP"


@pytest.mark.parametrize("stop", ["", " \n"])
async def test_blanks_are_refused(world: World, stop: str) -> None:
    async with world.post(body_of("hi", stop_sequences=[stop])) as response:
        assert response.status == 400 and "stop_sequences" in await response.text()
    async with world.post(chat_body(said("user", "hi"), stop=[stop]), "/v1/chat/completions") as response:
        assert response.status == 400 and "stop: " in await response.text()
