"""State of the packer. Mutable, goes through MessagePack, and bounded: it holds groups that are not packed to the end,
batches whose stream is open, and what the batches that can still be undone took."""

from __future__ import annotations

import msgspec

from schemas.units import RowRef


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of one execution. They share a micro-step: the clip mask (5) needs all of its targets."""

    execution: str
    tokens: int
    rows: list[RowRef]


class Supply(msgspec.Struct, kw_only=True):
    """A group between its dispatch and its last row."""

    version: int
    """v_d."""
    ready: bool = False
    bundles: list[Bundle] | None = None
    """What is left to pack, largest first; None before the group is materialized."""


class OpenBatch(msgspec.Struct, kw_only=True):
    """A batch whose stream is not closed."""

    name: str
    groups: int
    """B."""
    left: int = 1
    """Steps of its burst from this one on."""
    claimed: list[str] = []
    """Groups of the batch in the order of their claims."""
    enqueued: int = 0
    """Micro-steps said so far: the index of the next."""
    unclaimed: list[str] = []
    """Micro-steps that wait for a cell."""


class Taken(msgspec.Struct, kw_only=True):
    """A batch that can still be undone, because no version that it made is exposed for publication."""

    batch: str
    version: int
    """v_t."""
    groups: dict[str, Supply] = {}
    """As they were when they were claimed."""


class State(msgspec.Struct, kw_only=True):
    capacity: int = 16384
    """T."""
    streaming: bool = True
    mu: int = 1
    """Training steps a burst."""
    reorder: int = 2
    ahead: int = 2
    newest: str = ""
    """Group dispatched last: one that isn't newer and isn't held was packed or discarded before."""
    newest_batch: str = ""
    supplies: dict[str, Supply] = {}
    batches: list[OpenBatch] = []
    """The first is being packed; later ones wait for its stream to close."""
    taken: list[Taken] = []
    """In the order in which the batches were opened."""
    stepped: int = 0
    """Version that was made last."""
    packed_tokens: int = 0
    """Of all micro-steps so far."""
    packed_room: int = 0
    """T for each of them, or its tokens where one execution alone is longer."""
