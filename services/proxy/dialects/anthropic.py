"""Anthropic Messages, both ways: request bodies to conversations, answers to messages, stream events and errors.

Pure functions. What is kept of a request is what is rendered; what would falsify log-probabilities, or cannot be shown
to the policy, is refused with a sentence that says why. Blocks of unknown kinds stay as the text of their JSON, if they
are text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from services.mesh.chat import BILLING
from services.proxy.conversation import (
    Block,
    Call,
    Conversation,
    Request,
    Result,
    Text,
    Thinking,
    joined,
)
from services.proxy.dialects.body import Body, read_body
from services.proxy.dialects.dialect import OVERLOADED, Answer, Dialect
from services.proxy.dialects.pictures import unreadable
from services.proxy.dialects.wire import NO_GRAMMAR, TEXT_ONLY, compact, decode, field, numbers, shown, stops
from services.proxy.memory import Memory, request_digest
from services.proxy.refusal import Refused
from services.proxy.roles import Asker, classify
from services.proxy.transcript import Transcript

NAME = "messages"
PING = b'event: ping\ndata: {"type":"ping"}\n\n'
KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    OVERLOADED: "api_error",
}
"""Error types. A harness repeats 401, 500 and 503, never 400 and 413. Never the vendor's own 529 `overloaded_error`: after
that the sub-agents of Claude Code 2.1.112 give up at once, and hand the error on as what they found."""


class _Message(msgspec.Struct, frozen=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class _Head(msgspec.Struct, frozen=True):
    model: str = ""
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    logit_bias: Any = None
    n: int | None = None
    output_config: dict[str, Any] | None = None
    output_format: Any = None


class _Read(msgspec.Struct, frozen=True):
    """A head that was read."""

    body: _Head
    billing: str
    system: str
    tools: list[dict[str, Any]]


def parse(data: bytes, headers: Mapping[str, str], memory: Memory | None = None) -> Request:
    """A request from its body. `headers` answers lower-case names; `memory` is the execution's. Raises Refused (400) with
    the place and the reason."""
    known = memory or Memory()
    return read_body(
        data,
        dialect=NAME,
        messages="messages",
        apart=("stream",),
        memory=known,
        read=lambda body: _request(body, headers, known),
    )


def _request(body: Body, headers: Mapping[str, str], memory: Memory) -> Request:
    head = memory.head(NAME, body.head, _head)
    read = head.value
    messages = body.told("messages")
    history = memory.history(NAME, messages)
    told = history.read(messages, _message)
    if not told.messages or told.messages[0].role != "user":
        raise Refused(400, "messages: the first message must use the user role and say something")
    asker = Asker(headers=headers, billing=read.billing, system=read.system, last_texts=told.news())
    role, agent = classify(asker)
    asked = read.body
    return Request(
        conversation=Conversation(
            agent=agent,
            role=role,
            system=read.system,
            tools=read.tools,
            messages=list(told.messages),
            root=memory.root(agent, read.system, read.tools),
        ),
        digest=request_digest(NAME, agent, head, history),
        model=asked.model,
        stream=bool(body.value("stream", bool)),
        max_tokens=asked.max_tokens,
        asked=numbers(temperature=asked.temperature, top_p=asked.top_p, top_k=asked.top_k, max_tokens=asked.max_tokens),
        stop=stops(asked.stop_sequences, "stop_sequences"),
        calls_allowed=bool(read.tools) and (asked.tool_choice or {}).get("type") != "none",
    )


def _head(data: bytes) -> _Read:
    body = decode(data, _Head)
    _check(body)
    system = [{"type": "text", "text": body.system}] if isinstance(body.system, str) else body.system or []
    for index, block in enumerate(system):
        field(block, "text", str, f"system.{index}")
    billing = [block["text"] for block in system if block["text"].startswith(BILLING)]
    told = [block for block in system if not block["text"].startswith(BILLING)]
    return _Read(
        body=body,
        billing=" ".join(billing),
        system=joined([{"type": "text", "text": block["text"]} for block in told]),
        tools=_tools(body.tools or []),
    )


def _check(body: _Head) -> None:
    choice = (body.tool_choice or {}).get("type", "auto")
    if choice in ("any", "tool"):
        raise Refused(
            400, f"tool_choice: type {choice!r} forces a call by grammar, which is not done here: {NO_GRAMMAR}"
        )
    if choice not in ("auto", "none"):
        raise Refused(400, f"tool_choice: unknown type {choice!r}")
    if body.logit_bias:
        raise Refused(400, f"logit_bias: not supported: {NO_GRAMMAR}")
    if body.n is not None and body.n != 1:
        raise Refused(400, f"n: {body.n} answers were asked for, one call gives one answer")
    if body.output_format or (body.output_config or {}).get("format"):
        raise Refused(400, f"output_config.format: only text: {NO_GRAMMAR}")
    if body.max_tokens is not None and body.max_tokens < 1:
        raise Refused(400, f"max_tokens: {body.max_tokens} is less than 1")


def _tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tools that the harness runs itself; tools of the vendor's servers have no schema and nobody here to run them."""
    known = []
    for index, tool in enumerate(tools):
        if "input_schema" not in tool and tool.get("type", "custom") != "custom":
            continue
        where = f"tools.{index}"
        known.append(
            {
                "name": field(tool, "name", str, where),
                "description": tool.get("description") or "",
                "input_schema": tool.get("input_schema") or {},
            }
        )
    return known


