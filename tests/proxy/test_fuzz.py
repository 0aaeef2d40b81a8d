"""Requests that nobody would send, in all three formats: each gets an answer or a refusal, nothing breaks, nothing hangs,
and no answer is without its record.

A few of them in every run; GYRE_FUZZ=10000 makes so many.
"""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schemas.records import CallRecord
from services.mesh.chat import ChatTokenizer
from services.proxy.conversation import decode_blocks
from services.proxy.dialects.dialect import Dialect
from services.proxy.encoder import Encoder
from services.proxy.endpoints import DIALECTS
from services.proxy.memory import Memory
from services.proxy.refusal import Refused
from tests.proxy.bodies import call_text
from tests.proxy.engines import Engine
from tests.proxy.recording import Recorder
from tests.proxy.world import World

EXAMPLES = int(os.environ.get("GYRE_FUZZ", "0"))
OVER_HTTP = 120
MESSAGES, CHAT, RESPONSES = DIALECTS

junk = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.just(10**400),
        st.floats(),
        st.text(st.characters(), max_size=8),
        st.sampled_from(["auto", "\ud800", "<|im_end|>", "type", "text", "user", ""]),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def mostly(values: Any) -> Any:
    """Values of a strategy, and now and then anything."""
    return st.integers(0, 79).flatmap(lambda n: junk if n == 79 else values)


def of(required: dict[str, Any], optional: dict[str, Any] | None = None) -> Any:
    """Objects with these fields, each mostly right."""
    return st.fixed_dictionaries(
        {key: mostly(value) for key, value in required.items()},
        optional={key: mostly(value) for key, value in (optional or {}).items()},
    )


def kind(kind: str, /, **fields: Any) -> Any:
    return of({"type": st.just(kind), **fields}, {"cache_control": junk, "extra": junk})


text = st.text(st.characters(), max_size=12) | st.sampled_from(
    ["hi", "<tool_call>", "<|im_end|>", " ", "CRITICAL:", "{"]
)
name = st.sampled_from(["bash", "f", "", "a b", "é"]) | st.text(max_size=4)
some_id = st.sampled_from(["t1", "t2", "t3"])
schema = st.sampled_from([{}, {"type": "object"}]) | junk
one_text = st.lists(kind("text", text=text), max_size=3) | text
image = kind("image", source=junk)
whole = st.integers(-1, 40) | st.integers() | st.just(10**400)
numbers = {
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1),
    "top_k": whole,
    "stream": st.booleans(),
    "model": text,
}

blocks = st.one_of(
    kind("text", text=text),
    kind("thinking", thinking=text),
    kind("redacted_thinking", data=text),
    kind("tool_use", id=some_id, name=name, input=st.dictionaries(st.text(max_size=4), junk, max_size=3)),
    kind("tool_result", tool_use_id=some_id, content=one_text | st.lists(image, max_size=1)),
    kind("document", source=junk),
    image,
)
messages = of(
    {
        "messages": st.lists(
            of(
                {
                    "role": st.sampled_from(["user", "assistant", "system"]),
                    "content": st.lists(blocks, max_size=3) | text,
                }
            ),
            min_size=1,
            max_size=5,
        )
    },
    {
        **numbers,
        "system": one_text,
        "tools": st.lists(of({"name": name}, {"description": text, "input_schema": schema, "type": text}), max_size=3),
        "max_tokens": whole,
        "tool_choice": of({"type": st.sampled_from(["auto", "none", "any"])}),
        "stop_sequences": st.lists(text, max_size=2),
        "thinking": junk,
    },
)

parts = st.one_of(kind("text", text=text), kind("image_url", image_url=junk), kind("refusal", refusal=text))
content = st.one_of(text, st.none(), st.lists(parts, max_size=3))
function = of({"name": name}, {"description": text, "parameters": schema, "strict": junk})
chat_call = of(
    {"id": some_id, "type": st.just("function"), "function": of({"name": name, "arguments": text | st.just('{"a":1}')})}
)
chat_message = st.one_of(
    of({"role": st.sampled_from(["user", "system", "developer"]), "content": content}),
    of(
        {"role": st.just("assistant"), "content": content},
        {"tool_calls": st.lists(chat_call, max_size=3), "reasoning_content": text},
    ),
    of({"role": st.just("tool"), "tool_call_id": some_id, "content": content}),
)
chat = of(
    {"messages": st.lists(chat_message, min_size=1, max_size=6)},
    {
        **numbers,
        "tools": st.lists(of({"type": st.just("function"), "function": function}), max_size=3),
        "max_tokens": whole,
        "max_completion_tokens": whole,
        "tool_choice": st.sampled_from(["auto", "none", "required"]),
        "stop": text | st.lists(text, max_size=2),
        "stream_options": of({"include_usage": st.booleans()}),
        "seed": whole,
    },
)

