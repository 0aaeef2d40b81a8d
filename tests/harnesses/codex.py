"""How Codex is started, and the task that its policy plays: parallel tools, two sub-agents, a compaction."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tests.harnesses.counting import DONE, TASK, asked, both_are_back, counts, look
from tests.harnesses.script import Rule, Seen, Turn, call, say, turn
from tests.harnesses.stage import Stage

COMPACT_AT = 45_000
"""Tokens of a conversation from which on it is compacted; some 40,000 are instructions and tools."""
AGENT = re.compile(r'"agent_id":\s*"([^"]+)"')


TEXT_ONLY = {
    "slug": "policy",
    "display_name": "policy",
    "description": "reads text only",
    "input_modalities": ["text"],
    "supported_reasoning_levels": [],
    "shell_type": "shell_command",
    "visibility": "list",
    "supported_in_api": True,
    "priority": 1,
    "base_instructions": "You work in a shell.",
    "support_verbosity": False,
    "truncation_policy": {"mode": "tokens", "limit": 10_000},
    "supports_parallel_tool_calls": True,
    "experimental_supported_tools": [],
}
"""What Codex is to know of a policy, or it shows it pictures."""


async def run_codex(stage: Stage, program: Path, *, catalog: list[dict[str, Any]] | None = None) -> str:
    """Its last message. It has to end well."""
    home = stage.home / ".codex"
    home.mkdir()
    known = [] if catalog is None else [f'model_catalog_json = "{home / "catalog.json"}"']
    (home / "catalog.json").write_text(json.dumps({"models": catalog or []}))
    (home / "config.toml").write_text(
        "\n".join(
            [
                *known,
                'model = "policy"',
                'model_provider = "here"',
                f"model_auto_compact_token_limit = {COMPACT_AT}",
                'web_search = "disabled"',
                "[model_providers.here]",
                'name = "here"',
                f'base_url = "{stage.world.url}/v1"',
                'env_key = "POLICY_TOKEN"',
                'wire_api = "responses"',
            ]
        )
    )
    command = [str(program), "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json"]
    code = await stage.run([*command, TASK], {"CODEX_HOME": str(home), "POLICY_TOKEN": stage.token})
    assert code == 0, stage.said()
    events = [json.loads(line) for line in stage.output.read_text().splitlines()]
    assert events[-1]["type"] == "turn.completed", events[-1]
    said = [event["item"]["text"] for event in events if event.get("item", {}).get("type") == "agent_message"]
    return str(said[-1])


def shell(command: str) -> str:
    return call("exec_command", cmd=command)


def spawn(letter: str) -> str:
    return call("multi_agent_v1__spawn_agent", message=asked(letter))


def rules() -> list[Rule]:
    summary = say("Two agents have counted.")
    return [
        Rule("summary", lambda seen: "CONTEXT CHECKPOINT COMPACTION" in seen.news, turn(summary)),
        Rule("end", lambda seen: "Another language model started" in seen.prompt, turn(say(DONE))),
        look(shell),
        Rule("spawn", lambda seen: "LOOK-1" in seen.news, turn(spawn("A"), spawn("B"))),
        *counts(shell),
        Rule("wait", lambda seen: len(AGENT.findall(seen.news)) == 2, _wait),
        Rule("read", both_are_back, turn(shell("head -c 30000 /dev/zero | tr '\\0' p"))),
        Rule("last", lambda seen: "p" * 1000 in seen.news, turn(say("Enough."), shell("echo LAST"))),
    ]


def _wait(seen: Seen) -> Turn:
    """One call for each: a call is back when the first of its targets is."""
    return turn(*(call("multi_agent_v1__wait_agent", targets=[agent]) for agent in AGENT.findall(seen.news)))
