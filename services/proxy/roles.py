"""Who is calling: the rules by which requests of a harness get one of the four roles, as data.

A rule looks for a text in one place of the request; what the rules say is added up. Without any the main agent is
calling. A helper (titles, memory) is a sub-agent with a branch of its own. Requests of one agent share branches, so the
agent's id is its own, never that of a session that several agents share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from schemas.records import Role

Sign = Literal["sub-agent", "summary", "helper"]
Where = Literal["header", "turn", "billing", "system", "system-line", "last-user-text"]


class Asker(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a request before its prompt is."""

    headers: Mapping[str, str]
    """Looked up by lower-case names."""
    billing: str = ""
    """Claude Code's billing block."""
    system: str = ""
    last_texts: Sequence[str] = ()
    """Text blocks of the last user message."""


class Rule(msgspec.Struct, frozen=True):
    harness: str
    where: Where
    text: str
    """A header's name, a key of Codex's turn metadata, a part of the billing block, or how a text or a line
    begins."""
    value: str = ""
    """What the header or the key says; empty for anything."""
    sign: Sign = "sub-agent"
    unless: str = ""
    """A header that says it better: where it is present the rule is silent."""


CLASS = "x-claude-code-request-class"
"""Claude Code from 2.1.273 on, with CLAUDE_CODE_GATEWAY_HINT_HEADERS=1."""
TURN = "x-codex-turn-metadata"

_CODEX_SUB_AGENTS = ("collab_spawn", "review")

RULES: tuple[Rule, ...] = (
    Rule("Claude Code", "header", "x-claude-code-agent-id", sign="sub-agent"),
    Rule("Claude Code", "header", CLASS, "subagent", sign="sub-agent"),
    Rule("Claude Code", "header", CLASS, "workflow", sign="sub-agent"),
    Rule("Claude Code", "header", CLASS, "compaction", sign="summary"),
    Rule("Claude Code", "header", CLASS, "auxiliary", sign="helper"),
    Rule("Claude Code", "billing", "cc_is_subagent=true", sign="sub-agent", unless=CLASS),
    # 2.1.112 and its like say it nowhere else.
    Rule("Claude Code", "system-line", "You are an agent for Claude Code", sign="sub-agent", unless=CLASS),
    Rule("Claude Code", "last-user-text", "CRITICAL: Respond with TEXT ONLY", sign="summary", unless=CLASS),
    Rule("Codex", "turn", "request_kind", "compaction", sign="summary"),
    Rule("Codex", "turn", "thread_source", "subagent", sign="sub-agent"),
    Rule("Codex", "header", "x-codex-parent-thread-id", sign="sub-agent"),
    *(Rule("Codex", "header", "x-openai-subagent", kind, sign="sub-agent") for kind in _CODEX_SUB_AGENTS),
    Rule("Codex", "header", "x-openai-subagent", "compact", sign="summary"),
    Rule("Codex", "header", "x-openai-subagent", "memory_consolidation", sign="helper"),
    Rule("Codex", "last-user-text", "You are performing a CONTEXT CHECKPOINT COMPACTION", sign="summary", unless=TURN),
    Rule("OpenCode", "header", "x-parent-session-id", sign="sub-agent"),
    Rule("OpenCode", "system", "You are a context summarization agent.", sign="summary"),
    Rule("OpenCode", "system", "You are a title generator.", sign="helper"),
    Rule("OpenCode", "system", "Summarize what was done in this conversation.", sign="helper"),
    Rule("Qwen Code", "system", "You are the component that summarizes", sign="summary"),
    Rule("Qwen Code", "last-user-text", "You are the component that summarizes", sign="summary"),
    Rule("Qwen Code", "system", "You are a general-purpose subagent", sign="sub-agent"),
    Rule("Qwen Code", "system", "You are a file search specialist agent.", sign="sub-agent"),
    Rule("Qwen Code", "system", "You are a subagent spawned by a workflow", sign="sub-agent"),
    Rule("Qwen Code", "system", "You are now acting as the managed memory extraction subagent", sign="helper"),
    Rule("Qwen Code", "system", "You are performing a managed memory dream", sign="helper"),
)
"""By Claude Code 2.1.112 to 2.1.332, Codex 0.171.0, OpenCode 1.18.33 and Qwen Code 0.24.4."""

AGENT_HEADERS = ("x-claude-code-agent-id", "thread-id", "x-session-id")
"""Where a sub-agent says its own id: Claude Code, Codex, OpenCode."""
UNNAMED = "sub-agent"
"""Agent of a sub-agent that says no id."""
HELPER = "helper"
"""Agent of all helpers."""

_ROLES: dict[tuple[bool, bool], Role] = {
    (False, False): "main",
    (False, True): "main-summary",
    (True, False): "sub-agent",
    (True, True): "sub-agent-summary",
}


def classify(asker: Asker, rules: tuple[Rule, ...] = RULES) -> tuple[Role, str]:
    """Role of a request, and its agent's id (empty for the main agent)."""
    turn = _turn(asker.headers.get(TURN, ""))
    signs = {rule.sign for rule in rules if _says(rule, asker, turn)}
    if "helper" in signs:
        return "sub-agent", HELPER
    role = _ROLES["sub-agent" in signs, "summary" in signs]
    if "sub-agent" not in signs:
        return role, ""
    return role, next((said for name in AGENT_HEADERS if (said := asker.headers.get(name))), UNNAMED)


def _says(rule: Rule, asker: Asker, turn: Mapping[str, Any]) -> bool:
    if rule.unless and asker.headers.get(rule.unless):
        return False
    match rule.where:
        case "header":
            said = asker.headers.get(rule.text, "")
            return said == rule.value if rule.value else bool(said)
        case "turn":
            return turn.get(rule.text) == rule.value
        case "billing":
            return rule.text in asker.billing
        case "system":
            return asker.system.lstrip().startswith(rule.text)
        case "system-line":
            return any(line.startswith(rule.text) for line in asker.system.splitlines())
        case "last-user-text":
            return any(text.startswith(rule.text) for text in asker.last_texts)


def _turn(text: str) -> Mapping[str, Any]:
    """Codex's turn metadata, JSON in a header."""
    if not text:
        return {}
    try:
        said = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return {}
    return said if isinstance(said, dict) else {}
