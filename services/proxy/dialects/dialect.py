"""A dialect: one wire format as a value of pure functions, in both directions. No dialect knows another.

    body ──parse──> Request ──(calls, tree, engine)──> Answer ──whole──> body
                                                          └─────rest───> the stream after `opening` and pings

Invariants
- an answer that was recorded says the same whenever and however it is asked for, but for the time in `created`;
- `opening` says nothing of the answer, so it may go out while the answer is being made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from services.proxy.conversation import Block, Call, Request, Text, Thinking
from services.proxy.memory import Memory
from services.proxy.refusal import Refused


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded answer with what the wire says beside it."""

    asked: Request
    """Its digest is the same for every repetition: ids on the wire come from it, so they are known before the answer."""
    blocks: list[Block]
    finish: Literal["stop", "length"]
    stop_sequence: str | None = None
    """The one of the request's that ended it."""
    prompt_tokens: int
    output_tokens: int
    created: int
    """Seconds since the epoch, for formats that want a time."""

    @property
    def text(self) -> str:
        return "".join(block.text for block in self.blocks if isinstance(block, Text))

    @property
    def thoughts(self) -> str:
        return "".join(block.thinking for block in self.blocks if isinstance(block, Thinking))

    @property
    def calls(self) -> list[Call]:
        return [block for block in self.blocks if isinstance(block, Call)]


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """What `services.proxy.endpoints` serves."""

    name: str
    path: str
    """Under `/v1`."""
    parse: Callable[[bytes, Mapping[str, str], Memory], Request]
    """A request from its body; headers answer lower-case names, the memory is the execution's. Raises Refused (400) with
    the place and the reason."""
    whole: Callable[[Answer], dict[str, Any]]
    """The body of an answer that isn't streamed."""
    opening: Callable[[Request, int, int], bytes] | None
    """What goes out at once when an answer is streamed, from the request, its prompt tokens and the time. None: nothing,
    and headers wait for the first ping, so that what fails soon is told by a status, which every client repeats."""
    ping: bytes
    rest: Callable[[Answer], bytes]
    """Every event after the opening and pings."""
    error: Callable[[Refused, str], dict[str, Any]]
    """The body of a refusal; with it comes the id of the HTTP request."""
    error_event: Callable[[Refused, Request, str, int], bytes]
    """The end of a stream that has begun and brings no answer; the last argument is the time."""
    count_path: str = ""
    """Where the tokens of a request are counted, under `/v1`."""
    count: Callable[[int], dict[str, Any]] = lambda tokens: {"input_tokens": tokens}
    statuses: Mapping[int, int] = {}
    """HTTP status of a refusal where it isn't the refusal's own."""
    retry_after_s: int = 0
    """Told to a client that shall ask again; 0 leaves it to the client's own growing pauses."""
    told_in_stream: frozenset[str] = frozenset()
    """Codes of refusals that the client understands in a stream only."""

    def status(self, refused: Refused) -> int:
        """HTTP status of a refusal."""
        return self.statuses.get(refused.status, refused.status)

    def headers(self, refused: Refused) -> dict[str, str]:
        """HTTP headers of a refusal, the request's id aside."""
        again = self.retry_after_s and refused.status == OVERLOADED
        return {"retry-after": str(self.retry_after_s)} if again else {}


OVERLOADED = 529
"""Status of a refusal after which the same request may succeed."""
