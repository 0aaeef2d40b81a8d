"""The neutral conversation: what every dialect's request becomes, and the keys by which turns are recognised.

Invariants
- two requests whose messages have equal keys render to the same tokens: a key covers exactly what is rendered;
- keys don't see what harnesses rewrite on the way back: a string or one text block, markers for caching, citations,
  the order and number format of JSON, whitespace-only text of the assistant, the order of tool results.

Blocks have the shape of Anthropic Messages, so that `services.mesh.chat` renders them like everything else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from schemas.records import Role
from services.mesh.chat import block_text

_EXACT = 1 << 53
"""Integers from here on lose digits in a JavaScript program."""


class Text(msgspec.Struct, frozen=True, kw_only=True, tag="text", tag_field="type"):
    text: str


class Thinking(msgspec.Struct, frozen=True, kw_only=True, tag="thinking", tag_field="type"):
    thinking: str


class Call(msgspec.Struct, frozen=True, kw_only=True, tag="tool_use", tag_field="type"):
    id: str
    name: str
    input: dict[str, Any]


class Result(msgspec.Struct, frozen=True, kw_only=True, tag="tool_result", tag_field="type"):
    tool_use_id: str
    content: str


Block = Text | Thinking | Call | Result


class _Answer(msgspec.Struct, frozen=True):
    """What msgspec knows of a struct it keeps; of a bare list of blocks it would find it out each time."""

    blocks: list[Block]


class Message(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["user", "assistant"]
    blocks: list[Block]

    @property
    def call_ids(self) -> list[str]:
        return [block.id for block in self.blocks if isinstance(block, Call)]

    def key(self) -> bytes:
        """Digest of what is rendered of this message."""
        texts = [block.text for block in self.blocks if isinstance(block, Text)]
        if self.role == "assistant":
            calls = [[block.name, canonical(block.input)] for block in self.blocks if isinstance(block, Call)]
            thoughts = [block.thinking for block in self.blocks if isinstance(block, Thinking)]
            # Harnesses drop thinking from their history, so it counts only where there is nothing else.
            return digest(["assistant", "".join(texts), calls, [] if texts or calls else thoughts])
        results = [block.content for block in self.blocks if isinstance(block, Result)]
        return digest(["user", results, "\n".join(texts) if texts else None])


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides the prompt, and who asks."""

    agent: str
    role: Role
    system: str
    tools: list[dict[str, Any]]
    """`name`, `description`, `input_schema` of each."""
    messages: list[Message]
    root: bytes = b""
    """Its key, where that is known already."""

    def key(self) -> bytes:
        """Where every chain of this agent, system text and tools begins."""
        return self.root or root_key(self.agent, self.system, self.tools)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One model call as a harness asks for it."""

    conversation: Conversation
    digest: str
    """Of the canonical request: equal for every repetition, streaming or not."""
    model: str
    stream: bool
    max_tokens: int | None
    asked: dict[str, float]
    """Sampling that was asked for; the proxy's own is used."""
    calls_allowed: bool = True
    """False, also where there are no tools: a call of the policy is handed on as text. No client expects one then, and
    one that makes a summary fails."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer, wherever in it they are sampled."""
    wire: Any = None
    """What the dialect has to know again when it answers."""


def root_key(agent: str, system: str, tools: list[dict[str, Any]]) -> bytes:
    """Digest of what a branch begins with: two agents never share one."""
    return digest(["root", agent, system, canonical(tools)])


def shaped(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Messages as `services.mesh.chat.chat_messages` takes them."""
    return [{"role": message.role, "content": msgspec.to_builtins(message.blocks)} for message in messages]


def encode_blocks(blocks: Sequence[Block]) -> bytes:
    """An answer as it is recorded. Raises ValueError for what JSON cannot hold (no numbers, half characters)."""
    shapes = msgspec.to_builtins(blocks)
    return json.dumps(shapes, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def decode_blocks(answer: bytes) -> list[Block]:
    """The blocks of `encode_blocks`."""
    return msgspec.convert({"blocks": json.loads(answer)}, _Answer).blocks


def canonical(value: Any) -> Any:
    """`value` as a JavaScript program would have it: numbers are doubles, whole ones without a fraction, keys sorted."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, dict):
        return {key: canonical(value[key]) for key in sorted(value)}
    if isinstance(value, (list, tuple)):
        return [canonical(item) for item in value]
    try:
        number = float(value)
    except OverflowError:
        return None
    if number != number or number in (float("inf"), float("-inf")):
        return None
    return int(number) if number.is_integer() and abs(number) < _EXACT else number


def digest(value: Any) -> bytes:
    """16 bytes over the canonical JSON of `value`."""
    return hashlib.blake2b(msgspec.json.encode(value, order="deterministic"), digest_size=16).digest()


def link(chain: bytes, key: bytes) -> bytes:
    """The chain that continues `chain` by a message."""
    return hashlib.blake2b(chain + key, digest_size=16).digest()


def joined(blocks: Sequence[dict[str, Any]]) -> str:
    """Text of several text blocks, as the template shows it."""
    return block_text(blocks)
