"""docs/dialects.md says what the dialects do: every line of its tables is tried, or names a test that there is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from services.proxy.conversation import Request
from services.proxy.dialects.dialect import Dialect
from services.proxy.endpoints import DIALECTS
from services.proxy.refusal import Refused, prompt_too_long
from services.proxy.roles import RULES

PAGE = (Path(__file__).parents[2] / "docs" / "dialects.md").read_text()
MESSAGES, CHAT, RESPONSES = DIALECTS
SCHEMA = {"type": "object"}


def table(heading: str) -> list[list[str]]:
    """Cells of the first table after a heading."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def m(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [user("hi"), *messages], **more}


def r(*items: Any, **more: Any) -> dict[str, Any]:
    return {"input": [user("hi"), *items], **more}


def tools(*given: Any) -> dict[str, Any]:
    return {"tools": list(given)}


CALLS = [{"type": "tool_use", "id": i, "name": "f", "input": {}} for i in "ab"]
RESULTS = [{"type": "tool_result", "tool_use_id": i, "content": i} for i in "ba"]
CHAT_CALLS = [{"id": i, "type": "function", "function": {"name": "f", "arguments": "{}"}} for i in "ab"]
R_CALLS = [{"type": "function_call", "call_id": i, "name": "f", "arguments": "{}"} for i in "ab"]
R_RESULTS = [{"type": "function_call_output", "call_id": i, "output": i} for i in "ba"]
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA}
M_TOOLS = tools({"name": "f", "input_schema": SCHEMA})
CHAT_TOOLS = tools({"type": "function", "function": FUNCTION})
R_TOOLS = tools({"type": "function", **FUNCTION})
NEW = {"type": "something_new", "x": 1}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
A = {"type": "text", "text": "a"}
SAMPLING = {"temperature": 0.5, "top_p": 0.5}
FORCED = {"type": "function", "function": {"name": "f"}}

# For every line what is added to a request that says "hi"; a pair is what it is compared with, and then what is added.
Try = dict[str, Any] | tuple[dict[str, Any], dict[str, Any]] | None
TRIES: dict[str, tuple[Try, Try, Try]] = {
    "instructions before everything": (
        {"system": "s"},
        {"messages": [{"role": "developer", "content": "s"}, user("hi")]},
        {"instructions": "s"},
    ),
    "instructions in mid-conversation, as a reminder where they stand": (
        m({"role": "system", "content": "s"}),
        m({"role": "developer", "content": "s"}),
        r({"role": "developer", "content": "s"}),
    ),
    "content as a string or as a list of parts": (
        m(assistant("a"), user([{"type": "text", "text": "b"}])),
        m(assistant("a"), user([{"type": "text", "text": "b"}])),
        r(assistant([{"type": "output_text", "text": "a"}]), user("b")),
    ),
    "parts and items of kinds that nobody knows here, as the text of their JSON": (
        m(user([NEW])),
        m(user([NEW])),
        r(NEW),
    ),
    "images": (
        m(user([IMAGE])),
        m(user([{"type": "image_url", "image_url": {"url": "data:"}}])),
        r(user([{"type": "input_image", "image_url": "data:"}])),
    ),
    "the same in parts and items of kinds that nobody knows here: data in base64, data: URLs, media types": (
        m(user([{**NEW, "source": {"type": "base64", "data": "AAAA"}}])),
        m(user([{**NEW, "url": "data:image/png;base64,AAAA"}])),
        r({**NEW, "parts": [{"mime_type": "image/png", "file": "f"}]}),
    ),
    "audio, files, documents that are not there as text": (
        m(user([{"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": ""}}])),
        m(user([{"type": "input_audio"}])),
        r(user([{"type": "input_file"}])),
    ),
    "functions": (M_TOOLS, CHAT_TOOLS, R_TOOLS),
    "tools in a namespace": (None, None, tools({"type": "namespace", "name": "n", "tools": [{**FUNCTION}]})),
    "custom tools, whose calls are free text": (
        None,
        tools({"type": "custom", "custom": {"name": "f"}}),
        tools({"type": "custom", "name": "f"}),
    ),
    "tools that a vendor's servers run": (
        tools({"type": "web_search_20250305", "name": "web_search"}),
        tools({"type": "web_search"}),
        tools({"type": "web_search"}),
    ),
    "functions in the form before tools": (None, {"functions": [FUNCTION]}, None),
    "results of parallel calls, in any order": (
        m(assistant(CALLS), user(RESULTS)),
        m(assistant(None, tool_calls=CHAT_CALLS), *({"role": "tool", "tool_call_id": i, "content": i} for i in "ba")),
        r(*R_CALLS, *R_RESULTS),
    ),
    "a result that is marked as an error": (
        (m(assistant(CALLS), user(RESULTS)), m(assistant(CALLS), user([{**b, "is_error": True} for b in RESULTS]))),
        None,
        None,
    ),
    "arguments in the history that are no JSON object, word for word": (
        None,
        m(assistant(None, tool_calls=[{"id": "a", "function": {"name": "f", "arguments": "{"}}])),
        r({**R_CALLS[0], "arguments": "{"}),
    ),
    "thoughts in the history": (
        m(assistant([{"type": "thinking", "thinking": "t", "signature": ""}]), user("b")),
        m(assistant("", reasoning_content="t"), user("b")),
        r({"type": "reasoning", "summary": [{"type": "summary_text", "text": "t"}]}, user("b")),
    ),
    "encrypted thoughts": (
        (m(assistant([A]), user("b")), m(assistant([{"type": "redacted_thinking", "data": "x"}, A]), user("b"))),
        None,
        (r(assistant("a")), r({"type": "reasoning", "summary": [], "encrypted_content": "x"}, assistant("a"))),
    ),
    "effort, budget and display of thinking": (
        {"thinking": {"type": "adaptive", "display": "omitted"}, "output_config": {"effort": "high"}},
        {"reasoning_effort": "high"},
        {"reasoning": {"effort": "high", "summary": "auto"}},
    ),
    "an answer that begins with given text": (m(assistant("{")), m(assistant("{")), r(assistant("{"))),
    "no calls in the answer": (
        (M_TOOLS, {**M_TOOLS, "tool_choice": {"type": "none"}}),
        (CHAT_TOOLS, {**CHAT_TOOLS, "tool_choice": "none"}),
        (R_TOOLS, {**R_TOOLS, "tool_choice": "none"}),
    ),
    "a call that must come": ({"tool_choice": {"type": "any"}}, {"tool_choice": FORCED}, {"tool_choice": "required"}),
    "at most one call in the answer": (
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        {"parallel_tool_calls": False},
        {"parallel_tool_calls": False},
    ),
    "the most tokens of the answer": ({"max_tokens": 5}, {"max_completion_tokens": 5}, {"max_output_tokens": 5}),
    "temperature and top_p": (SAMPLING, SAMPLING, SAMPLING),
    "penalties and a seed": (None, {"presence_penalty": 0.5, "frequency_penalty": 0.5, "seed": 5}, None),
    "stop sequences": ({"stop_sequences": ["x"]}, {"stop": ["x"]}, None),
    "several answers": ({"n": 2}, {"n": 2}, None),
    "biased tokens": ({"logit_bias": {"5": 1}}, {"logit_bias": {"5": 1}}, None),
    "log-probabilities in the answer": (None, {"logprobs": True}, {"include": ["message.output_text.logprobs"]}),
    "JSON by a schema": (
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        {"text": {"format": {"type": "json_schema"}}},
    ),
    "audio in the answer": (None, {"modalities": ["text", "audio"]}, None),
    "history that the server keeps": (None, None, {"previous_response_id": "resp_1"}),
    "an answer in the background": (None, None, {"background": True}),
    "that the server stores the answer": (None, {"store": True}, {"store": True}),
    "edits of the context by the server": (
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
        None,
        {"truncation": "auto"},
    ),
    "metadata, users, cache keys and service tiers": (
        {"metadata": {"user_id": "u"}, "service_tier": "auto"},
        {"metadata": {}, "user": "u", "prompt_cache_key": "k", "service_tier": "auto"},
        {"metadata": {"a": "b"}, "user": "u", "prompt_cache_key": "k", "client_metadata": {}, "service_tier": "auto"},
    ),
}


