"""What is remembered of earlier requests saves work and changes nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.proxy.dialects import anthropic, chat_completions, responses
from services.proxy.dialects.dialect import Dialect
from services.proxy.memory import HEADS, HISTORIES, KEPT_BYTES, Memory
from services.proxy.refusal import Refused

SYSTEMS = ("one", "other")


def messages(words: list[int], system: int) -> dict[str, Any]:
    """Messages: users, calls with results in any order, text of the assistant, white space, reminders."""
    told: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    for word in words:
        kind = word % 6
        if kind == 0:
            told.append({"role": "user", "content": f"u{word}"})
        elif kind == 1:
            told.append({"role": "assistant", "content": f"a{word}"})
        elif kind == 2:
            calls = [{"type": "tool_use", "id": f"t{word}.{i}", "name": "f", "input": {"x": 1.0}} for i in (0, 1)]
            told.append({"role": "assistant", "content": calls})
            results = [{"type": "tool_result", "tool_use_id": f"t{word}.{i}", "content": f"r{i}"} for i in (1, 0)]
            told.append({"role": "user", "content": results})
        elif kind == 3:
            told.append({"role": "assistant", "content": [{"type": "text", "text": " "}]})
        elif kind == 4:
            told.append({"role": "system", "content": f"s{word}"})
        else:
            told.append({"role": "user", "content": []})
    return {"system": SYSTEMS[system], "messages": told}


def completions(words: list[int], system: int) -> dict[str, Any]:
    told: list[dict[str, Any]] = [{"role": "system", "content": SYSTEMS[system]}, {"role": "user", "content": "go"}]
    for word in words:
        kind = word % 5
        if kind == 0:
            told.append({"role": "user", "content": f"u{word}" if word % 2 else ""})
        elif kind == 1:
            told.append({"role": "assistant", "content": f"a{word}"})
        elif kind == 2:
            function = {"name": "f", "arguments": "{}"}
            calls = [{"type": "function", "id": f"t{word}.{i}", "function": function} for i in (0, 1)]
            told.append({"role": "assistant", "content": None, "tool_calls": calls})
            told += [{"role": "tool", "tool_call_id": f"t{word}.{i}", "content": f"r{i}"} for i in (1, 0)]
        elif kind == 3:
            told.append({"role": "tool", "tool_call_id": f"t{word}", "content": "late"})
        else:
            told.append({"role": "developer", "content": f"s{word}"})
    return {"messages": told}


def items(words: list[int], system: int) -> dict[str, Any]:
    told: list[dict[str, Any]] = [{"role": "developer", "content": SYSTEMS[system]}, {"role": "user", "content": "go"}]
    for word in words:
        kind = word % 4
        if kind == 0:
            told.append({"role": "user", "content": f"u{word}"})
        elif kind == 1:
            told.append({"type": "function_call", "call_id": f"t{word}", "name": "f", "arguments": "{}"})
        elif kind == 2:
            told.append({"type": "function_call_output", "call_id": f"t{word - 1}", "output": "r"})
        else:
            told.append({"type": "message", "role": "assistant", "content": f"a{word}"})
    return {"input": told, "instructions": "Be brief." if system else None}


DIALECTS = [
    (anthropic.DIALECT, messages),
    (chat_completions.DIALECT, completions),
    (responses.DIALECT, items),
]
history = st.lists(st.integers(0, 11), max_size=8)
edits = st.lists(st.tuples(st.integers(0, 8), history, st.integers(0, 1), st.booleans()), min_size=1, max_size=6)


@pytest.mark.parametrize(("dialect", "made"), DIALECTS, ids=[each.name for each, _ in DIALECTS])
@settings(max_examples=150, deadline=None)
@given(edits=edits)
def test_a_request_reads_the_same_whatever_was_read_before(dialect: Dialect, made: Any, edits: Any) -> None:
    memory, words = Memory(), list[int]()
    for kept, more, system, stream in edits:
        words = words[:kept] + more
        body = {"model": "m", "stream": stream, "max_tokens": 9, "tools": [], **made(words, system)}
        data = json.dumps(body).encode()
        known, fresh = dialect.parse(data, {}, memory), dialect.parse(data, {}, Memory())
        assert known == fresh
        last = list(memory._histories.values())[-1]
        assert last._start > 0 and data.startswith(last._settled + last._recent)
        assert known.conversation.key() == fresh.conversation.key()


def read(memory: Memory, told: list[Any], **more: Any) -> Any:
    return anthropic.parse(json.dumps({"messages": told, **more}).encode(), {}, memory)


def test_messages_that_are_the_same_bytes_are_the_same_objects() -> None:
    memory = Memory()
    told = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    one = read(memory, told, tools=[])
    two = read(memory, [*told, {"role": "assistant", "content": "d"}, {"role": "user", "content": "e"}], tools=[])
    assert all(x is y for x, y in zip(one.conversation.messages, two.conversation.messages, strict=False))
    assert one.conversation.tools is two.conversation.tools
    assert len(one.conversation.messages) == 3


def test_streaming_is_no_part_of_what_a_repetition_repeats_and_all_else_is() -> None:
    told = [{"role": "user", "content": "a"}]
    memory = Memory()
    base = read(memory, told)
    assert read(memory, told, stream=True).digest == base.digest
    assert read(memory, told, max_tokens=3).digest != base.digest
    assert read(memory, [{"role": "user", "content": "b"}]).digest != base.digest
    agent = anthropic.parse(json.dumps({"messages": told}).encode(), {"x-claude-code-agent-id": "a1"}, memory)
    assert agent.digest != base.digest


def test_a_repetition_may_have_its_keys_in_another_order() -> None:
    about = {"turn_id": "t1", "x-codex-turn-metadata": "{}", "session_id": "s"}
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"a": {}, "b": {}}}}]
    body = {"model": "m", "input": [{"role": "user", "content": "hi"}], "tools": tools, "client_metadata": about}

    def turned(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: turned(value[key]) for key in reversed(value)}
        return [turned(item) for item in value] if isinstance(value, list) else value

    def ask(memory: Memory, body: Any) -> Any:
        return responses.parse(json.dumps(body).encode(), {}, memory)

    again = {key: value if key == "input" else turned(value) for key, value in reversed(body.items())}
    memory = Memory()
    first, second = ask(memory, body), ask(memory, {**body, "client_metadata": turned(about)})
    assert first.digest == second.digest == ask(memory, again).digest == ask(Memory(), again).digest
    assert first.conversation.tools is second.conversation.tools, "the head was read anew"
    assert ask(memory, {**body, "client_metadata": {**about, "turn_id": "t2"}}).digest != first.digest


def test_a_message_that_is_refused_leaves_those_before_it_read() -> None:
    memory = Memory()
    good = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    bad = {"role": "user", "content": [{"type": "tool_result"}]}
    for _ in range(2):
        with pytest.raises(Refused, match=r"messages\.2\.content\.0\.tool_use_id"):
            read(memory, [*good, bad])
    after = [*good, {"role": "user", "content": "c"}]
    assert read(memory, after) == read(Memory(), after)


def test_what_is_remembered_is_bounded() -> None:
    memory = Memory()
    text = "x" * (KEPT_BYTES // 3)
    for index in range(10):
        read(memory, [{"role": "user", "content": f"{index} {text}"}], max_tokens=index + 1)
    assert len(memory._heads) == HEADS
    sizes = [each.size for each in memory._histories.values()]
    assert sum(sizes[:-1]) <= KEPT_BYTES and len(sizes) == 3


def test_what_is_remembered_is_bounded_also_of_small_and_of_unreadable_requests() -> None:
    memory = Memory()
    for index in range(2 * HISTORIES):
        read(memory, [{"role": "user", "content": str(index)}])
    assert len(memory._histories) == HISTORIES
    text = "x" * (KEPT_BYTES // 3)
    for index in range(10):
        with pytest.raises(Refused):
            read(memory, [{"role": "nobody", "content": f"{index} {text}"}])
    assert sum(len(first) for _, first in list(memory._histories)[:-1]) <= KEPT_BYTES


def test_of_the_same_head_each_dialect_makes_its_own() -> None:
    memory = Memory()
    said = [{"role": "user", "content": "go"}]
    body = json.dumps({"model": "policy", "messages": said, "input": said}).encode()
    for dialect in (anthropic.DIALECT, chat_completions.DIALECT, responses.DIALECT) * 2:
        assert dialect.parse(body, {}, memory) == dialect.parse(body, {}, None)
