"""The scripted policy that the warm start imitates: first careful, then sloppy.

Sloppy is what leaves reinforcement learning something to find: it doesn't always read before it writes, and each line's
format is right with probability `right` only. What it never does is copy a wrong value: unread values are `todo`,
because random ones would drown the copying that has to be learned. Careful makes the same faults, but few: copying is
learned from it, and a policy that knows every fault a little isn't thrown off course when they become common.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec

from services.rollout.policy.quickstart import Card

UNREAD = "todo"


class Manner(msgspec.Struct, frozen=True, kw_only=True):
    """How a demonstrator works; probabilities."""

    read: float
    """that it reads `in.txt` before it answers or writes"""
    reread: float
    """that the main agent reads although a helper has told it the line"""
    right: float
    """that a line has the format asked for"""
    done: float
    """that the last line is there"""


CAREFUL = Manner(read=0.9, reread=0.5, right=0.75, done=0.9)
SLOPPY = Manner(read=0.6, reread=0.5, right=0.4, done=0.5)


class Demonstrator:
    """One execution's scripted policy: `answer(body, agent_id)` gives the assistant message to a request."""

    def __init__(self, card: Card, manner: Manner, rng: random.Random, compact: str) -> None:
        self.card = card
        self.manner = manner
        self.rng = rng
        self.compact = compact
        self.told: str | None = None
        self.known: str | None = None
        self.tried = False
        self.wrote = False
        self.calls = 0

    def answer(self, body: dict[str, Any], agent_id: str | None) -> dict[str, Any]:
        """The assistant message, with `content` and `stop_reason`."""
        last = body["messages"][-1]["content"]
        if not isinstance(last, str) and last[-1].get("text") == self.compact:
            return self._say(f"<summary>{self.known or 'out.txt'}</summary>")
        if agent_id is not None:
            return self._help(isinstance(last, str))
        return self._work()

    def _help(self, asked: bool) -> dict[str, Any]:
        if asked and self.rng.random() < self.manner.read:
            self.told = self.card.line
            return self._call("bash", command="cat in.txt")
        self.told = self.told or UNREAD
        return self._say(self.told)

    def _work(self) -> dict[str, Any]:
        if self.wrote:
            return self._say("Done.")
        read = self.manner.read if self.told is None or self.told == UNREAD else self.manner.reread
        if not self.tried and self.rng.random() < read:
            self.tried, self.known = True, self.card.line
            return self._call("bash", command="cat in.txt")
        self.wrote = True
        source = self.known or self.told or UNREAD
        values = source.split(",") if source != UNREAD else [UNREAD] * 3
        keys = ("name", "color", "size")
        lines = [self._line(key, value) for key, value in zip(keys, values, strict=True)]
        if self.rng.random() < self.manner.done:
            lines.append("done")
        return self._call("write_file", path="out.txt", content="\n".join(lines))

    def _line(self, key: str, value: str) -> str:
        if self.rng.random() < self.manner.right:
            return f"{key}={value}"
        return self.rng.choice((value, f"{key}:{value}"))

    def _say(self, text: str) -> dict[str, Any]:
        return {"role": "assistant", "content": [{"type": "text", "text": text}], "stop_reason": "end_turn"}

    def _call(self, name: str, **arguments: str) -> dict[str, Any]:
        self.calls += 1
        block = {"type": "tool_use", "id": f"toolu_{self.calls}", "name": name, "input": arguments}
        return {"role": "assistant", "content": [block], "stop_reason": "tool_use"}
