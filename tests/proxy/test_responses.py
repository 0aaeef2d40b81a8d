"""Responses: what is accepted, refused and sent, and a harness like Codex over a whole proxy."""

from __future__ import annotations

import json
from typing import Any

import pytest

from schemas.records import CallRecord
from services.mesh.chat import ChatTokenizer
from services.proxy.conversation import Call, Result, Text, Thinking
from services.proxy.dialects import responses
from services.proxy.dialects import responses_answer as answers
from services.proxy.dialects.dialect import Answer
from services.proxy.refusal import Refused, prompt_too_long
from tests.proxy.bodies import call_text
from tests.proxy.engines import Engine
from tests.proxy.world import World

PATH = "/v1/responses"
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "exec", "description": "Run.", "strict": False, "parameters": {"type": "object"}},
    {
        "type": "namespace",
        "name": "agents",
        "description": "Other agents.",
        "tools": [{"type": "function", "name": "spawn", "description": "Start one.", "parameters": {}}],
    },
    {"type": "custom", "name": "apply_patch", "description": "Edit.", "format": GRAMMAR},
    {"type": "web_search"},
]


def said(role: str, text: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def body_of(*items: dict[str, Any], **more: Any) -> dict[str, Any]:
    """As Codex sends it."""
    return {
        "model": "policy",
        "input": list(items),
        "tools": TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "client_metadata": {"x": "y"},
        **more,
    }


def parsed(body: Any, headers: dict[str, str] | None = None) -> Any:
    return responses.parse(json.dumps(body).encode(), headers or {})


def events_of(stream: bytes) -> list[dict[str, Any]]:
    """Events, each under its name and in the order of their numbers."""
    events: list[dict[str, Any]] = []
    for frame in stream.decode().split("\n\n")[:-1]:
        if frame.startswith(":"):
            continue
        name, line = frame.split("\n")
        event = json.loads(line.removeprefix("data: "))
        assert name == f"event: {event['type']}" and event.pop("sequence_number") == len(events)
        events.append(event)
    return events


def assemble(stream: bytes) -> dict[str, Any]:
    """The response of a stream, with every item put together from its deltas."""
    events = events_of(stream)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    items: list[dict[str, Any]] = []
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            items.append(event["item"])
            continue
        item = items[-1]
        assert event["output_index"] == len(items) - 1
        if kind == "output_item.done":
            assert {**item, "status": event["item"]["status"]} == event["item"]
            items[-1] = event["item"]
            continue
        assert event["item_id"] == item["id"]
        match kind:
            case "content_part.added" | "reasoning_summary_part.added":
                item["content" if kind.startswith("content") else "summary"].append(event["part"])
            case "output_text.delta":
                item["content"][event["content_index"]]["text"] += event["delta"]
            case "reasoning_summary_text.delta":
                item["summary"][event["summary_index"]]["text"] += event["delta"]
            case "function_call_arguments.delta":
                item["arguments"] += event["delta"]
            case "custom_tool_call_input.delta":
                item["input"] += event["delta"]
            case "function_call_arguments.done":
                assert event["arguments"] == item["arguments"]
            case "custom_tool_call_input.done":
                assert event["input"] == item["input"]
            case "output_text.done" | "reasoning_summary_text.done":
                assert event["text"] == (item.get("content") or item.get("summary"))[0]["text"]
            case "content_part.done" | "reasoning_summary_part.done":
                assert event["part"] == (item.get("content") or item.get("summary"))[0]
            case other:
                raise AssertionError(f"unexpected {other}")
    last: dict[str, Any] = events[-1]["response"]
    assert events[-1]["type"] == f"response.{last['status']}" and last["output"] == items
    return last


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"tool_choice": "required"}, "tool_choice: 'required' forces"),
        ({"tool_choice": {"type": "function", "name": "exec"}}, "tool_choice: 'function' forces"),
        ({"previous_response_id": "resp_1"}, "previous_response_id: nothing is stored"),
        ({"conversation": "conv_1"}, "conversation: nothing is stored"),
        ({"prompt": {"id": "p"}}, "prompt: nothing is stored"),
        ({"background": True}, "background: nothing is stored"),
        ({"top_logprobs": 2}, "logprobs"),
        ({"include": ["message.output_text.logprobs"]}, "logprobs"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"max_output_tokens": 0}, "max_output_tokens: 0 is less than 1"),
        ({"input": 5}, "input"),
        ({"input": []}, "first message"),
        ({"input": ""}, "first message"),
        ({"input": [said("developer", "x")]}, "first message"),
        ({"input": [said("robot", "x")]}, "input.0.role: unknown role"),
        ({"input": [{"type": "message", "role": "user", "content": [{"type": "input_image"}]}]}, "reads text only"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input.0.call_id"),
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]}]},
            "input.0.output.0: input_image: not shown: the policy reads text only",
        ),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input.0.arguments"),
        ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "f"}]}, "input.0.input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "send the item itself"),
        ({"input": [{"type": "reasoning", "summary": [{"type": "summary_text"}]}]}, "input.0.summary.0.text"),
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools.0.tools"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [5]}]}, "tools.0.tools.0"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]}, "tools.0.tools.0.name"),
    ],
)
def test_refusals_say_where_and_why(more: dict[str, Any], says: str) -> None:
    with pytest.raises(Refused) as refused:
        parsed({**body_of(said("user", "hi")), **more})
    assert refused.value.status == 400 and says in refused.value.what


