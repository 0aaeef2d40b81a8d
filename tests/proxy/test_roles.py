"""Who is calling, by what each harness sends: role and agent through the dialect that the harness speaks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from schemas.records import CallRecord
from services.proxy.dialects import anthropic, chat_completions, responses
from services.proxy.roles import RULES, Asker, classify
from tests.proxy.engines import Engine
from tests.proxy.test_chat_completions import body_of as chat_body
from tests.proxy.test_chat_completions import said as chat_said
from tests.proxy.test_responses import body_of as responses_body
from tests.proxy.test_responses import said as item
from tests.proxy.world import World

CRITICAL = "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools."
CHECKPOINT = "You are performing a CONTEXT CHECKPOINT COMPACTION. Create a handoff summary."
SUB_AGENT = {"x-claude-code-agent-id": "a1"}
CLASS = "x-claude-code-request-class"


def told(system: str, last: str, headers: dict[str, str], *, billing: str = "") -> tuple[str, str]:
    """Over the Messages API."""
    blocks = [{"type": "text", "text": f"x-anthropic-billing-header: {billing}"}, {"type": "text", "text": system}]
    messages = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": [{"type": "text", "text": "result"}, {"type": "text", "text": last}]},
    ]
    body = {"model": "m", "system": blocks, "messages": messages}
    conversation = anthropic.parse(json.dumps(body).encode(), headers).conversation
    return conversation.role, conversation.agent


@pytest.mark.parametrize(
    ("headers", "billing", "last", "role", "agent"),
    [
        ({}, "", "hi", "main", ""),
        (SUB_AGENT, "", "hi", "sub-agent", "a1"),
        ({}, "cc_is_subagent=true;", "hi", "sub-agent", "sub-agent"),
        ({}, "", CRITICAL, "main-summary", ""),
        (SUB_AGENT, "cc_is_subagent=true;", CRITICAL, "sub-agent-summary", "a1"),
        ({}, "", "He said: " + CRITICAL, "main", ""),
        # From 2.1.273 on it says so itself, and nobody guesses.
        ({CLASS: "main"}, "", CRITICAL, "main", ""),
        ({CLASS: "compaction", "x-claude-code-compaction": "auto"}, "", "hi", "main-summary", ""),
        ({CLASS: "subagent", **SUB_AGENT}, "", "hi", "sub-agent", "a1"),
        ({CLASS: "compaction", **SUB_AGENT}, "", "hi", "sub-agent-summary", "a1"),
        ({CLASS: "workflow"}, "", "hi", "sub-agent", "sub-agent"),
        ({CLASS: "auxiliary"}, "", "hi", "sub-agent", "helper"),
    ],
)
def test_claude_code(headers: dict[str, str], billing: str, last: str, role: str, agent: str) -> None:
    assert told("You are.", last, headers, billing=billing) == (role, agent)


def test_a_sub_agent_of_claude_code_that_only_its_instructions_name() -> None:
    system = "You are a Claude agent.\nYou are an agent for Claude Code, and so on."
    assert told(system, "hi", {}) == ("sub-agent", "sub-agent")
    assert told(system, CRITICAL, SUB_AGENT) == ("sub-agent-summary", "a1")


def test_a_summary_is_one_before_a_reminder_too_and_not_for_ever() -> None:
    said = [("user", "first"), ("assistant", "x"), ("user", CRITICAL), ("system", "The task tools were not used.")]
    later = [*said[:3], ("assistant", "a summary"), ("user", "go on")]
    roles = []
    for messages in (said, later):
        body = {"messages": [{"role": role, "content": text} for role, text in messages]}
        roles.append(anthropic.parse(json.dumps(body).encode(), {}).conversation.role)
    assert roles == ["main-summary", "main"]


def turn(**said: Any) -> dict[str, str]:
    return {"thread-id": "th-1", "session-id": "s", "x-codex-turn-metadata": json.dumps(said)}


@pytest.mark.parametrize(
    ("headers", "last", "role", "agent"),
    [
        (turn(request_kind="turn", thread_source="user"), "hi", "main", ""),
        (turn(request_kind="compaction", thread_source="user"), "hi", "main-summary", ""),
        (turn(request_kind="turn", thread_source="subagent"), "hi", "sub-agent", "th-1"),
        (turn(request_kind="compaction", thread_source="subagent"), "hi", "sub-agent-summary", "th-1"),
        (turn(request_kind="turn", thread_source="user"), CHECKPOINT, "main", ""),
        ({"thread-id": "th-2", "x-openai-subagent": "collab_spawn"}, "hi", "sub-agent", "th-2"),
        ({"thread-id": "th-2", "x-codex-parent-thread-id": "th-1"}, "hi", "sub-agent", "th-2"),
        ({"thread-id": "th-2", "x-openai-subagent": "review"}, "hi", "sub-agent", "th-2"),
        ({"thread-id": "th-1", "x-openai-subagent": "compact"}, "hi", "main-summary", ""),
        ({"thread-id": "th-3", "x-openai-subagent": "memory_consolidation"}, "hi", "sub-agent", "helper"),
        ({"thread-id": "th-1"}, CHECKPOINT, "main-summary", ""),
        ({"thread-id": "th-1", "x-codex-turn-metadata": "{"}, "hi", "main", ""),
        ({"thread-id": "th-1", "x-codex-turn-metadata": "[" * 5000}, "hi", "main", ""),
    ],
)
def test_codex(headers: dict[str, str], last: str, role: str, agent: str) -> None:
    body = responses_body(item("developer", "You are Codex."), item("user", "task"), item("user", last))
    conversation = responses.parse(json.dumps(body).encode(), headers).conversation
    assert (conversation.role, conversation.agent) == (role, agent)


SESSION = {"x-session-id": "ses_1", "x-session-affinity": "ses_1"}


@pytest.mark.parametrize(
    ("headers", "system", "role", "agent"),
    [
        (SESSION, "You are opencode.", "main", ""),
        ({**SESSION, "x-parent-session-id": "ses_0"}, "You are opencode.", "sub-agent", "ses_1"),
        (SESSION, "You are a title generator. You output ONLY a thread title.", "sub-agent", "helper"),
        (SESSION, "Summarize what was done in this conversation. Write like", "sub-agent", "helper"),
        (SESSION, "You are a context summarization agent. You are given", "main-summary", ""),
        (
            {**SESSION, "x-parent-session-id": "ses_0"},
            "You are a context summarization agent.",
            "sub-agent-summary",
            "ses_1",
        ),
        ({}, "You are Qwen Code, an interactive CLI agent", "main", ""),
        ({}, "\nYou are the component that summarizes a conversation when", "main-summary", ""),
        ({}, "You are a general-purpose subagent working for", "sub-agent", "sub-agent"),
        ({}, "You are now acting as the managed memory extraction subagent for", "sub-agent", "helper"),
    ],
)
def test_opencode_and_qwen_code(headers: dict[str, str], system: str, role: str, agent: str) -> None:
    body = chat_body(chat_said("system", system), chat_said("user", "task"))
    conversation = chat_completions.parse(json.dumps(body).encode(), headers).conversation
    assert (conversation.role, conversation.agent) == (role, agent)


def test_without_rules_the_main_agent_is_calling() -> None:
    asker = Asker(headers=SUB_AGENT, last_texts=[CRITICAL])
    assert classify(asker, ()) == ("main", "") and classify(asker, RULES) == ("sub-agent-summary", "a1")


async def test_sub_agents_with_the_same_prompt_are_branches_of_their_own(world: World, engine: Engine) -> None:
    body = chat_body(chat_said("user", "task"))
    for session in ("ses_1", "ses_2"):
        headers = {**world.headers(), "x-session-id": session, "x-parent-session-id": "ses_0"}
        async with world.session.post(world.url + "/v1/chat/completions", json=body, headers=headers) as response:
            assert response.status == 200
    records = [record for record in await world.records() if isinstance(record, CallRecord)]
    assert [(record.parent, record.role, record.agent) for record in records] == [
        (None, "sub-agent", "ses_1"),
        (None, "sub-agent", "ses_2"),
    ]
    assert len(engine.calls) == 2


SPACED = '<tool_call>\n{"name":"exec",   "arguments":{"command":"ls"}}\n</tool_call>'


def contains(whole: list[int], part: list[int]) -> bool:
    return any(whole[at : at + len(part)] == part for at in range(len(whole)))


async def test_a_turn_kept_over_a_compaction_is_context_in_chat_completions(world: World, engine: Engine) -> None:
    engine.script += [engine.say(SPACED), engine.say("a summary"), engine.say("going on")]

    async def ask(*messages: dict[str, Any]) -> dict[str, Any]:
        async with world.post(chat_body(*messages), "/v1/chat/completions") as response:
            message: dict[str, Any] = (await response.json())["choices"][0]["message"]
            return message

    start = [chat_said("system", "You are."), chat_said("user", "task")]
    kept = await ask(*start)
    result = chat_said("tool", "out", tool_call_id=kept["tool_calls"][0]["id"])
    await ask(chat_said("system", "You are a context summarization agent."), *start[1:], kept, result)
    await ask(start[0], chat_said("user", "continued: a summary"), kept, result)
    first, summary, after = [record for record in await world.records() if isinstance(record, CallRecord)]
    assert [record.role for record in (first, summary, after)] == ["main", "main-summary", "main"]
    assert after.parent is None and contains(after.input_ids, first.output_ids)


async def test_a_turn_kept_over_a_compaction_is_context_in_responses(world: World, engine: Engine) -> None:
    engine.script += [engine.say(SPACED), engine.say("a summary"), engine.say("going on")]

    async def ask(kind: str, *items: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
        headers = {**world.headers(), **turn(request_kind=kind, thread_source="user")}
        url = world.url + "/v1/responses"
        async with world.session.post(url, json=responses_body(*items, **more), headers=headers) as response:
            output: list[dict[str, Any]] = (await response.json())["output"]
            return output

    start = [item("developer", "You are."), item("user", "task")]
    (kept,) = await ask("turn", *start)
    result = {"type": "function_call_output", "call_id": kept["call_id"], "output": "out"}
    await ask("compaction", *start, kept, result, item("user", CHECKPOINT), tools=[])
    await ask("turn", *start, item("user", "Another language model: a summary"), kept, result)
    first, summary, after = [record for record in await world.records() if isinstance(record, CallRecord)]
    assert [(record.role, record.parent) for record in (first, summary, after)] == [
        ("main", None),
        ("main-summary", None),  # without tools it is another prompt from its first token on
        ("main", None),
    ]
    assert contains(summary.input_ids, first.output_ids) and contains(after.input_ids, first.output_ids)


@pytest.mark.parametrize(
    ("system", "role"),
    [
        ("You are Qwen Code, an interactive CLI agent", "main-summary"),
        ("You are a general-purpose subagent working for", "sub-agent-summary"),
    ],
)
def test_qwen_code_asks_for_a_summary_after_the_history_itself(system: str, role: str) -> None:
    """Where that fits into its window; else under a system text of its own."""
    last = "You are the component that summarizes a conversation when its context window is about to overflow."
    body = chat_body(
        chat_said("system", system), chat_said("user", "task"), chat_said("assistant", "x"), chat_said("user", last)
    )
    assert chat_completions.parse(json.dumps(body).encode(), {}).conversation.role == role