def _message(told: Transcript, item: bytes, index: int) -> None:
    where = f"messages.{index}"
    message = decode(item, _Message, where)
    content = [{"type": "text", "text": message.content}] if isinstance(message.content, str) else message.content
    blocks: list[Block] = []
    for at, block in enumerate(content):
        blocks += _blocks(block, message.role, f"{where}.content.{at}")
    if message.role == "system":
        told.remind([block.text for block in blocks if isinstance(block, Text)])
    elif message.role == "assistant":
        told.assistant(blocks)
    else:
        told.user(blocks)


def _blocks(block: dict[str, Any], role: str, where: str) -> list[Block]:
    kind = block.get("type")
    if kind == "text":
        return [Text(text=field(block, "text", str, where))]
    if kind == "thinking" and role == "assistant":
        return [Thinking(thinking=field(block, "thinking", str, where))]
    if kind == "redacted_thinking":
        return []
    if kind == "tool_use" and role == "assistant":
        return [
            Call(
                id=field(block, "id", str, where),
                name=field(block, "name", str, where),
                input=field(block, "input", dict, where),
            )
        ]
    if kind == "tool_result" and role == "user":
        return [Result(tool_use_id=field(block, "tool_use_id", str, where), content=_result(block, where))]
    return [Text(text=_other(block, where))]


def _result(block: dict[str, Any], where: str) -> str:
    content = block.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise Refused(400, f"{where}.tool_result.content: expected a string or a list of blocks")
    texts = []
    for index, part in enumerate(content):
        place = f"{where}.tool_result.content.{index}"
        if not isinstance(part, dict):
            raise Refused(400, f"{place}: expected a block")
        texts.append(field(part, "text", str, place) if part.get("type") == "text" else _other(part, place))
    return "\n".join(texts)


def _other(block: dict[str, Any], where: str) -> str:
    """Claude Code takes out what is refused at a place of this form, says so to the policy, and asks again."""
    kind = block.get("type")
    if kind == "image" or (not _is_text(block) if kind == "document" else unreadable(block)):
        raise Refused(400, f"{where}.{kind}: {TEXT_ONLY}")
    return shown(block)