def parsed(dialect: Dialect, body: dict[str, Any]) -> Request:
    base = r() if dialect is RESPONSES else m()
    return dialect.parse(json.dumps({"model": "policy", **base, **body}).encode(), {})


def sees(request: Request) -> list[Any]:
    return [request.conversation, request.max_tokens, request.calls_allowed, request.stop]


def observed(dialect: Dialect, given: Try) -> str:
    """What the dialect makes of it, in the page's words; a refusal with all that it says."""
    if given is None:
        return "-"
    plain, more = given if isinstance(given, tuple) else ({}, given)
    try:
        request = parsed(dialect, more)
    except Refused as refused:
        assert refused.status == 400
        return f"no: {refused.what}"
    before = parsed(dialect, plain)
    if sees(request) != sees(before):
        return "yes"
    return "recorded" if request.asked != before.asked else "ignored"


LINES = table("What is asked for")


def test_every_line_is_tried() -> None:
    assert [line[0] for line in LINES] == list(TRIES)


@pytest.mark.parametrize("line", LINES, ids=[line[0] for line in LINES])
def test_what_is_asked_for(line: list[str]) -> None:
    for dialect, cell, given in zip(DIALECTS, line[1:], TRIES[line[0]], strict=True):
        word, _, why = cell.partition(": ")
        seen = observed(dialect, given)
        assert seen.partition(": ")[0] == word and why in seen, (dialect.name, seen)


def test_what_is_answered_names_tests_that_there_are() -> None:
    sources = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    for line in table("What is answered"):
        names = re.findall(r"`(test_\w+)`", line[-1])
        assert all(f"def {name}(" in sources for name in names), line
        assert names or set(line[1:4]) == {"no"}, line


def test_refusals() -> None:
    lines = table("How refusals are told")
    assert [line[0].split(",")[0] for line in lines] == ["400", "400", "401", "404", "413", "500", "529"]
    for line in lines:
        long = "too long" in line[0]
        refused = prompt_too_long(5, 4) if long else Refused(int(line[0][:3]), "why")
        for dialect, cell in ((MESSAGES, line[1]), (CHAT, line[2]), (RESPONSES, line[2])):
            error = dialect.error(refused, "req_1")["error"]
            assert cell.startswith(f"{dialect.status(refused)} `{error['type']}`"), (dialect.name, error)
            after = dialect.headers(refused).get("retry-after")
            assert (f"`retry-after: {after}`" in cell) if after else "retry-after" not in cell
        assert ("context_length_exceeded" in line[2]) == (refused.code == "context_length_exceeded") == long


def test_every_rule_is_on_the_page() -> None:
    said = {line[0]: " ".join(line) for line in table("Who is calling")}
    for rule in RULES:
        text = " ".join(line for name, line in said.items() if name.startswith(rule.harness))
        assert (f"`{rule.text}`" in text or rule.text in text) and rule.value in text, rule
