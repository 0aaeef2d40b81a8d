"""OpenAI Chat Completions, both ways: request bodies to conversations, answers to completions, chunks and errors.

Pure functions. What would falsify log-probabilities, or cannot be shown to the policy, is refused with a sentence that
says why. Nothing goes out before the answer but comments, and a call's id goes out once: clients open a call for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from services.proxy.conversation import Block, Call, Request, Result, Text, Thinking
from services.proxy.dialects.body import Body, read_body
from services.proxy.dialects.dialect import Answer, Dialect
from services.proxy.dialects.openai import (
    PING,
    RETRY_AFTER_S,
    STATUSES,
    arguments_of,
    conversation,
    error,
    texts_of,
    wire_id,
)
from services.proxy.dialects.wire import NO_GRAMMAR, compact, convert, decode, field, numbers, stops
from services.proxy.memory import Memory, request_digest
from services.proxy.refusal import Refused
from services.proxy.transcript import Transcript

NAME = "chat completions"
DONE = b"data: [DONE]\n\n"


class _Head(msgspec.Struct, frozen=True):
    model: str = ""
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    logit_bias: Any = None
    logprobs: Any = None
    top_logprobs: Any = None
    response_format: dict[str, Any] | None = None
    functions: Any = None
    function_call: Any = None
    modalities: list[str] | None = None


class Wire(msgspec.Struct, frozen=True):
    """What the answer's form depends on."""

    usage: bool
    """A last chunk shall say how many tokens there were."""


def parse(data: bytes, headers: Mapping[str, str], memory: Memory | None = None) -> Request:
    """A request from its body. `headers` answers lower-case names; `memory` is the execution's. Raises Refused (400) with
    the place and the reason."""
    known = memory or Memory()
    return read_body(
        data,
        dialect=NAME,
        messages="messages",
        apart=("stream", "stream_options"),
        memory=known,
        read=lambda body: _request(body, headers, known),
    )


def _request(body: Body, headers: Mapping[str, str], memory: Memory) -> Request:
    head = memory.head(NAME, body.head, _head)
    asked, tools = head.value
    messages = body.told("messages")
    history = memory.history(NAME, messages)
    told = conversation(history.read(messages, _message), headers, tools, memory)
    most = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
    options = body.value("stream_options", dict[str, Any])
    return Request(
        conversation=told,
        digest=request_digest(NAME, told.agent, head, history),
        model=asked.model,
        stream=bool(body.value("stream", bool)),
        max_tokens=most,
        asked=numbers(
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=asked.top_k,
            presence_penalty=asked.presence_penalty,
            frequency_penalty=asked.frequency_penalty,
            seed=asked.seed,
            max_tokens=most,
        ),
        stop=stops([asked.stop] if isinstance(asked.stop, str) else asked.stop, "stop"),
        calls_allowed=bool(tools) and asked.tool_choice != "none",
        wire=Wire(usage=bool((options or {}).get("include_usage"))),
    )


def _head(data: bytes) -> tuple[_Head, list[dict[str, Any]]]:
    head = decode(data, _Head)
    _check(head)
    return head, _tools(head.tools or [])


def _check(body: _Head) -> None:
    choice = body.tool_choice
    if choice not in (None, "auto", "none"):
        kind = choice.get("type", "?") if isinstance(choice, dict) else choice
        raise Refused(400, f"tool_choice: {kind!r} forces or bounds calls by grammar, not done here: {NO_GRAMMAR}")
    if body.logit_bias:
        raise Refused(400, f"logit_bias: not supported: {NO_GRAMMAR}")
    if body.logprobs or body.top_logprobs:
        raise Refused(400, "logprobs: not handed out: they are recorded for training")
    if (body.response_format or {}).get("type", "text") != "text":
        raise Refused(400, f"response_format: only text: {NO_GRAMMAR}")
    if body.functions or body.function_call:
        raise Refused(400, "functions, function_call: the form before tools is not supported; use tools")
    if body.n is not None and body.n != 1:
        raise Refused(400, f"n: {body.n} answers were asked for, one call gives one answer")
    if body.modalities not in (None, [], ["text"]):
        raise Refused(400, f"modalities: {body.modalities} were asked for, the policy writes text")
    for name in ("max_tokens", "max_completion_tokens"):
        most = getattr(body, name)
        if most is not None and most < 1:
            raise Refused(400, f"{name}: {most} is less than 1")