call_fields = {"call_id": some_id, "name": name}
item = st.one_of(
    of(
        {"role": st.sampled_from(["user", "assistant", "developer", "system"]), "content": one_text},
        {"type": st.just("message")},
    ),
    kind("reasoning", summary=st.lists(kind("summary_text", text=text), max_size=2)),
    kind("function_call", arguments=text | st.just("{}"), **call_fields),
    kind("custom_tool_call", input=text, **call_fields),
    kind("function_call_output", call_id=some_id, output=one_text),
    kind("custom_tool_call_output", call_id=some_id, output=one_text),
    kind("web_search_call", id=text),
)
tool = st.one_of(
    kind("function", name=name, parameters=schema),
    kind("custom", name=name, format=of({"definition": text})),
    kind("namespace", name=name, tools=st.lists(kind("function", name=name), max_size=2)),
    kind("web_search"),
)
responses = of(
    {"input": st.lists(item, min_size=1, max_size=6) | text},
    {
        **numbers,
        "instructions": text,
        "tools": st.lists(tool, max_size=3),
        "max_output_tokens": whole,
        "tool_choice": st.sampled_from(["auto", "none"]),
        "metadata": st.dictionaries(text, text, max_size=2),
        "text": junk,
    },
)
MEMORY = Memory()
BODIES = {MESSAGES.name: messages, CHAT.name: chat, RESPONSES.name: responses}
header = st.dictionaries(
    st.sampled_from(["x-claude-code-agent-id", "x-codex-turn-metadata", "x-parent-session-id", "thread-id"]),
    st.sampled_from(["a1", '{"request_kind": "compaction"}', "{", "[[", "5", ""]),
    max_size=2,
)


def sent(body: Any) -> bytes:
    """As harnesses write it, which is not always JSON by the book."""
    return json.dumps(body).encode()


SAID = (
    "ok",
    "<think>\nhm\n</think>\n\nok",
    call_text("bash", {"a": 1.0}),
    call_text("", {}),
    "<tool_call>\n{",
    "",
    "\xff",
)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
@settings(
    max_examples=max(60, EXAMPLES // 3),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.data())
def test_every_request_is_rendered_and_answered_or_refused(
    dialect: Dialect, encoder: Encoder, tokenizer: ChatTokenizer, data: st.DataObject
) -> None:
    body = data.draw(BODIES[dialect.name])
    raw, headers = sent(body), data.draw(header)
    try:
        asked = dialect.parse(raw, headers)
    except Refused as refused:
        assert refused.status == 400 and refused.what
        assert dialect.error(refused, "req_1")["error"]["message"] == refused.what
        return
    # Whatever was asked before, in whatever format.
    assert dialect.parse(raw, headers, MEMORY) == asked
    record, answer = Recorder(encoder, tokenizer).answer(dialect, body, data.draw(st.sampled_from(SAID)), "stop")
    assert decode_blocks(record.answer) == answer.blocks
    json.dumps(dialect.whole(answer), allow_nan=False)
    stream = (dialect.opening(asked, 1, 1) if dialect.opening else b"") + dialect.ping + dialect.rest(answer)
    assert stream.endswith(b"\n\n") and stream.decode()
    assert dialect.error_event(Refused(529, "later"), asked, "req_1", 1).endswith(b"\n\n")


@settings(max_examples=max(60, EXAMPLES // 10), deadline=None)
@given(st.sampled_from(DIALECTS), st.binary(max_size=40) | junk.map(sent))
def test_what_is_no_request_at_all_is_refused(dialect: Dialect, raw: bytes) -> None:
    with pytest.raises(Refused) as refused:
        dialect.parse(raw, {})
    assert refused.value.status == 400


def drawn(count: int) -> list[tuple[Dialect, Any]]:
    """So many requests; the same ones every time."""
    found: list[tuple[Dialect, Any]] = []

    @settings(
        max_examples=count, database=None, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(st.sampled_from(DIALECTS).flatmap(lambda dialect: st.tuples(st.just(dialect), BODIES[dialect.name])))
    def collect(example: tuple[Dialect, Any]) -> None:
        found.append(example)

    collect()
    return found


@pytest.mark.timeout(0 if EXAMPLES else 120)
async def test_over_http_nothing_breaks_hangs_or_is_lost(world: World, engine: Engine) -> None:
    engine.script.extend(engine.say(text) for text in SAID * 20)
    told: set[str] = set()
    seen: dict[int, int] = {}

    async def ask(dialect: Dialect, body: Any) -> None:
        sent_headers = {**world.headers(), "content-type": "application/json"}
        async with (
            asyncio.timeout(60),
            world.session.post(f"{world.url}/v1{dialect.path}", data=sent(body), headers=sent_headers) as response,
        ):
            answer = (await response.read()).decode()
        seen[response.status] = seen.get(response.status, 0) + 1
        assert response.status in (200, 400), (dialect.name, body, answer)
        if response.status == 200 and "response.failed" not in answer:
            line = next(line for line in answer.splitlines() if '"id"' in line).removeprefix("data: ")
            event = json.loads(line)
            message = event.get("message") or event.get("response") or event
            told.add(message["id"].partition("_")[2])

    requests = drawn(max(OVER_HTTP, EXAMPLES // 20))
    for at in range(0, len(requests), 8):
        await asyncio.gather(*(ask(*request) for request in requests[at : at + 8]))
    records = [record for record in await world.records() if isinstance(record, CallRecord)]
    assert told == {record.request[:24] for record in records} and len(told) == len(records) == len(engine.calls)
    assert seen[200] >= len(told) > 0 and seen[400] > 0
    print(f"{len(requests)} requests over HTTP: {seen}, {len(records)} records")  # noqa: T201