def test_every_kind_of_item() -> None:
    told = parsed(
        body_of(
            said("developer", "You are Codex."),
            said("user", "task"),
            {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "hm"}], "content": None},
            said("assistant", "Look."),
            {
                "type": "function_call",
                "id": "fc",
                "call_id": "t1",
                "name": "spawn",
                "namespace": "agents",
                "arguments": '{ "a" : 1 }',
                "status": "completed",
            },
            {"type": "custom_tool_call", "call_id": "t2", "name": "apply_patch", "input": "*** Begin"},
            {"type": "custom_tool_call_output", "call_id": "t2", "output": "ok"},
            {"type": "function_call_output", "call_id": "t1", "output": [{"type": "input_text", "text": "done"}]},
            said("developer", "Be quick."),
            {"role": "user", "content": "an easy message"},
            {"type": "web_search_call", "id": "ws", "status": "completed"},
        )
    ).conversation
    assert told.system == "You are Codex." and (told.role, told.agent) == ("main", "")
    assert [message.role for message in told.messages] == ["user", "assistant", "user", "user", "user", "user"]
    assert told.messages[1].blocks == [
        Thinking(thinking="hm"),
        Text(text="Look."),
        Call(id="t1", name="agents__spawn", input={"a": 1}),
        Call(id="t2", name="apply_patch", input={"input": "*** Begin"}),
    ]
    assert told.messages[2].blocks == [Result(tool_use_id="t1", content="done"), Result(tool_use_id="t2", content="ok")]
    assert told.messages[3].blocks == [Text(text="<system-reminder>\nBe quick.\n</system-reminder>")]
    assert told.messages[4].blocks == [Text(text="an easy message")]
    assert told.messages[5].blocks == [Text(text='{"id":"ws","status":"completed","type":"web_search_call"}')]


def test_instructions_come_first_and_input_may_be_a_string() -> None:
    told = parsed({"model": "m", "input": "hi", "instructions": "Be kind."}).conversation
    assert told.system == "Be kind." and told.messages[0].blocks == [Text(text="hi")] and told.tools == []


def test_tools_as_the_policy_sees_them() -> None:
    function, spawn, patch = parsed(body_of(said("user", "hi"))).conversation.tools
    assert function == {"name": "exec", "description": "Run.", "input_schema": {"type": "object"}}
    assert spawn == {"name": "agents__spawn", "description": "Other agents.\n\nStart one.", "input_schema": {}}
    assert patch["name"] == "apply_patch" and patch["input_schema"]["required"] == ["input"]
    assert patch["input_schema"]["properties"]["input"]["description"].endswith('(lark):\nstart: "x"')


def answer_to(request: Any, *blocks: Any, finish: Any = "stop") -> Answer:
    return Answer(asked=request, blocks=list(blocks), finish=finish, prompt_tokens=11, output_tokens=7, created=1)


def test_a_stream_says_the_same_as_a_whole_response() -> None:
    asked = parsed(body_of(said("user", "hi")))
    answer = answer_to(
        asked,
        Thinking(thinking="hm\n"),
        Text(text="two\nlines é"),
        Call(id="t1", name="exec", input={"a": 1.0}),
        Call(id="t2", name="agents__spawn", input={}),
        Call(id="t3", name="apply_patch", input={"input": "*** Begin\n"}),
        Call(id="t4", name="apply_patch", input={"patch": 5}),
        Call(id="t5", name="nobody", input={}),
    )
    whole = answers.response(answer)
    assert assemble(answers.opening(asked, 11, 1) + answers.events(answer)) == whole
    thought, message, *calls = whole["output"]
    assert thought["summary"] == [{"type": "summary_text", "text": "hm\n"}]
    assert message["content"][0]["text"] == "two\nlines é"
    assert [(c["type"], c["call_id"], c["name"], c.get("namespace")) for c in calls] == [
        ("function_call", "t1", "exec", None),
        ("function_call", "t2", "spawn", "agents"),
        ("custom_tool_call", "t3", "apply_patch", None),
        ("custom_tool_call", "t4", "apply_patch", None),
        ("function_call", "t5", "nobody", None),
    ]
    assert [c.get("arguments") or c.get("input") for c in calls] == [
        '{"a":1.0}',
        "{}",
        "*** Begin\n",
        '{"patch":5}',
        "{}",
    ]
    assert len({item["id"] for item in whole["output"]}) == 7 and whole["status"] == "completed"
    assert whole["usage"] == {
        "input_tokens": 11,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 18,
    }


