"""OpenAI Responses, from the wire: request bodies to conversations. What goes out is in `responses_answer`.

Every request brings its whole history, as Codex sends it: nothing is stored here that a request could refer to. Items
of the assistant that follow each other are one turn. What would falsify log-probabilities, or cannot be shown to the
policy, is refused with a sentence that says why; items of unknown kinds stay as the text of their JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from services.proxy.conversation import Block, Call, Request, Result, Text, Thinking
from services.proxy.dialects import responses_answer as answers
from services.proxy.dialects.body import Body, read_body
from services.proxy.dialects.dialect import Dialect
from services.proxy.dialects.openai import (
    PING,
    RETRY_AFTER_S,
    STATUSES,
    arguments_of,
    conversation,
    error,
    text_of,
    texts_of,
)
from services.proxy.dialects.responses_tools import TEXT, Origin, read_tools, shown_name
from services.proxy.dialects.wire import NO_GRAMMAR, convert, decode, field, numbers
from services.proxy.history import Told
from services.proxy.memory import Memory, meaning, request_digest
from services.proxy.refusal import PROMPT_TOO_LONG, Refused
from services.proxy.transcript import Transcript

NAME = "responses"
_ABOUT = "client_metadata"
"""Apart from the head, which is the same in all requests of an agent: it names the turn."""


class _Head(msgspec.Struct, frozen=True):
    model: str = ""
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    text: dict[str, Any] | None = None
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None
    metadata: dict[str, Any] | None = None


def parse(data: bytes, headers: Mapping[str, str], memory: Memory | None = None) -> Request:
    """A request from its body. `headers` answers lower-case names; `memory` is the execution's. Raises Refused (400) with
    the place and the reason."""
    known = memory or Memory()
    return read_body(
        data,
        dialect=NAME,
        messages="input",
        apart=("stream", "stream_options", _ABOUT),
        memory=known,
        read=lambda body: _request(body, headers, known),
    )


def _request(body: Body, headers: Mapping[str, str], memory: Memory) -> Request:
    head = memory.head(NAME, body.head, _head)
    asked, tools, origins = head.value
    messages = _messages(body)
    history = memory.history(NAME, messages)
    told = conversation(history.read(messages, _item), headers, tools, memory, asked.instructions)
    return Request(
        conversation=told,
        digest=request_digest(NAME, told.agent, head, history, meaning(bytes(body.apart.get(_ABOUT, b"null")))),
        model=asked.model,
        stream=bool(body.value("stream", bool)),
        max_tokens=asked.max_output_tokens,
        asked=numbers(temperature=asked.temperature, top_p=asked.top_p, max_tokens=asked.max_output_tokens),
        calls_allowed=bool(tools) and asked.tool_choice != "none",
        wire=answers.Wire(
            origins=origins,
            parallel=asked.parallel_tool_calls is not False,
            choice="none" if asked.tool_choice == "none" else "auto",
            most=asked.max_output_tokens,
            metadata=asked.metadata or {},
        ),
    )


def _head(data: bytes) -> tuple[_Head, list[dict[str, Any]], dict[str, Origin]]:
    head = decode(data, _Head)
    _check(head)
    return head, *read_tools(head.tools or [])


def _messages(body: Body) -> Told:
    """A text by itself is the user's message."""
    given = body.apart.get("input")
    if given is not None and bytes(given).startswith(b'"'):
        return Told([b'{"role":"user","content":' + bytes(given) + b"}"])
    return body.told("input")


def _check(body: _Head) -> None:
    choice = body.tool_choice
    if choice not in (None, "auto", "none"):
        kind = choice.get("type", "?") if isinstance(choice, dict) else choice
        raise Refused(400, f"tool_choice: {kind!r} forces or bounds calls by grammar, not done here: {NO_GRAMMAR}")
    for name in ("previous_response_id", "conversation", "prompt"):
        if getattr(body, name):
            raise Refused(400, f"{name}: nothing is stored here; send the whole history as input")
    if body.background:
        raise Refused(400, "background: nothing is stored here; wait for the answer")
    if body.top_logprobs or "message.output_text.logprobs" in (body.include or ()):
        raise Refused(400, "logprobs: not handed out: they are recorded for training")
    form = (body.text or {}).get("format") or {}
    if not isinstance(form, dict) or form.get("type", "text") != "text":
        raise Refused(400, f"text.format: only text: {NO_GRAMMAR}")
    if body.max_output_tokens is not None and body.max_output_tokens < 1:
        raise Refused(400, f"max_output_tokens: {body.max_output_tokens} is less than 1")


def _item(told: Transcript, data: bytes, index: int) -> None:
    where = f"input.{index}"
    item = decode(data, dict[str, Any], where)
    kind = item.get("type") or "message"
    match kind:
        case "message":
            _message(told, item, where)
        case "reasoning":
            told.assistant(_thoughts(item, where))
        case "function_call":
            name = shown_name(field(item, "name", str, where), item.get("namespace"))
            told.assistant([_call(item, name, arguments_of(field(item, "arguments", str, where)), where)])
        case "custom_tool_call":
            name = shown_name(field(item, "name", str, where), item.get("namespace"))
            told.assistant([_call(item, name, {TEXT: field(item, "input", str, where)}, where)])
        case "function_call_output" | "custom_tool_call_output":
            text = "\n".join(texts_of(item.get("output"), f"{where}.output"))
            told.result(Result(tool_use_id=field(item, "call_id", str, where), content=text))
        case "item_reference":
            raise Refused(400, f"{where}: nothing is stored here that an item could refer to; send the item itself")
        case _:
            told.user([Text(text=text_of(item, where))])


def _message(told: Transcript, item: dict[str, Any], where: str) -> None:
    role = field(item, "role", str, where)
    texts = texts_of(item.get("content"), f"{where}.content")
    if role in ("system", "developer"):
        told.instruct("\n".join(texts))
    elif role == "user":
        told.user([Text(text=text) for text in texts])
    elif role == "assistant":
        told.assistant([Text(text=text) for text in texts])
    else:
        raise Refused(400, f"{where}.role: unknown role {role!r}")


def _thoughts(item: dict[str, Any], where: str) -> list[Block]:
    """Summaries are what we send as such: the thoughts themselves. Encrypted ones are somebody else's."""
    texts = []
    for name in ("summary", "content"):
        for index, part in enumerate(convert(item.get(name) or [], list[dict[str, Any]])):
            texts.append(field(part, "text", str, f"{where}.{name}.{index}"))
    return [Thinking(thinking="\n".join(texts))] if texts else []


def _call(item: dict[str, Any], name: str, arguments: dict[str, Any], where: str) -> Call:
    return Call(id=field(item, "call_id", str, where), name=name, input=arguments)


DIALECT = Dialect(
    name=NAME,
    path="/responses",
    parse=parse,
    whole=answers.response,
    opening=answers.opening,
    ping=PING,
    rest=answers.events,
    error=error,
    error_event=answers.failed,
    count_path="/responses/input_tokens",
    count=lambda tokens: {"object": "response.input_tokens", "input_tokens": tokens},
    statuses=STATUSES,
    retry_after_s=RETRY_AFTER_S,
    # Codex makes room in its history when a stream says so, and gives up when a status does.
    told_in_stream=frozenset({PROMPT_TOO_LONG}),
)