def _tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    known = []
    for index, tool in enumerate(tools):
        where = f"tools.{index}"
        if tool.get("type", "function") != "function":
            raise Refused(400, f"{where}: only functions are supported, not {tool['type']!r}")
        function = field(tool, "function", dict, where)
        known.append(
            {
                "name": field(function, "name", str, f"{where}.function"),
                "description": function.get("description") or "",
                "input_schema": function.get("parameters") or {},
            }
        )
    return known


def _message(told: Transcript, item: bytes, index: int) -> None:
    where = f"messages.{index}"
    message = decode(item, dict[str, Any], where)
    role = field(message, "role", str, where)
    texts = texts_of(message.get("content"), f"{where}.content")
    if role in ("system", "developer"):
        told.instruct("\n".join(texts))
    elif role == "user":
        told.user([Text(text=text) for text in texts])
    elif role == "assistant":
        told.assistant(_said(message, texts, where))
    elif role == "tool":
        told.result(Result(tool_use_id=field(message, "tool_call_id", str, where), content="\n".join(texts)))
    else:
        raise Refused(400, f"{where}.role: unknown role {role!r}")


def _said(message: dict[str, Any], texts: list[str], where: str) -> list[Block]:
    thoughts = message.get("reasoning_content") or message.get("reasoning")
    blocks: list[Block] = [Thinking(thinking=thoughts)] if isinstance(thoughts, str) else []
    blocks += [Text(text=text) for text in texts]
    refusal = message.get("refusal")
    if isinstance(refusal, str):
        blocks.append(Text(text=refusal))
    for index, call in enumerate(convert(message.get("tool_calls") or [], list[dict[str, Any]])):
        place = f"{where}.tool_calls.{index}"
        function = field(call, "function", dict, place)
        arguments = field(function, "arguments", str, f"{place}.function")
        name = field(function, "name", str, f"{place}.function")
        blocks.append(Call(id=field(call, "id", str, place), name=name, input=arguments_of(arguments)))
    return blocks


# answers


def completion(answer: Answer) -> dict[str, Any]:
    """The body of an answer that isn't streamed."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or None, "refusal": None}
    if answer.thoughts:
        message["reasoning_content"] = answer.thoughts
    if answer.calls:
        message["tool_calls"] = [_call(call, compact(call.input)) for call in answer.calls]
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason(answer)}
    return {**_envelope(answer, "chat.completion"), "choices": [choice], "usage": _usage(answer)}


def finish_reason(answer: Answer) -> str:
    """Why the answer ends, in the words of the API."""
    if answer.finish == "length":
        return "length"
    return "tool_calls" if answer.calls else "stop"


def chunks(answer: Answer) -> bytes:
    """The whole stream."""
    envelope = _envelope(answer, "chat.completion.chunk")
    wanted = answer.asked.wire.usage
    if wanted:
        envelope["usage"] = None
    sent = [_event({**envelope, "choices": [choice]}) for choice in _choices(answer)]
    if wanted:
        sent.append(_event({**envelope, "choices": [], "usage": _usage(answer)}))
    return b"".join([*sent, DONE])


def _choices(answer: Answer) -> Iterator[dict[str, Any]]:
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if answer.thoughts:
        deltas.append({"reasoning_content": answer.thoughts})
    if answer.text:
        deltas.append({"content": answer.text})
    for index, call in enumerate(answer.calls):
        deltas.append({"tool_calls": [{"index": index, **_call(call, "")}]})
        deltas.append({"tool_calls": [{"index": index, "function": {"arguments": compact(call.input)}}]})
    for delta in deltas:
        yield {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
    yield {"index": 0, "delta": {}, "logprobs": None, "finish_reason": finish_reason(answer)}


def error_event(refused: Refused, request: Request, request_id: str, created: int) -> bytes:
    """A refusal after the stream has begun."""
    return _event(error(refused, request_id)) + DONE


def _call(call: Call, arguments: str) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _envelope(answer: Answer, kind: str) -> dict[str, Any]:
    request = answer.asked
    return {"id": wire_id("chatcmpl", request), "object": kind, "created": answer.created, "model": request.model}


def _usage(answer: Answer) -> dict[str, Any]:
    """All prompt tokens count as input: what an engine had in its cache is its own affair."""
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.output_tokens,
        "total_tokens": answer.prompt_tokens + answer.output_tokens,
    }


def _event(data: dict[str, Any]) -> bytes:
    return f"data: {compact(data)}\n\n".encode()


DIALECT = Dialect(
    name=NAME,
    path="/chat/completions",
    parse=parse,
    whole=completion,
    opening=None,
    ping=PING,
    rest=chunks,
    error=error,
    error_event=error_event,
    statuses=STATUSES,
    retry_after_s=RETRY_AFTER_S,
)
