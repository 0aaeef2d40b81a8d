"""Who is calling: the rules by which requests of a harness get one of the four roles, as data.

A rule looks for a text in one place of the request; what it says is added up. Without any the main agent is calling.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from schemas.records import Role

Sign = Literal["sub-agent", "summary"]


class Rule(msgspec.Struct, frozen=True):
    where: Literal["header", "billing", "last-user-text"]
    text: str
    """Name of a header that is present, a part of the billing block, or how a text block begins."""
    sign: Sign


AGENT_HEADER = "x-claude-code-agent-id"
UNNAMED = "sub-agent"
"""Agent of a sub-agent that says no id."""

RULES: tuple[Rule, ...] = (
    Rule("header", AGENT_HEADER, "sub-agent"),
    Rule("billing", "cc_is_subagent=true", "sub-agent"),
    Rule("last-user-text", "CRITICAL: Respond with TEXT ONLY", "summary"),
)

_ROLES: dict[tuple[bool, bool], Role] = {
    (False, False): "main",
    (False, True): "main-summary",
    (True, False): "sub-agent",
    (True, True): "sub-agent-summary",
}


def classify(
    headers: Mapping[str, str],
    billing: str,
    last_user_texts: list[str],
    rules: tuple[Rule, ...] = RULES,
) -> tuple[Role, str]:
    """Role and agent id (empty for the main agent) of a request; `headers` is looked up by lower-case names."""
    signs: set[Sign] = set()
    for rule in rules:
        if (
            (rule.where == "header" and headers.get(rule.text))
            or (rule.where == "billing" and rule.text in billing)
            or (rule.where == "last-user-text" and any(text.startswith(rule.text) for text in last_user_texts))
        ):
            signs.add(rule.sign)
    sub_agent = "sub-agent" in signs
    return _ROLES[sub_agent, "summary" in signs], (headers.get(AGENT_HEADER) or UNNAMED) if sub_agent else ""
