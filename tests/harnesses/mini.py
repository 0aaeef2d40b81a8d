"""How mini-swe-agent is started, and the task that its policy plays: two turns with parallel tools."""

from __future__ import annotations

from pathlib import Path

from tests.harnesses.counting import TASK
from tests.harnesses.script import Rule, call, say, think, turn
from tests.harnesses.stage import Stage


async def run_mini(stage: Stage, program: Path) -> str:
    """What it printed. It has to end well."""
    env = {
        "OPENAI_API_KEY": stage.token,
        "OPENAI_BASE_URL": f"{stage.world.url}/v1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
    }
    command = [str(program), "-y", "--exit-immediately", "-m", "openai/policy", "-t", TASK]
    assert await stage.run(command, env) == 0, stage.said()
    return stage.said()


def bash(command: str) -> str:
    return call("bash", command=command)


def rules() -> list[Rule]:
    submit = bash("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo SUBMITTED")
    return [
        Rule(
            "look",
            lambda seen: TASK in seen.news,
            turn(think("What is here?"), say("I look."), bash("echo LOOK-1"), bash("echo LOOK-2")),
        ),
        Rule("write", lambda seen: "LOOK-1" in seen.news, turn(say("I write."), bash("echo LOOK-3 > file; cat file"))),
        Rule("end", lambda seen: "LOOK-3" in seen.news, turn(say("Done."), submit)),
    ]
