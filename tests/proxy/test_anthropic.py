"""The dialect: what is accepted, refused and sent."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.proxy.conversation import Call, Result, Text, Thinking
from services.proxy.dialects import anthropic
from services.proxy.dialects.anthropic import error, parse
from services.proxy.dialects.dialect import Answer
from services.proxy.refusal import Refused
from tests.proxy.bodies import assemble, body_of, parse_events


def parsed(body: Any, headers: dict[str, str] | None = None) -> Any:
    return parse(json.dumps(body).encode(), headers or {})


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"tool_choice": {"type": "any"}}, "forces a call"),
        ({"tool_choice": {"type": "tool", "name": "bash"}}, "forces a call"),
        ({"tool_choice": {"type": "maybe"}}, "unknown type"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"output_format": {"type": "json_schema"}}, "output_config.format: only text"),
        ({"n": 2}, "one call gives one answer"),
        ({"stop_sequences": ["x", " "]}, "stop_sequences: ' ' says nothing"),
        ({"max_tokens": 0}, "less than 1"),
        ({"max_tokens": 10**400}, "max_tokens: the number is too large"),
        ({"top_k": -(10**400)}, "top_k: the number is too large"),
        ({"messages": 5}, "messages"),
        ({"messages": []}, "first message"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "first message"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "reads text only"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}],
                    }
                ]
            },
            "messages.0.content.0.tool_result.content.0.image: not shown: the policy reads text only",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64"}}]}]},
            "messages.0.content.0.document: not shown: the policy reads text only",
        ),
        ({"system": [{"type": "text"}]}, "system.0.text"),
        ({"tools": [{"description": "no name"}]}, "tools.0.name"),
    ],
)
def test_refusals_say_where_and_why(more: dict[str, Any], says: str) -> None:
    with pytest.raises(Refused) as refused:
        parsed({**body_of("hi"), **more})
    assert refused.value.status == 400 and says in refused.value.what


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"5", b'{"messages": [' + b"[" * 100_000])
def test_what_is_no_json_object_is_a_400(data: bytes) -> None:
    with pytest.raises(Refused) as refused:
        parse(data, {})
    assert refused.value.status == 400


PICTURE = {"type": "image", "source": {"type": "url", "url": "http://x"}}


@pytest.mark.parametrize(
    ("source", "is_text"),
    [
        ({"type": "text", "media_type": "text/plain", "data": "all"}, True),
        ({"type": "content", "content": "all"}, True),
        ({"type": "content", "content": [{"type": "text", "text": "all"}]}, True),
        ({"type": "content", "content": [{"type": "text", "text": "all"}, PICTURE]}, False),
        ({"type": "url", "url": "http://x/all.pdf"}, False),
        ({"type": "file", "file_id": "f"}, False),
        (None, False),
    ],
)
def test_documents_are_shown_where_they_are_text(source: Any, is_text: bool) -> None:
    body = body_of([{"type": "text", "text": "hi"}, {"type": "document", "source": source}])
    if is_text:
        (message,) = parsed(body).conversation.messages
        assert "all" in message.blocks[1].text  # type: ignore[union-attr]
    else:
        with pytest.raises(Refused, match=r"messages\.0\.content\.1\.document: not shown"):
            parsed(body)


def test_the_words_of_a_refusal_come_last() -> None:
    """Claude Code tells the policy all that follows the place of a picture: an id there would differ from turn to turn."""
    body = json.dumps(error(Refused(400, "messages.0.content.0.image: why"), "req_1"))
    assert body.endswith('messages.0.content.0.image: why"}}')


def test_harmless_and_unknown_things_are_accepted() -> None:
    request = parsed(
        body_of(
            [
                {"type": "text", "text": "hi"},
                {"type": "search_result", "title": "t", "cache_control": {"type": "ephemeral"}},
            ],
            [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "redacted_thinking", "data": "zz"},
                {"type": "tool_use", "id": "t1", "name": "bash", "input": {}, "caller": {"type": "direct"}},
            ],
            [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "tool_reference", "tool_name": "x"}]},
                {"type": "tool_result", "tool_use_id": "t2"},
            ],
            thinking={"type": "adaptive"},
            context_management={"edits": []},
            output_config={"effort": "high"},
            metadata={"user_id": "{}"},
            tool_choice={"type": "auto", "disable_parallel_tool_use": True},
            tools=[{"name": "bash"}, {"type": "web_search_20250305", "name": "web_search"}],
        )
    )
    user, assistant, results = request.conversation.messages
    assert user.blocks == [Text(text="hi"), Text(text='{"title":"t","type":"search_result"}')]
    assert assistant.blocks == [Thinking(thinking="hm"), Call(id="t1", name="bash", input={})]
    assert results.blocks == [
        Result(tool_use_id="t1", content='{"tool_name":"x","type":"tool_reference"}'),
        Result(tool_use_id="t2", content=""),
    ]
    assert [tool["name"] for tool in request.conversation.tools] == ["bash"]


def test_inline_system_messages_stay_where_they_are_as_reminders() -> None:
    told = parsed(body_of("hi", {"role": "system", "content": [{"type": "text", "text": "Be kind."}]}))
    assert [message.role for message in told.conversation.messages] == ["user", "user"]
    assert told.conversation.messages[1].blocks == [Text(text="<system-reminder>\nBe kind.\n</system-reminder>")]
    assert told.conversation.system == "You are."


def test_half_a_character_from_a_cutting_harness_is_replaced() -> None:
    body = json.dumps(body_of("cut \ud83d")).encode()
    (message,) = parse(body, {}).conversation.messages
    assert message.blocks == [Text(text="cut \ufffd")]


def test_the_digest_ignores_stream_and_key_order_only() -> None:
    body = body_of("hi")
    same = {key: body[key] for key in reversed(body)}
    assert parsed(body).digest == parsed({**same, "stream": True}).digest
    assert parsed({**body, "max_tokens": 5}).digest != parsed(body).digest
    assert parsed(body, {"x-claude-code-agent-id": "a1"}).digest != parsed(body).digest


def test_a_stream_says_the_same_as_a_whole_message() -> None:
    answer = Answer(
        asked=parsed(body_of("hi")),
        blocks=[
            Thinking(thinking="hm\n"),
            Text(text="two\nlines é"),
            Call(id="t1", name="f", input={"a": 1.0, "text": 'q"\n', "deep": {"x": [1, None]}}),
            Call(id="t2", name="g", input={}),
        ],
        finish="stop",
        prompt_tokens=11,
        output_tokens=7,
        created=0,
    )
    events = parse_events(anthropic.opening(answer.asked, 11, 0) + anthropic.rest_of_stream(answer))
    starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [start.get("input") for start in starts[2:]] == [{}, {}]  # clients read arguments from deltas only
    message = assemble(events)
    whole = anthropic.message(answer)
    assert json.dumps(message, sort_keys=True) == json.dumps(whole, sort_keys=True)
    assert whole["stop_reason"] == "tool_use" and whole["content"][0]["signature"] == ""
    assert whole["usage"]["input_tokens"] == 11 and whole["usage"]["output_tokens"] == 7


def test_an_empty_answer_is_a_message_without_blocks() -> None:
    asked = parsed(body_of("hi"))
    answer = Answer(asked=asked, blocks=[], finish="length", prompt_tokens=1, output_tokens=1, created=0)
    stream = anthropic.opening(asked, 1, 0) + anthropic.rest_of_stream(answer)
    assert assemble(parse_events(stream))["stop_reason"] == "max_tokens"


def test_events_as_they_stand_on_the_wire() -> None:
    asked = parsed(body_of("hi"))
    blocks: list[Any] = [Thinking(thinking="hm"), Text(text="ok"), Call(id="t1", name="f", input={"a": "é"})]
    answer = Answer(asked=asked, blocks=blocks, finish="stop", prompt_tokens=11, output_tokens=7, created=0)
    usage = '"usage":{"input_tokens":11,"cache_creation_input_tokens":0,"cache_read_input_tokens":0,"output_tokens":'
    lines = [
        f'{{"type":"message_start","message":{{"id":"msg_{asked.digest[:24]}","type":"message","role":"assistant",'
        f'"model":"policy","content":[],"stop_reason":null,"stop_sequence":null,{usage}0}}}}}}',
        '{"type":"ping"}',
        '{"type":"content_block_start","index":0,"content_block":{"type":"thinking","thinking":"","signature":""}}',
        '{"type":"content_block_delta","index":0,"delta":{"type":"thinking_delta","thinking":"hm"}}',
        '{"type":"content_block_stop","index":0}',
        '{"type":"content_block_start","index":1,"content_block":{"type":"text","text":""}}',
        '{"type":"content_block_delta","index":1,"delta":{"type":"text_delta","text":"ok"}}',
        '{"type":"content_block_stop","index":1}',
        '{"type":"content_block_start","index":2,"content_block":{"type":"tool_use","id":"t1","name":"f","input":{}}}',
        '{"type":"content_block_delta","index":2,"delta":{"type":"input_json_delta","partial_json":"{\\"a\\":\\"é\\"}"}}',
        '{"type":"content_block_stop","index":2}',
        f'{{"type":"message_delta","delta":{{"stop_reason":"tool_use","stop_sequence":null}},{usage}7}}}}',
        '{"type":"message_stop"}',
    ]
    frames = [f"event: {json.loads(line)['type']}\ndata: {line}\n\n" for line in lines]
    assert (anthropic.opening(asked, 11, 0) + anthropic.rest_of_stream(answer)).decode() == "".join(frames)
