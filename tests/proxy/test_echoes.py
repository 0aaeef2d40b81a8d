"""What harnesses make of an answer before it comes back: in every dialect the turn is recognised as the recorded one.

The rewrites are those that were seen: numbers and keys as JavaScript has them, blanks dropped or trimmed, strings for
lists, markers for caching, arguments written anew, thoughts dropped, results in another order, calls that lost a part.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from services.mesh.chat import ChatTokenizer
from services.proxy.conversation import Result
from services.proxy.dialects.dialect import Dialect
from services.proxy.encoder import Encoder
from services.proxy.endpoints import DIALECTS
from services.proxy.tree import Place
from tests.proxy.bodies import assemble, call_text, parse_events
from tests.proxy.recording import Recorder
from tests.proxy.test_chat_completions import assemble as assemble_chunks
from tests.proxy.test_conversation import arguments, javascript
from tests.proxy.test_responses import assemble as assemble_response

MESSAGES, CHAT, RESPONSES = DIALECTS
JSON = dict[str, Any]
Draw = Callable[[Any], Any]
"""Draws from a strategy."""
NAMES = ("bash", "agents__spawn", "apply_patch", "nobody")


def first(dialect: Dialect) -> JSON:
    """A request that begins a conversation, with a tool of each kind."""
    body: JSON = {"model": "policy", "stream": True}
    if dialect is MESSAGES:
        return {
            **body,
            "tools": [{"name": "bash", "input_schema": {}}],
            "messages": [{"role": "user", "content": "go"}],
        }
    if dialect is CHAT:
        function = {"name": "bash", "parameters": {}}
        tools: list[JSON] = [{"type": "function", "function": function}]
        return {**body, "tools": tools, "messages": [{"role": "user", "content": "go"}]}
    tools = [
        {"type": "function", "name": "bash"},
        {"type": "namespace", "name": "agents", "tools": [{"name": "spawn"}]},
        {"type": "custom", "name": "apply_patch"},
    ]
    return {**body, "tools": tools, "input": [{"role": "user", "content": "go"}]}


def javascript_text(text: str) -> str:
    """JSON as a JavaScript program writes it again."""
    return json.dumps(javascript(json.loads(text)), ensure_ascii=False, separators=(",", ":"))


def mixed(draw: Draw, results: list[JSON]) -> list[JSON]:
    shuffled: list[JSON] = draw(st.permutations(results))
    return shuffled


def claude_code(draw: Draw, body: JSON, answer: bytes, keeps: bool) -> JSON:
    content = assemble(parse_events(answer))["content"]
    echo: list[JSON] = []
    for block in content:
        if draw(st.booleans()):
            echo.append({"type": "text", "text": draw(st.sampled_from(["\n\n", " "])), "citations": []})
        if block["type"] == "thinking" and not keeps:
            continue
        if block["type"] == "tool_use":
            block = {**block, "input": javascript(block["input"]), "caller": {"type": "direct"}}
            if draw(st.integers(0, 4)) == 0:
                block["input"] = {"__unparsedToolInput": {"raw": "{", "len": 1}}
        echo.append({**block, "cache_control": {"type": "ephemeral"}} if draw(st.booleans()) else block)
    calls = [block["id"] for block in content if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call, "content": f"r {call}"} for call in calls]
    text = content[-1].get("text") if len(content) == 1 and content[0]["type"] == "text" else None
    start = draw(st.sampled_from(["go", [{"type": "text", "text": "go", "cache_control": {"type": "ephemeral"}}]]))
    return {
        **body,
        "messages": [
            {"role": "user", "content": start},
            {"role": "assistant", "content": text if text and draw(st.booleans()) else echo},
            {"role": "user", "content": mixed(draw, results) or "on"},
        ],
    }


def open_code(draw: Draw, body: JSON, answer: bytes, keeps: bool) -> JSON:
    message = assemble_chunks(answer)["message"]
    text = message["content"].rstrip()
    calls = message.get("tool_calls", [])
    echo: JSON = {"role": "assistant", "content": text}
    if draw(st.booleans()):
        echo["content"] = [{"type": "text", "text": text}] if text else None
    if keeps and "reasoning_content" in message:
        echo[draw(st.sampled_from(["reasoning_content", "reasoning"]))] = message["reasoning_content"]
    if calls:
        echo["tool_calls"] = [
            {**c, "function": {**c["function"], "arguments": javascript_text(c["function"]["arguments"])}}
            for c in calls
        ]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "r " + call["id"]} for call in calls]
    follow = mixed(draw, results) or [{"role": "user", "content": "on"}]
    return {**body, "messages": [{"role": "user", "content": [{"type": "text", "text": "go"}]}, echo, *follow]}


def codex(draw: Draw, body: JSON, answer: bytes, keeps: bool) -> JSON:
    output = assemble_response(answer)["output"]
    echo, results = [], []
    for item in output:
        if item["type"] == "reasoning" and not keeps:
            continue
        if item["type"] == "message" and draw(st.booleans()):
            item = {**item, "content": [{"type": "output_text", "text": part["text"]} for part in item["content"]]}
        if item["type"].endswith("_call"):
            results.append(
                {"type": item["type"] + "_output", "call_id": item["call_id"], "output": "r " + item["call_id"]}
            )
        kept = {key: value for key, value in item.items() if key not in ("id", "status")}
        echo.append(kept if draw(st.booleans()) else item)
    follow = mixed(draw, results) or [{"role": "user", "content": "on"}]
    return {**body, "input": [{"role": "user", "content": "go"}, *echo, *follow]}


HARNESSES = {MESSAGES.name: claude_code, CHAT.name: open_code, RESPONSES.name: codex}

words = st.text(st.characters(codec="utf-8", exclude_characters="<\ufeff"), max_size=20)
calls = st.lists(st.tuples(st.sampled_from(NAMES), arguments), max_size=3)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), words, words, calls, st.booleans(), st.booleans())
def test_a_turn_that_comes_back_is_the_recorded_one(
    dialect: Dialect,
    encoder: Encoder,
    tokenizer: ChatTokenizer,
    data: st.DataObject,
    thought: str,
    text: str,
    called: list[tuple[str, JSON]],
    cut: bool,
    keeps: bool,
) -> None:
    said = f"<think>\n{thought}\n</think>\n\n" if thought.strip() else ""
    said += text + "\n" + "\n".join(call_text(name, given) for name, given in called)
    recorder, body = Recorder(encoder, tokenizer), first(dialect)
    record, answer = recorder.answer(dialect, body, said, "length" if cut else "stop")
    # A harness drops a turn that says nothing it keeps: that makes a sibling, whatever we do.
    assume(answer.text or answer.calls or (keeps and answer.thoughts))
    opening = dialect.opening(answer.asked, answer.prompt_tokens, 1) if dialect.opening else b""
    echo = HARNESSES[dialect.name](data.draw, body, opening + dialect.ping + dialect.rest(answer), keeps)
    conversation = dialect.parse(json.dumps(echo).encode(), {}).conversation
    place: Place = recorder.tree.place(conversation)
    assert place.parent is not None and place.parent.call == record.call
    (turn,) = place.rest
    results = [block.content for block in turn.message.blocks if isinstance(block, Result)]
    assert results == ["r " + call.id for call in answer.calls]  # in the order of the calls
    assert encoder.new_ids(conversation, place)
    # The body that isn't streamed says the same as the stream, so it comes back as the same turn.
    whole = json.loads(json.dumps(dialect.whole(answer)))
    assert json.dumps(whole, sort_keys=True) == json.dumps(dialect.whole(answer), sort_keys=True)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_a_call_that_was_cut_off_in_a_blank_comes_back_trimmed(
    dialect: Dialect, encoder: Encoder, tokenizer: ChatTokenizer
) -> None:
    recorder, body = Recorder(encoder, tokenizer), first(dialect)
    said = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls '
    record, answer = recorder.answer(dialect, body, said, "length")
    assert answer.text == answer.text.strip() != ""
    echo = {"role": "assistant", "content": answer.text}
    key = "input" if dialect is RESPONSES else "messages"
    follow = {**body, key: [*body[key], echo, {"role": "user", "content": "on"}]}
    place = recorder.tree.place(dialect.parse(json.dumps(follow).encode(), {}).conversation)
    assert place.parent is not None and place.parent.call == record.call
