"""Conversations as a harness grows them, and a tokenizer for their words.

Words are drawn from a seed, one token each with the space before it, some four characters long; so a conversation's size
in tokens is chosen to a few percent, and the proxy's own count is what is reported.
"""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from services.mesh.chat import CONTROL_TOKENS, MARKUP_TOKENS, TOKENIZER_FILE

_WORDS = 3000
_SYLLABLES = ("ba", "de", "fi", "go", "ku", "la", "me", "ni", "po", "ru", "sa", "te", "vi", "wo", "xu", "ya", "ze")
TOOLS = 20
ANSWER_TOKENS = 60
FRAME_TOKENS = 30
"""Of a turn that no word is counted for: roles, markup and the keys of a call."""


def words(seed: int) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choices(_SYLLABLES, k=draw.choice((1, 2, 2)))) for _ in range(_WORDS)]


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE trained on the words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False, special_tokens=[]
    )
    tokenizer.train_from_iterator([" ".join(words(0))] * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKUP_TOKENS])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / TOKENIZER_FILE))


def answer_text() -> str:
    """What the policy samples in every turn: one call."""
    said = " ".join(words(0)[: ANSWER_TOKENS - 20])
    return f'<tool_call>\n{{"name": "tool_1", "arguments": {{"command": "{said}"}}}}\n</tool_call>'


class Talk:
    """One execution: the first request has some `tokens`, each turn adds some `growth` with its answer. With `tools` there
    are 5,000 more."""

    def __init__(self, seed: int, *, tokens: int, growth: int, tools: bool = True) -> None:
        self._draw = random.Random(seed)
        self._words = words(0)
        self._growth = growth
        self.tools = [self._tool(index) for index in range(TOOLS)] if tools else [_TOOL]
        self.system = [{"type": "text", "text": f"{seed} {self._text(100)}"}]
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": [self._block(max(1, tokens - 150))]}]

    def copy(self) -> Talk:
        """One that goes on by itself, with the same words."""
        twin = copy.copy(self)
        twin.messages = list(self.messages)
        twin._draw = copy.copy(self._draw)
        return twin

    def body(self) -> bytes:
        """The request that asks for the next turn, with the marks that a harness moves on each time."""
        last = self.messages[-1]
        marked = {**last, "content": [*last["content"][:-1], {**last["content"][-1], "cache_control": _EPHEMERAL}]}
        return msgspec.json.encode(
            {
                "model": "policy",
                "messages": [*self.messages[:-1], marked],
                "system": self.system,
                "tools": self.tools,
                "max_tokens": 32000,
                "thinking": {"type": "adaptive"},
                "stream": True,
            }
        )

    def take(self, content: list[dict[str, Any]]) -> None:
        """An answer, and the result of its call."""
        self.messages.append({"role": "assistant", "content": content})
        (call,) = [block["id"] for block in content if block["type"] == "tool_use"]
        text = self._text(self._growth - ANSWER_TOKENS - FRAME_TOKENS)
        result = {"type": "tool_result", "tool_use_id": call, "content": [{"type": "text", "text": text}]}
        self.messages.append({"role": "user", "content": [result]})

    def _text(self, tokens: int) -> str:
        return " ".join(self._draw.choices(self._words, k=tokens))

    def _block(self, tokens: int) -> dict[str, Any]:
        return {"type": "text", "text": self._text(tokens)}

    def _tool(self, index: int) -> dict[str, Any]:
        properties = {word: {"type": "string", "description": self._text(12)} for word in self._words[:5]}
        return {
            "name": f"tool_{index}",
            "description": self._text(60),
            "input_schema": {"type": "object", "properties": properties, "required": list(properties)[:2]},
        }


_EPHEMERAL = {"type": "ephemeral"}
_TOOL: dict[str, Any] = {"name": "tool_1", "description": "", "input_schema": {"type": "object"}}
"""Without one a call is handed on as text."""
