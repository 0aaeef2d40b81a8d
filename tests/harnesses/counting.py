"""The task that policies play in a harness with sub-agents: look around, let two of them count, say what they found.

Each harness has words of its own for a shell and for an agent; what is said, and to what, is the same in all.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.harnesses.script import Rule, Seen, say, think, turn

TASK = "BEGIN the task."
DONE = "All is counted."


def look(shell: Callable[[str], str]) -> Rule:
    """The first answer: two tools at once, one of which prints what ends an answer."""
    return Rule(
        "look",
        lambda seen: TASK in seen.news,
        turn(think("What is here?"), say("I look."), shell("echo LOOK-1"), shell("printf '%s' '<|im_end|>'")),
    )


def asked(letter: str) -> str:
    """What a sub-agent is told."""
    return f"COUNT {letter} please."


def counts(shell: Callable[[str], str]) -> list[Rule]:
    """The sub-agents' answers."""
    return [
        Rule("count-a", lambda seen: "COUNT A please" in seen.news, turn(shell("echo RESULT-A"))),
        Rule("count-b", lambda seen: "COUNT B please" in seen.news, turn(shell("echo RESULT-B"))),
        Rule("counted-a", lambda seen: "RESULT-A" in seen.news, turn(say("A is 1."))),
        Rule("counted-b", lambda seen: "RESULT-B" in seen.news, turn(say("B is 2."))),
    ]


def both_are_back(seen: Seen) -> bool:
    return "A is 1." in seen.prompt and "B is 2." in seen.prompt


def waiting(launched: str) -> list[Rule]:
    """Where sub-agents run in the background: they were `launched`, and the main agent is told when one is back."""
    return [
        Rule("waiting", lambda seen: launched in seen.news, turn(say("I wait for them."))),
        Rule("one-back", _one_is_back, turn(say("One of them is back.")), times=1, optional=True),
    ]


def _one_is_back(seen: Seen) -> bool:
    return "<task-notification>" in seen.news and ("A is 1." in seen.prompt) != ("B is 2." in seen.prompt)
