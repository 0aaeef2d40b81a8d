"""Chat Completions: what is accepted, refused and sent, and a harness of that kind over a whole proxy."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from schemas.records import CallRecord
from services.mesh.chat import ChatTokenizer
from services.proxy.conversation import Call, Message, Result, Text, Thinking
from services.proxy.dialects import chat_completions as chat
from services.proxy.dialects.dialect import Answer
from services.proxy.refusal import Refused, prompt_too_long
from tests.proxy.bodies import call_text
from tests.proxy.conftest import MakeWorld
from tests.proxy.engines import Engine
from tests.proxy.world import World

PATH = "/v1/chat/completions"
TOOLS = [{"type": "function", "function": {"name": "bash", "description": "Run.", "parameters": {"type": "object"}}}]


def body_of(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": "policy", "messages": list(messages), "tools": TOOLS, **more}


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call_of(name: str, arguments: str, call_id: str = "t1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def parsed(body: Any, headers: dict[str, str] | None = None) -> Any:
    return chat.parse(json.dumps(body).encode(), headers or {})


def assemble(stream: bytes) -> dict[str, Any]:
    """A completion from its chunks, as strict as the strictest client: an id opens a call, and only once."""
    frames = stream.decode().split("\n\n")
    assert frames.pop() == "" and frames.pop() == "data: [DONE]"
    events = [json.loads(frame.removeprefix("data: ")) for frame in frames if not frame.startswith(":")]
    message: dict[str, Any] = {"role": None, "content": ""}
    finish, usage = None, None
    for event in events:
        assert event["object"] == "chat.completion.chunk" and event["id"] == events[0]["id"]
        assert (finish is None) == bool(event["choices"])
        if not event["choices"]:
            usage = event["usage"]
            continue
        (choice,) = event["choices"]
        delta = choice["delta"]
        message["role"] = delta.get("role", message["role"])
        for part in ("content", "reasoning_content"):
            if part in delta:
                message[part] = message.get(part, "") + delta[part]
        if "tool_calls" in delta:
            (piece,) = delta["tool_calls"]
            calls = message.setdefault("tool_calls", [])
            if "id" in piece:
                assert piece["index"] == len(calls) and piece["function"]["arguments"] == ""
                calls.append(call_of(piece["function"]["name"], "", piece["id"]))
            else:
                assert set(piece) == {"index", "function"} and piece["index"] == len(calls) - 1
                calls[-1]["function"]["arguments"] += piece["function"]["arguments"]
        finish = choice["finish_reason"]
    return {"message": message, "finish_reason": finish, "usage": usage}


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"tool_choice": "required"}, "tool_choice: 'required' forces"),
        ({"tool_choice": {"type": "function", "function": {"name": "bash"}}}, "tool_choice: 'function' forces"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice: 'allowed_tools' forces"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 3}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"functions": [{"name": "f"}]}, "use tools"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"n": 2}, "one call gives one answer"),
        ({"max_tokens": 0}, "max_tokens: 0 is less than 1"),
        ({"seed": 10**400}, "seed: the number is too large"),
        ({"max_completion_tokens": -1}, "max_completion_tokens: -1 is less than 1"),
        ({"messages": 5}, "messages"),
        ({"messages": []}, "first message"),
        ({"messages": [said("system", "only")]}, "first message"),
        ({"messages": [said("assistant", "x")]}, "first message"),
        ({"messages": [said("robot", "x")]}, "messages.0.role: unknown role"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"messages": [said("user", 5)]}, "messages.0.content: expected a string or a list"),
        ({"messages": [said("user", [5])]}, "messages.0.content.0: expected a part"),
        ({"messages": [said("user", [{"type": "text"}])]}, "messages.0.content.0.text"),
        ({"messages": [said("user", [{"type": "image_url", "image_url": {}}])]}, "the policy reads text only"),
        ({"messages": [said("user", [{"type": "input_audio"}])]}, "the policy reads text only"),
        ({"messages": [said("user", "x"), said("tool", "y")]}, "messages.1.tool_call_id"),
        ({"messages": [said("user", "x"), said("assistant", None, tool_calls=[{"id": "t"}])]}, "tool_calls.0.function"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0: only functions"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
    ],
)
def test_refusals_say_where_and_why(more: dict[str, Any], says: str) -> None:
    with pytest.raises(Refused) as refused:
        parsed({**body_of(said("user", "hi")), **more})
    assert refused.value.status == 400 and says in refused.value.what


def test_a_request_of_opencode() -> None:
    """Content empty beside calls, arguments compact, usage wanted, one user message in parts."""
    request = parsed(
        body_of(
            said("system", "You are opencode."),
            said("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
            said(
                "assistant",
                "",
                reasoning_content="hm",
                tool_calls=[call_of("bash", '{"command":"ls"}'), call_of("bash", "", "t2")],
            ),
            said("tool", "second", tool_call_id="t2"),
            said("tool", [{"type": "text", "text": "first"}], tool_call_id="t1"),
            said("user", "go on"),
            max_tokens=32000,
            tool_choice="auto",
            stream=True,
            stream_options={"include_usage": True},
            temperature=0.5,
            seed=3,
        )
    )
    told = request.conversation
    assert told.system == "You are opencode." and (told.role, told.agent) == ("main", "")
    assert [message.role for message in told.messages] == ["user", "assistant", "user", "user"]
    assert told.messages[0].blocks == [Text(text="a"), Text(text="b")]
    assert told.messages[1].blocks == [
        Thinking(thinking="hm"),
        Call(id="t1", name="bash", input={"command": "ls"}),
        Call(id="t2", name="bash", input={}),
    ]
    assert told.messages[2].blocks == [
        Result(tool_use_id="t1", content="first"),
        Result(tool_use_id="t2", content="second"),
    ]
    assert told.tools == [{"name": "bash", "description": "Run.", "input_schema": {"type": "object"}}]
    assert request.stream and request.max_tokens == 32000 and request.wire.usage
    assert request.asked == {"temperature": 0.5, "seed": 3.0, "max_tokens": 32000.0}


def test_null_means_that_nothing_was_asked() -> None:
    nothing = dict.fromkeys(
        ("tools", "tool_choice", "max_tokens", "stream", "stream_options", "temperature", "stop", "n", "logit_bias")
    )
    request = parsed({**body_of(said("user", "hi")), **nothing, "logprobs": False, "response_format": {"type": "text"}})
    assert not request.stream and request.max_tokens is None and not request.calls_allowed and request.asked == {}


def test_the_newer_bound_wins() -> None:
    assert parsed(body_of(said("user", "hi"), max_tokens=5, max_completion_tokens=7)).max_tokens == 7


def test_instructions_lead_or_are_reminders_where_they_stand() -> None:
    told = parsed(
        body_of(
            said("system", "one"),
            said("developer", [{"type": "text", "text": "two"}]),
            said("user", "hi"),
            said("assistant", "yes"),
            said("developer", "Be kind."),
            said("user", "go"),
        )
    ).conversation
    assert told.system == "one\ntwo"
    assert [message.role for message in told.messages] == ["user", "assistant", "user", "user"]
    assert told.messages[2].blocks == [Text(text="<system-reminder>\nBe kind.\n</system-reminder>")]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("", {}),
        (' {"a": 1} ', {"a": 1}),
        ('{"a": ', {"__unparsedToolInput": {"raw": '{"a": ', "len": 6}}),
        ("[1]", {"__unparsedToolInput": {"raw": "[1]", "len": 3}}),
        ('{"a": NaN}', {"__unparsedToolInput": {"raw": '{"a": NaN}', "len": 10}}),
        ('{"a": "\\ud800"}', {"__unparsedToolInput": {"raw": '{"a": "\\ud800"}', "len": 15}}),
    ],
)
def test_arguments_in_the_history_are_objects_or_kept_word_for_word(text: str, kept: dict[str, Any]) -> None:
    told = parsed(body_of(said("user", "hi"), said("assistant", None, tool_calls=[call_of("bash", text)])))
    assert told.conversation.messages[1] == Message(role="assistant", blocks=[Call(id="t1", name="bash", input=kept)])


def test_the_digest_ignores_how_the_answer_is_sent() -> None:
    body = body_of(said("user", "hi"))
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    assert parsed(body).digest == parsed(streamed).digest != parsed({**body, "max_tokens": 3}).digest


def answer_to(request: Any, *blocks: Any, finish: Any = "stop") -> Answer:
    return Answer(
        asked=request, blocks=list(blocks), finish=finish, prompt_tokens=11, output_tokens=7, created=1_700_000_000
    )


def test_a_stream_says_the_same_as_a_whole_completion() -> None:
    asked = parsed(body_of(said("user", "hi"), stream=True, stream_options={"include_usage": True}))
    answer = answer_to(
        asked,
        Thinking(thinking="hm\n"),
        Text(text="two\nlines é"),
        Call(id="t1", name="f", input={"a": 1.0, "text": 'q"\n'}),
        Call(id="t2", name="g", input={}),
    )
    whole = chat.completion(answer)
    (choice,) = whole["choices"]
    streamed = assemble(chat.chunks(answer))
    assert {**choice["message"]} == {**streamed["message"], "refusal": None}
    assert choice["finish_reason"] == streamed["finish_reason"] == "tool_calls"
    assert whole["usage"] == streamed["usage"] == {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a":1.0,"text":"q\\"\\n"}'


def test_chunks_as_they_stand_on_the_wire() -> None:
    asked = parsed(body_of(said("user", "hi"), stream=True))
    base = (
        f'{{"id":"chatcmpl_{asked.digest[:24]}","object":"chat.completion.chunk","created":1700000000,"model":"policy",'
    )
    deltas = [
        ('{"role":"assistant","content":""}', "null"),
        ('{"content":"ok"}', "null"),
        ('{"tool_calls":[{"index":0,"id":"t1","type":"function","function":{"name":"f","arguments":""}}]}', "null"),
        ('{"tool_calls":[{"index":0,"function":{"arguments":"{}"}}]}', "null"),
        ("{}", '"tool_calls"'),
    ]
    lines = [
        f'data: {base}"choices":[{{"index":0,"delta":{delta},"logprobs":null,"finish_reason":{finish}}}]}}\n\n'
        for delta, finish in deltas
    ]
    stream = chat.chunks(answer_to(asked, Text(text="ok"), Call(id="t1", name="f", input={})))
    assert stream.decode() == "".join(lines) + "data: [DONE]\n\n"


def test_no_calls_is_no_list_of_calls_and_no_text_is_null() -> None:
    asked = parsed(body_of(said("user", "hi")))
    plain = chat.completion(answer_to(asked, Text(text="ok"), finish="length"))["choices"][0]
    assert "tool_calls" not in plain["message"] and plain["finish_reason"] == "length"
    assert b"tool_calls" not in chat.chunks(answer_to(asked, Text(text="ok")))
    assert chat.completion(answer_to(asked))["choices"][0]["message"]["content"] is None


def test_errors_are_in_the_vendors_words() -> None:
    too_long = prompt_too_long(5000, 4096)
    assert chat.DIALECT.status(too_long) == 400
    assert chat.DIALECT.error(too_long, "r") == {
        "error": {
            "message": "prompt is too long: 5000 tokens > 4096 maximum",
            "type": "invalid_request_error",
            "param": None,
            "code": "context_length_exceeded",
        }
    }
    later = Refused(529, "ask again")
    assert chat.DIALECT.status(later) == 503 and chat.DIALECT.headers(later) == {"retry-after": "5"}
    assert chat.DIALECT.headers(too_long) == {}
    event = chat.error_event(later, parsed(body_of(said("user", "hi"))), "r", 0).decode()
    assert event.endswith("\n\ndata: [DONE]\n\n") and json.loads(event[6:].split("\n")[0])["error"]["message"]


# over a proxy


async def ask(world: World, body: dict[str, Any], **who: Any) -> dict[str, Any]:
    async with world.post(body, PATH, **who) as response:
        assert response.status == 200, await response.text()
        if body.get("stream"):
            return assemble(await response.read())
        choice: dict[str, Any] = (await response.json())["choices"][0]
        return choice


async def test_a_conversation_with_parallel_calls_streaming_and_not(
    world: World, engine: Engine, tokenizer: ChatTokenizer
) -> None:
    two = call_text("bash", {"command": "a"}) + "\n" + call_text("bash", {"command": "b", "n": 5000.0})
    engine.script += [engine.say("Both.\n" + two), engine.say("done"), engine.say("bye")]
    start = [said("system", "You are."), said("user", "task")]
    first = await ask(world, body_of(*start, stream=True, stream_options={"include_usage": True}))
    one, other = first["message"]["tool_calls"]
    assert first["finish_reason"] == "tool_calls" and first["message"]["content"] == "Both."
    echo = said(
        "assistant",
        "Both.",
        tool_calls=[
            one,
            call_of("bash", '{"n":5000,"command":"b"}', other["id"]),
        ],
    )
    results = [said("tool", "B", tool_call_id=other["id"]), said("tool", "A", tool_call_id=one["id"])]
    second = await ask(world, body_of(*start, echo, *results))
    assert second["message"]["content"] == "done" and second["finish_reason"] == "stop"
    third = await ask(world, body_of(*start, echo, *results, second["message"], said("user", "and?"), stream=True))
    assert third["message"]["content"] == "bye" and third["usage"] is None
    records = [record for record in await world.records() if isinstance(record, CallRecord)]
    assert [record.parent for record in records] == [None, records[0].call, records[1].call]
    assert first["usage"]["prompt_tokens"] == len(records[0].input_ids)
    assert tokenizer.decode(records[1].input_ids).startswith(
        "\n<|im_start|>user\n<tool_response>\nA\n</tool_response>\n<tool_response>\nB\n</tool_response>"
    )


async def test_what_fails_before_the_first_ping_is_told_by_its_status(world: World, engine: Engine) -> None:
    """Clients of this dialect repeat a status, but never a stream that brought an error."""
    engine.hold = True
    task = asyncio.create_task(world.post(body_of(said("user", "hi"), stream=True), PATH).__aenter__())
    await engine.until(1)
    world.flight().stop(Refused(529, "ask again"))
    response = await task
    assert response.status == 503 and response.headers["retry-after"] == "5"
    assert (await response.json())["error"]["code"] == "server_overloaded"


async def test_comments_keep_a_waiting_client_and_an_error_may_follow(make_world: MakeWorld, engine: Engine) -> None:
    world = await make_world(ping_s=0.01)
    engine.hold = True
    async with world.post(body_of(said("user", "hi"), stream=True), PATH) as response:
        assert response.status == 200 and response.content_type == "text/event-stream"
        assert await response.content.readexactly(8) == b": ping\n\n"
        world.flight().stop(Refused(529, "ask again"))
        rest = (await response.read()).decode()
    assert rest.endswith("data: [DONE]\n\n") and '"ask again"' in rest


async def test_a_prompt_that_is_too_long_is_a_400_with_its_code(world: World) -> None:
    async with world.post(body_of(said("user", "x" * 5000), stream=True), PATH) as response:
        error = (await response.json())["error"]
        assert response.status == 400 and error["code"] == "context_length_exceeded"
        assert error["message"].startswith("prompt is too long: ") and error["message"].endswith("> 4096 maximum")


async def test_calls_that_are_not_wanted_are_text(world: World, engine: Engine) -> None:
    engine.script.append(engine.say(call_text("bash", {})))
    choice = await ask(world, body_of(said("user", "hi"), tool_choice="none"))
    assert "tool_calls" not in choice["message"] and choice["message"]["content"].startswith("<tool_call>")


async def test_models_are_listed(world: World) -> None:
    async with world.session.get(world.url + "/v1/models", headers=world.headers()) as response:
        assert [model["id"] for model in (await response.json())["data"]] == ["policy"]
    async with world.session.get(world.url + "/v1/models/any/name", headers=world.headers()) as response:
        assert (await response.json())["id"] == "any/name"
    async with world.session.get(world.url + "/v1/models") as response:
        assert response.status == 401
