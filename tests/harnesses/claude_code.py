"""How Claude Code is started, and the task that its policy plays: parallel tools, two sub-agents, a compaction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.harnesses.counting import DONE, TASK, asked, both_are_back, counts, look, waiting
from tests.harnesses.script import Rule, call, say, turn
from tests.harnesses.stage import Stage

WINDOW = 200_000
"""Tokens that Claude Code believes it has; it compacts some way below."""


async def run_claude(stage: Stage, program: Path) -> dict[str, Any]:
    """Its report after the task. It has to end well."""
    env = {
        "ANTHROPIC_BASE_URL": stage.world.url,
        "ANTHROPIC_AUTH_TOKEN": stage.token,
        "ANTHROPIC_MODEL": "policy",
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(WINDOW),
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_RETRY_WATCHDOG": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "DISABLE_TELEMETRY": "1",
        "IS_SANDBOX": "1",
    }
    command = [str(program), "-p", TASK, "--dangerously-skip-permissions", "--output-format", "json"]
    assert await stage.run(command, env) == 0, stage.said()
    report: dict[str, Any] = json.loads(stage.output.read_text())
    assert not report["is_error"] and report["terminal_reason"] == "completed", report
    return report


def bash(command: str) -> str:
    return call("Bash", command=command, description="as the script says", timeout=5e3)


def much(letter: str) -> str:
    """A tool that says nearly as much as is let through at once."""
    return bash(f"head -c 29000 /dev/zero | tr '\\0' {letter}")


def agent(letter: str) -> str:
    prompt = asked(letter)
    return call("Agent", description=f"count {letter}", prompt=prompt, subagent_type="general-purpose")


def rules(*, waits: bool) -> list[Rule]:
    """The policy. With `waits` sub-agents run in the background, and the main agent is told when one is back."""
    summary = say("<analysis>\nAll was seen.\n</analysis>\n<summary>\nTwo agents have counted.\n</summary>")
    return [
        Rule("summary", lambda seen: "CRITICAL: Respond with TEXT ONLY" in seen.news, turn(summary)),
        Rule("end", lambda seen: "This session is being continued" in seen.prompt, turn(say(DONE))),
        look(bash),
        Rule(
            "spawn",
            lambda seen: "LOOK-1" in seen.news,
            turn(say("\n\n"), agent("A"), agent("B")),
        ),
        *counts(bash),
        *(waiting("Async agent launched") if waits else []),
        Rule("read", both_are_back, turn(much("p"))),
        Rule("read-on", lambda seen: "p" * 1000 in seen.news, turn(say("More."), much("q"), much("r"))),
        Rule("last", lambda seen: "r" * 1000 in seen.news, turn(say("Enough."), bash("echo LAST"))),
    ]
