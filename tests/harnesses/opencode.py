"""How OpenCode is started, and the task that its policy plays: parallel tools, two sub-agents; a helper names the session."""

from __future__ import annotations

import json
from pathlib import Path

from tests.harnesses.counting import DONE, TASK, asked, counts, look
from tests.harnesses.script import Rule, call, say, turn
from tests.harnesses.stage import Stage


async def run_opencode(stage: Stage, program: Path) -> str:
    """Its last message. It has to end well."""
    options = {"baseURL": f"{stage.world.url}/v1", "apiKey": stage.token}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": options,
        "models": {"policy": {"limit": {"context": 200_000, "output": 8_000}}},
    }
    config = {
        "provider": {"here": provider},
        "model": "here/policy",
        "small_model": "here/policy",
        "permission": "allow",
    }
    home = stage.home / ".config" / "opencode"
    home.mkdir(parents=True)
    (home / "opencode.json").write_text(json.dumps(config))
    off = ("AUTOUPDATE", "MODELS_FETCH", "DEFAULT_PLUGINS", "LSP_DOWNLOAD")
    env = {f"OPENCODE_DISABLE_{name}": "1" for name in off}
    assert await stage.run([str(program), "run", "--format", "json", TASK], env) == 0, stage.said()
    events = [json.loads(line) for line in stage.output.read_text().splitlines()]
    return str([event["part"]["text"] for event in events if event["type"] == "text"][-1])


def bash(command: str) -> str:
    return call("bash", command=command, description="as the script says")


def agent(letter: str) -> str:
    return call("task", description=f"count {letter}", prompt=asked(letter), subagent_type="general")


def rules() -> list[Rule]:
    return [
        Rule("title", lambda seen: "title generator" in seen.system, turn(say("A title"))),
        look(bash),
        Rule("spawn", lambda seen: "LOOK-1" in seen.news, turn(say("Two agents."), agent("A"), agent("B"))),
        *counts(bash),
        Rule("end", lambda seen: "A is 1." in seen.news and "B is 2." in seen.news, turn(say(DONE))),
    ]