def test_what_was_cut_off_is_incomplete() -> None:
    asked = parsed(body_of(said("user", "hi")))
    cut = assemble(
        answers.opening(asked, 1, 1) + answers.events(answer_to(asked, Text(text="so far"), finish="length"))
    )
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert cut["output"][0]["status"] == "incomplete"
    assert assemble(answers.opening(asked, 1, 1) + answers.events(answer_to(asked)))["output"] == []


@pytest.mark.parametrize(
    ("refused", "code"),
    [(Refused(529, "ask again"), "server_error"), (prompt_too_long(5, 4), "context_length_exceeded")],
)
def test_a_stream_without_an_answer_ends_as_failed(refused: Refused, code: str) -> None:
    asked = parsed(body_of(said("user", "hi")))
    last = events_of(answers.opening(asked, 0, 1) + answers.failed(refused, asked, "r", 1))[-1]
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": code, "message": refused.what}


# over a proxy


async def ask(world: World, body: dict[str, Any], headers: dict[str, str] | None = None) -> dict[str, Any]:
    sent = {**world.headers(), **(headers or {})}
    async with world.session.post(world.url + PATH, json=body, headers=sent) as response:
        assert response.status == 200, await response.text()
        whole: dict[str, Any] = assemble(await response.read()) if body.get("stream") else await response.json()
        return whole


async def test_a_conversation_like_codex(world: World, engine: Engine, tokenizer: ChatTokenizer) -> None:
    engine.script += [
        engine.say(
            "Both.\n" + call_text("agents__spawn", {"m": 5000.0}) + "\n" + call_text("apply_patch", {"input": "p"})
        ),
        engine.say("done"),
        engine.say("bye"),
    ]
    start = [said("developer", "You are."), said("user", "task")]
    first = await ask(world, body_of(*start, stream=True))
    message, spawn, patch = first["output"]
    results = [
        {"type": "custom_tool_call_output", "call_id": patch["call_id"], "output": "B"},
        {"type": "function_call_output", "call_id": spawn["call_id"], "output": "A"},
    ]
    history = [*start, message, spawn, patch, *results]
    second = await ask(world, body_of(*history))
    assert second["output"][0]["content"][0]["text"] == "done" and second["status"] == "completed"
    third = await ask(world, body_of(*history, *second["output"], said("user", "and?"), stream=True))
    assert third["output"][0]["content"][0]["text"] == "bye"
    records = [record for record in await world.records() if isinstance(record, CallRecord)]
    assert [record.parent for record in records] == [None, records[0].call, records[1].call]
    assert first["usage"]["total_tokens"] == len(records[0].input_ids) + len(records[0].output_ids)
    assert tokenizer.decode(records[1].input_ids).startswith(
        "\n<|im_start|>user\n<tool_response>\nA\n</tool_response>\n<tool_response>\nB\n</tool_response>"
    )
    ids = [item["id"] for whole in (first, second, third) for item in [whole, *whole["output"]]]
    assert len(set(ids)) == len(ids)


async def test_a_prompt_that_is_too_long_fails_in_the_stream(world: World) -> None:
    body = body_of(said("user", "x" * 5000))
    async with world.post({**body, "stream": True}, PATH) as response:
        assert response.status == 200
        last = events_of(await response.read())[-1]
    assert last["type"] == "response.failed" and last["response"]["error"]["code"] == "context_length_exceeded"
    async with world.post(body, PATH) as response:
        assert response.status == 400 and (await response.json())["error"]["code"] == "context_length_exceeded"


async def test_tokens_are_counted(world: World) -> None:
    body = body_of(said("user", "hi"))
    async with world.post(body, "/v1/responses/input_tokens") as response:
        counted = await response.json()
    assert counted == {
        "object": "response.input_tokens",
        "input_tokens": (await ask(world, body))["usage"]["input_tokens"],
    }


def test_events_as_codex_wants_them() -> None:
    """The shortest stream that it accepts, kind by kind."""
    asked = parsed(body_of(said("user", "hi")))
    answer = answer_to(asked, Thinking(thinking="hm"), Text(text="ok"), Call(id="t1", name="exec", input={}))
    stream = answers.opening(asked, 11, 1) + answers.events(answer)
    inner = [
        [
            "reasoning_summary_part.added",
            "reasoning_summary_text.delta",
            "reasoning_summary_text.done",
            "reasoning_summary_part.done",
        ],
        ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"],
        ["function_call_arguments.delta", "function_call_arguments.done"],
    ]
    kinds = [kind for parts in inner for kind in ("output_item.added", *parts, "output_item.done")]
    assert [event["type"].removeprefix("response.") for event in events_of(stream)] == [
        "created",
        "in_progress",
        *kinds,
        "completed",
    ]
