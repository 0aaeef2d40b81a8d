"""What the scripted policy says: readable turns, the rules that pick one from a prompt, and every answer as it is played.

A turn is written as text (`say`, `think`, `call`), sampled as the ids of that text. Invariants
- a prompt that continues what an engine had sampled continues the same play, whichever engine is asked;
- no two sampled tokens of a script have the same log-probability, so that mixing shows;
- a prompt for which no rule speaks is an error that the test sees (`unscripted`).
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from schemas.records import VersionSpan
from services.mesh.chat import ChatTokenizer

Finish = Literal["stop", "length"]
_PER_PLAY = 1 << 20


class Turn(msgspec.Struct, frozen=True):
    """One answer of the policy. With `length` it is cut before its end token."""

    text: str
    finish: Finish = "stop"


def say(text: str) -> str:
    return text


def think(text: str) -> str:
    return f"<think>\n{text}\n</think>\n"


def call(tool: str, /, **arguments: Any) -> str:
    return "<tool_call>\n" + json.dumps({"name": tool, "arguments": arguments}) + "\n</tool_call>"


def turn(*parts: str, finish: Finish = "stop") -> Turn:
    return Turn("\n".join(parts), finish)


class Said(msgspec.Struct, frozen=True):
    """One message of a prompt, as the chat format shows it."""

    role: str
    text: str


class Seen:
    """A prompt, decoded: its messages, of which the last, empty one is the answer that is asked for."""

    def __init__(self, prompt: str) -> None:
        self.prompt = prompt
        parts = re.split(r"<\|im_start\|>(\w+)\n", prompt)[1:]
        said = [Said(role, text.removesuffix("\n").removesuffix("<|im_end|>")) for role, text in _pairs(parts)]
        self.messages = said[:-1]

    @property
    def system(self) -> str:
        return self.messages[0].text if self.messages and self.messages[0].role == "system" else ""

    @property
    def news(self) -> str:
        """All that was said since the last answer, but for the system's text."""
        news: list[str] = []
        for message in reversed(self.messages):
            if message.role == "assistant":
                break
            if message.role != "system":
                news.insert(0, message.text)
        return "\n".join(news)

    @property
    def answers(self) -> int:
        """Answers of the policy in this prompt."""
        return sum(message.role == "assistant" for message in self.messages)


def _pairs(parts: list[str]) -> list[tuple[str, str]]:
    return list(zip(parts[::2], parts[1::2], strict=True))


class Rule(msgspec.Struct, frozen=True):
    """`turn` is said to a prompt for which `when` holds, at most `times` times, and at least once unless `optional`."""

    name: str
    when: Callable[[Seen], bool]
    turn: Turn | Callable[[Seen], Turn]
    times: int = 1
    optional: bool = False


class Play:
    """One answer, played by one engine or by several in turn."""

    def __init__(self, serial: int, rule: str, seen: Seen, prompt: array[int], ids: list[int], finish: Finish) -> None:
        self.serial, self.rule, self.seen = serial, rule, seen
        self.prompt, self.ids, self.finish = prompt, ids, finish
        self.asked = 0
        """Calls of engines for it so far."""
        self.parts: list[tuple[str, VersionSpan]] = []
        """Engine, and what the proxy has from it."""

    def __repr__(self) -> str:
        return f"<Play {self.serial} {self.rule} [{len(self.prompt)} + {len(self.ids)}, {len(self.parts)} parts]>"

    def logprob(self, at: int) -> float:
        return -self.serial - (at + 1) / _PER_PLAY

    @property
    def logprobs(self) -> list[float]:
        return [self.logprob(at) for at in range(len(self.ids))]

    @property
    def cells(self) -> list[str]:
        return [cell for cell, _ in self.parts]

    @property
    def versions(self) -> list[VersionSpan]:
        """Spans of the whole answer; neighbours of one version are one span."""
        spans: list[VersionSpan] = []
        for _, part in self.parts:
            start = part.start
            if part.start == part.end:
                continue
            if spans and spans[-1].version == part.version:
                start = spans.pop().start
            spans.append(VersionSpan(version=part.version, start=start, end=part.end))
        return spans


class Script:
    """The policy of all engines of a test."""

    def __init__(self, tokenizer: ChatTokenizer, rules: list[Rule]) -> None:
        self._tokenizer, self.rules = tokenizer, rules
        self._left = {rule.name: rule.times for rule in rules}
        assert len(self._left) == len(rules), "two rules have one name"
        self.plays: list[Play] = []
        self.unscripted: list[Seen] = []
        self._suspended: dict[bytes, list[Play]] = {}
        """Answers that stopped before their end, by all ids that were known then."""

    @property
    def unused(self) -> list[str]:
        """Rules that never spoke and had to."""
        spoke = {play.rule for play in self.plays}
        return [rule.name for rule in self.rules if not rule.optional and rule.name not in spoke]

    def played(self, rule: str) -> list[Play]:
        return [play for play in self.plays if play.rule == rule]

    def take(self, input_ids: list[int]) -> tuple[Play, int]:
        """The answer to this prompt, and how much of it the prompt holds."""
        given = array("i", input_ids)
        if waiting := self._suspended.get(given.tobytes()):
            play = waiting.pop()
            play.asked += 1
            return play, len(given) - len(play.prompt)
        seen = Seen(self._tokenizer.decode(input_ids))
        name, said = self._answer(seen)
        ids = self._tokenizer.encode(said.text) + ([self._tokenizer.eos_token_id] if said.finish == "stop" else [])
        play = Play(len(self.plays) + 1, name, seen, given, ids, said.finish)
        play.asked = 1
        self.plays.append(play)
        return play, 0

    def suspend(self, play: Play, at: int) -> None:
        """The answer goes on from `at`, whenever it is asked for."""
        known = play.prompt + array("i", play.ids[:at])
        self._suspended.setdefault(known.tobytes(), []).append(play)

    def forget(self, recorded: set[tuple[float, ...]]) -> None:
        """The proxy is gone with what it had not recorded: those answers are given once more, from their beginning.
        `recorded` are the log-probabilities of the others."""
        self._suspended.clear()
        for play in self.plays:
            if tuple(play.logprobs) not in recorded:
                play.parts.clear()
                self.suspend(play, 0)

    def _answer(self, seen: Seen) -> tuple[str, Turn]:
        for rule in self.rules:
            if self._left[rule.name] > 0 and rule.when(seen):
                self._left[rule.name] -= 1
                return rule.name, rule.turn if isinstance(rule.turn, Turn) else rule.turn(seen)
        self.unscripted.append(seen)
        return "unscripted", turn(say("Nothing is scripted for this prompt."))
