"""What the requests of one execution repeat: read once.

A harness sends its whole history with every call. Here lie the parts of the last requests as they came (bytes) and as they
were read, so a request that begins like an earlier one is read from where it differs:

    head        everything but the messages: system text, tools, sampling; the same bytes give the same object
    history     messages, one after the other (`services.proxy.history`); those that are the same bytes stay read

Invariants
- what is returned depends on the request alone, never on what was remembered: reading is pure;
- what is kept beside the newest history is bounded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from services.proxy.conversation import canonical, digest, root_key
from services.proxy.history import History, Known, Told

T = TypeVar("T")

HEADS = 8
KEPT_BYTES = 4 << 20
"""Of histories beside the newest."""
HISTORIES = 256
"""Of one execution, whatever their size."""
_DIGEST = 16


class Head(Generic[T]):
    """One head as it was read."""

    __slots__ = ("digest", "value")

    def __init__(self, data: bytes, value: T) -> None:
        self.digest = meaning(data)
        self.value = value


class Memory:
    """Of one execution; requests are read one at a time."""

    def __init__(self) -> None:
        self._heads: dict[tuple[str, bytes], Head[Any]] = {}
        self._histories: dict[tuple[str, bytes], History] = {}
        self._root: tuple[str, str, list[dict[str, Any]], bytes] | None = None

    def head(self, dialect: str, data: bytes, read: Callable[[bytes], T]) -> Head[T]:
        """What `read` makes of a head: of the same bytes each dialect makes something else."""
        key = (dialect, data)
        found = self._heads.pop(key, None) or Head(data, read(data))
        self._heads[key] = found
        while len(self._heads) > HEADS:
            del self._heads[next(iter(self._heads))]
        return found

    def known(self, dialect: str, data: bytes) -> Known | None:
        """What a body begins with that was read, if it continues the last one of a history."""
        for history in reversed(self._histories.values()):
            if history.key[0] == dialect and (known := history.known(data)):
                return known
        return None

    def history(self, dialect: str, told: Told) -> History:
        """The one that begins like these messages, or a new one."""
        key = told.known.history.key if told.known else (dialect, told.first)
        found = self._histories.pop(key, None) or History(*key)
        self._histories[key] = found
        # A first message that couldn't be read lies in the key alone.
        kept = [
            (key, max(len(key[1]), history.size)) for key, history in self._histories.items() if history is not found
        ]
        total = sum(size for _, size in kept)
        for other, size in kept:
            if total <= KEPT_BYTES and len(self._histories) <= HISTORIES:
                break
            del self._histories[other]
            total -= size
        return found

    def root(self, agent: str, system: str, tools: list[dict[str, Any]]) -> bytes:
        """`root_key`, made anew only when something differs."""
        last = self._root
        if last is None or last[2] is not tools or last[0] != agent or last[1] != system:
            self._root = last = (agent, system, tools, root_key(agent, system, tools))
        return last[3]


def meaning(data: bytes) -> bytes:
    """Digest of JSON, whatever the order of its keys: Codex has another one in every repetition."""
    return digest(canonical(msgspec.json.decode(data)))


def request_digest(dialect: str, agent: str, head: Head[Any], history: History, beside: bytes = b"") -> str:
    """Equal for every repetition of a request: messages that are the same bytes, a head that means the same. Whether it is
    streamed is part of neither; `beside` is a digest of what else makes it another request."""
    told = head.digest + history.digest + beside
    parts = b"\0".join([dialect.encode(), agent.encode("utf-8", "surrogatepass"), told])
    return hashlib.blake2b(parts, digest_size=_DIGEST).hexdigest()
