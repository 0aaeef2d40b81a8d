"""What the proxy stores of every model call, and the tree that is frozen from it. Token by token, never re-encoded.

A call is one node: a delta against its parent. The prompt of a call is the concatenation, root to parent, of
`input_ids + output_ids`, followed by its own `input_ids`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Role = Literal["main", "main-summary", "sub-agent", "sub-agent-summary"]
ROLES: tuple[Role, ...] = ("main", "main-summary", "sub-agent", "sub-agent-summary")
"""Equation (4): the classes of leaves, highest priority first."""


class VersionSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Output tokens `start <= i < end` were sampled under policy `version`."""

    version: int
    start: int
    end: int


class CallRecord(msgspec.Struct, frozen=True, kw_only=True, tag="call"):
    """One answered model call, stored before the harness sees the answer."""

    call: str
    execution: str
    attempt: int
    index: int
    """Order of the calls of this attempt, from 0."""
    parent: str | None
    """Call whose path this one extends; None at a root."""
    input_ids: list[int]
    """New context tokens after the parent's output: never targets."""
    output_ids: list[int]
    """Sampled by our engine for this call, the stop token included when it was sampled."""
    logprobs: list[float]
    """Behaviour log-probability of each output token, at `temperature`."""
    versions: list[VersionSpan]
    temperature: float
    asked: dict[str, float] = {}
    """Sampling that the harness asked for and did not get."""
    finish: Literal["stop", "length"]
    cell: str
    """Engine that finished the answer."""
    role: Role
    agent: str = ""
    """The harness's own id of a sub-agent; empty for the main agent."""
    request: str
    """Digest of the canonical request: the same request again is answered from this record."""
    prefix: str
    """Digest chain of the normalised messages that led here, the answer included: where later requests attach."""
    answer: bytes
    """The answer as the dialect's content blocks (JSON), for restoration and for a proxy that starts again."""
    delivered: bool = True
    """False while no client has taken the answer: such a call is no candidate for training."""


class Delivery(msgspec.Struct, frozen=True, kw_only=True, tag="delivery"):
    """An answer that had been stored as undelivered was taken after all."""

    call: str
    execution: str
    attempt: int


class Closed(msgspec.Struct, frozen=True, kw_only=True, tag="closed"):
    """No entry of this attempt follows: what the seal describes ends before it. Stored where several proxies may write."""

    execution: str
    attempt: int


class GivenUp(msgspec.Struct, frozen=True, kw_only=True, tag="given-up"):
    """A request that took one engine after the other with it: it is refused from then on, by every proxy."""

    execution: str
    attempt: int
    request: str
    """Digest of the canonical request."""
    prompt_tokens: int
    cells: list[str]
    """Whose engines were lost while they had it, in order."""


RecordEntry = CallRecord | Delivery | Closed | GivenUp


class TreeNode(msgspec.Struct, frozen=True, kw_only=True):
    """One node of a frozen tree; nodes are in call order, so a parent's index is below its child's."""

    call: str
    parent: int
    """Index of the parent node, -1 at a root."""
    input_ids: list[int]
    output_ids: list[int]
    logprobs: list[float]
    versions: list[VersionSpan]
    temperature: float
    role: Role
    trainable: bool
    """False for undelivered answers: context for nobody, target for nobody."""


class FrozenTree(msgspec.Struct, frozen=True, kw_only=True):
    """The trajectory tree of one attempt of an execution, as it lies in BLOBS (MessagePack)."""

    execution: str
    attempt: int
    nodes: list[TreeNode]
