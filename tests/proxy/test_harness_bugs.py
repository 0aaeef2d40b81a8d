"""Bugs that people hit between harnesses and engines, and that no other test here meets; docs/harness-bugs.md lists all.

The page says of each bug whether it concerns a proxy, and names its tests; that they exist is tested here too.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import ConfigError
from services.mesh.chat import ChatTokenizer, load_tokenizer
from services.proxy.conversation import Block, Call, Text, Thinking
from services.proxy.dialects import anthropic, chat_completions, responses, responses_answer
from services.proxy.dialects.dialect import Answer
from services.proxy.encoder import Encoder
from tests.proxy import test_chat_completions as chat
from tests.proxy import test_responses as codex
from tests.proxy.bodies import assemble, body_of, call_text, parse_events, result_of
from tests.proxy.engines import Engine
from tests.proxy.test_tree import Talk
from tests.proxy.world import World

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "harness-bugs.md"
ROW = re.compile(r"^\| (\d+) \|", re.MULTILINE)
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


@pytest.fixture
def talk(encoder: Encoder, tokenizer: ChatTokenizer) -> Talk:
    return Talk(encoder, tokenizer)


# the page


def test_the_page_names_tests_that_there_are() -> None:
    named = NAMED.findall(PAGE.read_text())
    assert len(named) > 60
    for path, name in named:
        assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), f"{path} has no {name}"


def test_the_page_has_every_number_once_and_a_test_or_a_reason() -> None:
    acceptance, _, bugs = PAGE.read_text().partition("## Bugs")
    assert [int(number) for number in ROW.findall(acceptance)] == list(range(1, 16))
    numbers = [int(number) for number in ROW.findall(bugs)]
    assert numbers == [n for n in range(1, 63) if n not in {16, 18, 24, 31, 45, 49, 52, 54}]
    for line in (line for line in bugs.splitlines() if ROW.match(line)):
        concerns, shown = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))][2:]
        assert concerns.startswith(("yes", "no: ")) and (concerns != "yes" or NAMED.search(shown)), line


# answers on the wire


def answer_of(asked: Any, blocks: list[Block]) -> Answer:
    return Answer(asked=asked, blocks=blocks, finish="stop", prompt_tokens=1, output_tokens=1, created=1)


said = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
inputs = st.dictionaries(said, said | st.integers(-(2**53), 2**53) | st.booleans() | st.none(), max_size=3)
answers = st.lists(
    st.builds(lambda text: Thinking(thinking=text), said)
    | st.builds(lambda text: Text(text=text), said)
    | st.builds(lambda name, given: Call(id="", name=name, input=given), st.sampled_from("fgh"), inputs),
    max_size=7,
).map(
    lambda blocks: [
        Call(id=f"t{at}", name=block.name, input=block.input) if isinstance(block, Call) else block
        for at, block in enumerate(blocks)
    ]
)


@settings(max_examples=60, deadline=None)
@given(answers)
def test_any_order_of_blocks_goes_out_one_at_a_time(blocks: list[Block]) -> None:
    """Assembled by the strictest client: one block open, of one type, begun before it goes on, with its arguments in
    deltas, and with an end."""
    asked = anthropic.parse(json.dumps(body_of("hi")).encode(), {})
    answer = answer_of(asked, blocks)
    streamed = assemble(parse_events(anthropic.opening(asked, 1, 0) + anthropic.rest_of_stream(answer)))
    assert json.loads(json.dumps(streamed)) == json.loads(json.dumps(anthropic.message(answer)))
    assert len(streamed["content"]) == len(blocks)
    assert all(block["signature"] == "" for block in streamed["content"] if block["type"] == "thinking")

    calls = [(block.id, block.name, block.input) for block in blocks if isinstance(block, Call)]
    asked = chat.parsed(chat.body_of(chat.said("user", "hi"), stream=True))
    message = chat.assemble(chat_completions.chunks(answer_of(asked, blocks)))["message"]
    back = [
        (c["id"], c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls", [])
    ]
    assert back == calls and message.get("tool_calls") != []

    asked = codex.parsed(codex.body_of(codex.said("user", "hi")))
    answer = answer_of(asked, blocks)
    whole = codex.assemble(responses_answer.opening(asked, 1, 1) + responses_answer.events(answer))
    assert whole == responses_answer.response(answer) and whole["status"] == "completed"
    assert [item["call_id"] for item in whole["output"] if "call_id" in item] == [call for call, _, _ in calls]


@pytest.mark.parametrize("own", [anthropic.DIALECT, chat_completions.DIALECT, responses.DIALECT])
def test_a_stream_speaks_one_dialect(own: Any) -> None:
    body = {
        "messages": json.dumps(body_of("hi", stream=True)),
        "chat completions": json.dumps(chat.body_of(chat.said("user", "hi"), stream=True)),
        "responses": json.dumps(codex.body_of(codex.said("user", "hi"), stream=True)),
    }
    asked = own.parse(body[own.name].encode(), {})
    answer = answer_of(asked, [Thinking(thinking="t"), Text(text="x"), Call(id="t1", name="exec", input={})])
    stream = (own.opening(asked, 1, 1) if own.opening else b"") + own.ping + own.rest(answer)
    signs = {
        "messages": (b"event: content_block_", b"event: message_"),
        "chat completions": (b'"chat.completion.chunk"', b"data: [DONE]"),
        "responses": (b"event: response.",),
    }
    for name, marks in signs.items():
        assert all((mark in stream) == (name == own.name) for mark in marks), name


def test_white_space_between_calls_is_no_text(talk: Talk) -> None:
    content = talk.ask(
        body_of("task"), "\n\n" + call_text("bash", {"a": 1}) + "\n\n" + call_text("bash", {"a": 2}) + "\n"
    )
    assert [block["type"] for block in content] == ["tool_use", "tool_use"]
    assert [block["input"] for block in content] == [{"a": 1}, {"a": 2}]


def test_a_call_without_arguments_keeps_its_place(talk: Talk) -> None:
    content = talk.ask(body_of("task"), call_text("bash", {}) + call_text("bash", {"a": 1}) + call_text("bash", {}))
    assert [block["input"] for block in content] == [{}, {"a": 1}, {}]


# requests


def test_an_empty_list_of_calls_beside_content_is_nothing() -> None:
    turn = chat.said("assistant", "hello", tool_calls=[])
    bare = chat.said("assistant", "hello")
    keys = [
        chat.parsed(chat.body_of(chat.said("user", "hi"), told, chat.said("user", "go"))).conversation.messages[1].key()
        for told in (turn, bare)
    ]
    assert keys[0] == keys[1]


@pytest.mark.parametrize("path", ["/v1/v1/messages", "//v1/messages", "/v1/messages?beta=true"])
async def test_base_addresses_as_people_write_them(world: World, path: str) -> None:
    async with world.post(body_of("hi"), path=path) as response:
        assert response.status == 200, await response.text()


async def test_an_address_that_there_is_not_says_what_there_is(world: World) -> None:
    async with world.post(body_of("hi"), path="/messages") as response:
        assert response.status == 404
        assert "POST /v1/messages" in (await response.json())["error"]["message"]


def test_a_policy_whose_calls_could_not_be_read_is_refused_at_the_start(policy: Path, tmp_path: Path) -> None:
    tokenizer = json.loads((policy / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if token["content"] != "<tool_call>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="tokens of Qwen3's chat format are missing"):
        load_tokenizer(tmp_path)


# tokens


def test_thoughts_of_earlier_turns_stay_as_they_were_sampled(talk: Talk) -> None:
    """The template would leave them out of the next prompt, and most harnesses do."""
    (thought, call) = talk.ask(body_of("task"), "<think>\nI  think so\n</think>\n\n" + call_text("bash", {"a": 1}))
    assert thought["type"] == "thinking"
    for echoed in ([thought, call], [call], [{**thought, "thinking": "I think so", "signature": "x"}, call]):
        talk.ask(body_of("task", echoed, [result_of(call, "r")]), "ok")
        prompt = talk.prompts[-1]
        first = [*talk.prompts[0], *talk.records[0].output_ids]
        assert prompt[: len(first)] == first and talk.records[-1].parent == talk.records[0].call
    talk.ask(body_of("task", [call], [result_of(call, "r")], "ok", "and now?"), "x")
    assert talk.text(4).count("I  think so") == 1


async def test_a_cut_character_comes_back_and_is_known(world: World, engine: Engine) -> None:
    """Every token is a byte here, so the bound of the length falls into a character."""
    cut = engine.tokenizer.encode("漢字")[:-1]
    engine.script.append(engine.ids(cut, finish="length"))
    first = await world.ask(body_of("hi", stream=True))
    assert first["stop_reason"] == "max_tokens" and first["content"][0]["text"].startswith("漢")
    await world.ask(body_of("hi", first["content"], "go on"))
    one, two = await world.records()
    assert one.output_ids == cut and two.parent == one.call


async def test_an_engine_may_abort_everything_when_its_weights_change(world: World, engine: Engine) -> None:
    """Every call in flight goes on from what it had."""

    def aborted(text: str) -> dict[str, Any]:
        return engine.ids(engine.tokenizer.encode(text), finish="abort")

    engine.script += [aborted("one"), engine.say(" and two")]
    answer = await world.ask(body_of("hi"))
    assert (answer["content"][0]["text"], answer["stop_reason"]) == ("one and two", "end_turn")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_repetition_without_a_mark_is_the_same_call(world: World, engine: Engine, stream: bool) -> None:
    """Clients repeat a request word for word, or streamed and not, and wait for one answer."""
    first = await world.ask(body_of("hi", stream=stream))
    second = await world.ask(body_of("hi", stream=not stream))
    assert first == second and len(engine.calls) == 1 and len(await world.records()) == 1