def _is_text(document: dict[str, Any]) -> bool:
    """Whether a document is there as text. One that is encoded, or lies elsewhere, is not."""
    source = document.get("source")
    if not isinstance(source, dict):
        return False
    content = source.get("content")
    parts = content if isinstance(content, list) else []
    return source.get("type") == "text" or (
        source.get("type") == "content"
        and (isinstance(content, str) or all(isinstance(part, dict) and part.get("type") == "text" for part in parts))
    )


# answers


def stop_reason(answer: Answer) -> str:
    """Why the answer ends, in the words of the API."""
    if answer.finish == "length":
        return "max_tokens"
    if answer.stop_sequence is not None:
        return "stop_sequence"
    return "tool_use" if answer.calls else "end_turn"


def content(answer: Answer) -> list[dict[str, Any]]:
    """Content blocks as they are sent; thinking is unsigned."""
    shapes: list[dict[str, Any]] = msgspec.to_builtins(answer.blocks)
    return [{**shape, "signature": ""} if shape["type"] == "thinking" else shape for shape in shapes]


def message(answer: Answer) -> dict[str, Any]:
    """The body of an answer that isn't streamed."""
    return {
        **_envelope(answer.asked),
        "content": content(answer),
        "stop_reason": stop_reason(answer),
        "stop_sequence": answer.stop_sequence,
        "usage": _usage(answer.prompt_tokens, answer.output_tokens),
    }


def opening(request: Request, prompt_tokens: int, created: int) -> bytes:
    """`message_start`, which may go out before the answer is known, and the first ping."""
    start = {"type": "message_start", "message": {**_envelope(request), "usage": _usage(prompt_tokens, 0)}}
    return _event(start) + PING


def rest_of_stream(answer: Answer) -> bytes:
    """Every event after `message_start` and pings. Arguments travel as deltas: clients ignore those of the start."""
    return b"".join(_rest(answer))


def _rest(answer: Answer) -> Iterator[bytes]:
    for index, block in enumerate(content(answer)):
        if block["type"] == "tool_use":
            arguments = {"type": "input_json_delta", "partial_json": compact(block["input"])}
            start, delta = {**block, "input": {}}, arguments
        elif block["type"] == "thinking":
            start, delta = {**block, "thinking": ""}, {"type": "thinking_delta", "thinking": block["thinking"]}
        else:
            start, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        yield _event({"type": "content_block_start", "index": index, "content_block": start})
        yield _event({"type": "content_block_delta", "index": index, "delta": delta})
        yield _event({"type": "content_block_stop", "index": index})
    yield _event(
        {
            "type": "message_delta",
            "delta": {"stop_reason": stop_reason(answer), "stop_sequence": answer.stop_sequence},
            "usage": _usage(answer.prompt_tokens, answer.output_tokens),
        }
    )
    yield _event({"type": "message_stop"})


def error(refused: Refused, request_id: str) -> dict[str, Any]:
    """The body of a refusal. Its words come last: Claude Code hands on all that follows the place of an image in them, and
    an id there would make every turn's history another."""
    return {
        "request_id": request_id,
        "type": "error",
        "error": {"type": KINDS[refused.status], "message": refused.what},
    }


def error_event(refused: Refused, request: Request, request_id: str, created: int) -> bytes:
    """A refusal after the stream has begun."""
    return _event(error(refused, request_id))


def _envelope(request: Request) -> dict[str, Any]:
    return {
        "id": f"msg_{request.digest[:24]}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _usage(prompt_tokens: int, output_tokens: int) -> dict[str, int]:
    """All prompt tokens count as input: what an engine had in its cache is its own affair."""
    return {
        "input_tokens": prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": output_tokens,
    }


def _event(data: dict[str, Any]) -> bytes:
    return f"event: {data['type']}\ndata: {compact(data)}\n\n".encode()


DIALECT = Dialect(
    name=NAME,
    path="/messages",
    parse=parse,
    whole=message,
    opening=opening,
    ping=PING,
    rest=rest_of_stream,
    error=error,
    error_event=error_event,
    count_path="/messages/count_tokens",
    statuses={OVERLOADED: 503},
)
