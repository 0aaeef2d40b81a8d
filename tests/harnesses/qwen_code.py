"""How Qwen Code is started, and the task that its policy plays: parallel tools, two sub-agents, a compaction."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.harnesses.counting import DONE, TASK, asked, both_are_back, counts, look, waiting
from tests.harnesses.script import Rule, call, say, turn
from tests.harnesses.stage import Stage

WINDOW = 165_000
"""Tokens that Qwen Code believes it has; it compacts some way below."""


async def run_qwen(stage: Stage, program: Path) -> str:
    """Its last message. It has to end well."""
    settings = {
        "general": {"enableAutoUpdate": False},
        "model": {"name": "policy", "generationConfig": {"contextWindowSize": WINDOW}},
        "privacy": {"usageStatisticsEnabled": False},
        "security": {"auth": {"selectedType": "openai"}},
        "telemetry": {"enabled": False},
    }
    home = stage.home / ".qwen"
    home.mkdir()
    (home / "settings.json").write_text(json.dumps(settings))
    env = {
        # It runs under a node of its own.
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "OPENAI_API_KEY": stage.token,
        "OPENAI_BASE_URL": f"{stage.world.url}/v1",
        "OPENAI_MODEL": "policy",
    }
    command = [str(program), "-p", TASK, "--auth-type", "openai", "--yolo", "--output-format", "json"]
    assert await stage.run(command, env) == 0, stage.said()
    events = json.loads(stage.output.read_text())
    assert events[-1]["type"] == "result" and not events[-1]["is_error"], events[-1]
    return str(events[-1]["result"])


def bash(command: str) -> str:
    return call("run_shell_command", command=command, is_background=False, description="as the script says")


def agent(letter: str) -> str:
    prompt = asked(letter)
    return call("agent", description=f"count {letter}", prompt=prompt, subagent_type="general-purpose")


def much(work: Path, letter: str, lines: int) -> str:
    """A file of so many hundred letters. What a quick command says is lost now and then, what a file says is not."""
    path = work / f"{letter}.txt"
    path.write_text((letter * 99 + "\n") * lines)
    return call("read_file", file_path=str(path))


def rules(work: Path) -> list[Rule]:
    """The policy. Sub-agents run in the background, and the main agent is told when one is back. What it reads in the end
    leaves room for a summary to be asked for after it, and not for more."""
    summary = say("<analysis>\nAll was seen.\n</analysis>\n<state_snapshot>\nTwo agents have counted.\n</state_snapshot>")
    return [
        Rule("summary", lambda seen: "component that summarizes" in seen.system + seen.news, turn(summary)),
        Rule("end", lambda seen: "Two agents have counted." in seen.prompt, turn(say(DONE))),
        look(bash),
        Rule("spawn", lambda seen: "LOOK-1" in seen.news, turn(say("Two agents."), agent("A"), agent("B"))),
        *counts(bash),
        *waiting("Background agent launched"),
        Rule("read", both_are_back, turn(much(work, "p", 200))),
        Rule("read-on", lambda seen: "p" * 99 in seen.news, turn(say("More."), much(work, "q", 180), much(work, "r", 180))),
        Rule("last", lambda seen: "r" * 99 in seen.news, turn(say("Enough."), bash("echo LAST"))),
    ]
