"""OpenAI Responses, onto the wire: answers as responses, as events, and how a stream ends that brings no answer.

Pure functions. Every stream ends with `response.completed`, `response.incomplete` (cut off) or `response.failed`; the
item in `response.output_item.done` is the item in the response. Ids come from the request's digest, so they are the same
in every repetition and unique over the execution.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from services.proxy.conversation import Request
from services.proxy.dialects.dialect import Answer
from services.proxy.dialects.openai import error_code, wire_id
from services.proxy.dialects.responses_tools import Origin, call_item
from services.proxy.dialects.wire import compact
from services.proxy.refusal import PROMPT_TOO_LONG, Refused


class Wire(msgspec.Struct, frozen=True, kw_only=True):
    """What the answer repeats of the request."""

    origins: dict[str, Origin]
    """Of the tools, by the names that the policy sees."""
    parallel: bool
    choice: str
    most: int | None
    metadata: dict[str, Any]


def response(answer: Answer) -> dict[str, Any]:
    """The body of an answer that isn't streamed."""
    cut = answer.finish == "length"
    return {
        **_envelope(answer.asked, answer.created),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": items(answer),
        "usage": _usage(answer),
    }


def items(answer: Answer) -> list[dict[str, Any]]:
    """Output items: thoughts as a summary, which clients send back, the text, the calls."""
    made: list[dict[str, Any]] = []

    def add(kind: str, item: dict[str, Any]) -> None:
        made.append({"id": wire_id(kind, answer.asked, len(made)), **item})

    if answer.thoughts:
        summary = [{"type": "summary_text", "text": answer.thoughts}]
        add("rs", {"type": "reasoning", "summary": summary, "encrypted_content": None, "status": "completed"})
    if answer.text:
        part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
        add("msg", {"type": "message", "role": "assistant", "content": [part], "status": "completed"})
    for call in answer.calls:
        made.append(call_item(call, answer.asked.wire.origins, wire_id("fc", answer.asked, len(made))))
    if made and answer.finish == "length":
        made[-1]["status"] = "incomplete"
    return made


def opening(request: Request, prompt_tokens: int, created: int) -> bytes:
    """`response.created` and `response.in_progress`, which may go out before the answer is known."""
    begun = {**_envelope(request, created), "status": "in_progress"}
    return b"".join(
        _numbered(({"type": f"response.{kind}", "response": begun} for kind in ("created", "in_progress")), 0)
    )


def events(answer: Answer) -> bytes:
    """Every event after the opening."""
    return b"".join(_numbered(_rest(answer), 2))


def _rest(answer: Answer) -> Iterator[dict[str, Any]]:
    whole = response(answer)
    for index, item in enumerate(whole["output"]):
        place = {"item_id": item["id"], "output_index": index}
        match item["type"]:
            case "reasoning":
                empty: dict[str, Any] = {"summary": []}
                inner = _parts(
                    place, "summary_index", item["summary"][0], "reasoning_summary_part", "reasoning_summary_text"
                )
            case "message":
                empty = {"content": []}
                inner = _parts(place, "content_index", item["content"][0], "content_part", "output_text")
            case "custom_tool_call":
                empty = {"input": ""}
                inner = _argument(place, "custom_tool_call_input", "input", item["input"])
            case _:
                empty = {"arguments": ""}
                inner = _argument(place, "function_call_arguments", "arguments", item["arguments"])
        begun = {**item, **empty, "status": "in_progress"}
        yield {"type": "response.output_item.added", "output_index": index, "item": begun}
        yield from inner
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{whole['status']}", "response": whole}


def _parts(
    place: dict[str, Any], index: str, part: dict[str, Any], part_kind: str, text_kind: str
) -> Iterator[dict[str, Any]]:
    place = {**place, index: 0}
    # Only an answer's own text has log-probabilities on the wire, and they are empty.
    extra: dict[str, Any] = {"logprobs": []} if "logprobs" in part else {}
    yield {"type": f"response.{part_kind}.added", **place, "part": {**part, "text": ""}}
    yield {"type": f"response.{text_kind}.delta", **place, "delta": part["text"], **extra}
    yield {"type": f"response.{text_kind}.done", **place, "text": part["text"], **extra}
    yield {"type": f"response.{part_kind}.done", **place, "part": part}


def _argument(place: dict[str, Any], kind: str, name: str, text: str) -> Iterator[dict[str, Any]]:
    yield {"type": f"response.{kind}.delta", **place, "delta": text}
    yield {"type": f"response.{kind}.done", **place, name: text}


def failed(refused: Refused, request: Request, request_id: str, created: int) -> bytes:
    """The end of a stream that brings no answer. Codex asks again after `server_error`, and makes room in its history
    after `context_length_exceeded`."""
    code = PROMPT_TOO_LONG if error_code(refused) == PROMPT_TOO_LONG else "server_error"
    said = {"code": code, "message": refused.what}
    whole = {**_envelope(request, created), "status": "failed", "error": said}
    return b"".join(_numbered([{"type": "response.failed", "response": whole}], 2))


def _envelope(request: Request, created: int) -> dict[str, Any]:
    """Of instructions and tools, which are long, nothing is repeated; sampling is the proxy's own."""
    wire: Wire = request.wire
    return {
        "id": wire_id("resp", request),
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": wire.most,
        "metadata": wire.metadata,
        "model": request.model,
        "output": [],
        "parallel_tool_calls": wire.parallel,
        "previous_response_id": None,
        "store": False,
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": wire.choice,
        "tools": [],
        "top_p": None,
        "truncation": "disabled",
        "usage": None,
    }


def _usage(answer: Answer) -> dict[str, Any]:
    """All prompt tokens count as input, what an engine had in its cache is its own affair; thoughts count as output."""
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": answer.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + answer.output_tokens,
    }


def _numbered(said: Any, first: int) -> Iterator[bytes]:
    for number, event in enumerate(said, first):
        data = compact({**event, "sequence_number": number})
        yield f"event: {event['type']}\ndata: {data}\n\n".encode()
