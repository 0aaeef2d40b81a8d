"""Which KV block belongs to whom: leases of running requests and the prefix cache. Numbers only, no tensors.

Every block is in exactly one of three states:

    free --reserve--> private (one lease) --publish--> cached (a node of the prefix tree) --evict--> free

- a cached block is pinned by each lease that reads it; only unpinned leaves are evicted, least recently used first;
- a lease pins whole paths from the root, so a pinned node's ancestors are pinned too;
- a block is published only when it is full, under the exact tokens of its path: two requests share a block only if they
  agree on every token up to its end.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

BLOCK_SIZE = 16
"""Tokens in a block."""


class Node:
    """One cached block: the edge of 16 tokens that leads to it, and who reads it."""

    __slots__ = ("block", "children", "key", "parent", "pins", "used")

    def __init__(self, *, key: tuple[int, ...], block: int, parent: Node | None) -> None:
        self.key = key
        self.block = block
        self.parent = parent
        self.children: dict[tuple[int, ...], Node] = {}
        self.pins = 0
        self.used = 0


class Lease:
    """The blocks of one request in the order of their positions: first `len(path)` shared ones, then private ones."""

    __slots__ = ("blocks", "path")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.path: list[Node] = []

    @property
    def cached_tokens(self) -> int:
        """Tokens in shared blocks."""
        return len(self.path) * BLOCK_SIZE

    @property
    def capacity(self) -> int:
        """Tokens that fit into the blocks held."""
        return len(self.blocks) * BLOCK_SIZE


class BlockPool:
    """`num_blocks` blocks of `BLOCK_SIZE` tokens."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._root = Node(key=(), block=-1, parent=None)
        self._idle = 0
        self._cached = 0
        self._clock = itertools.count(1)
        # Entries are (used, tie-break, node); one is stale if its node was used, pinned, extended or evicted since.
        self._evictable: list[tuple[int, int, Node]] = []
        self._tie = itertools.count()

    def __repr__(self) -> str:
        private = self.num_blocks - len(self._free) - self._cached
        return f"<BlockPool {len(self._free)} free, {private} private, {self._cached} cached ({self._idle} idle)>"

    @property
    def available(self) -> int:
        """Blocks that `reserve` could hand out now: free ones and those in the cache that nobody reads."""
        return len(self._free) + self._idle

    @property
    def free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Blocks in the prefix cache."""
        return self._cached

    def acquire(self, tokens: Sequence[int]) -> Lease:
        """A lease on the longest cached prefix of `tokens`, pinned; at least the last token is left to compute."""
        lease, node = Lease(), self._root
        for start in range(0, (len(tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE, BLOCK_SIZE):
            child = node.children.get(tuple(tokens[start : start + BLOCK_SIZE]))
            if child is None:
                break
            node = child
            self._pin(node)
            lease.path.append(node)
            lease.blocks.append(node.block)
        return lease

    def reserve(self, lease: Lease, length: int) -> bool:
        """Give the lease private blocks until `length` tokens fit; False, and nothing changed, if too few are left."""
        missing = -(-length // BLOCK_SIZE) - len(lease.blocks)
        if missing > self.available:
            return False
        for _ in range(missing):
            if not self._free:
                self._evict_one()
            lease.blocks.append(self._free.pop())
        return True

    def publish(self, lease: Lease, tokens: Sequence[int]) -> bool:
        """Share the lease's full blocks; `tokens` are those whose keys and values are in place.

        Where another request has published the same tokens meanwhile, the lease goes over to that block and its own is
        freed. Returns True if this changed `lease.blocks`.
        """
        moved = False
        for index in range(len(lease.path), len(tokens) // BLOCK_SIZE):
            parent = lease.path[-1] if lease.path else self._root
            key = tuple(tokens[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE])
            node = parent.children.get(key)
            if node is None:
                node = Node(key=key, block=lease.blocks[index], parent=parent)
                parent.children[key] = node
                self._cached += 1
                self._idle += 1
            else:
                self._free.append(lease.blocks[index])
                lease.blocks[index] = node.block
                moved = True
            self._pin(node)
            lease.path.append(node)
        return moved

    def release(self, lease: Lease) -> None:
        """Return the lease's blocks: private ones become free, shared ones stay in the cache."""
        self._free.extend(lease.blocks[len(lease.path) :])
        used = next(self._clock)
        # From the end of the path: a child is always at least as old as its parent, so it goes first.
        for node in reversed(lease.path):
            node.pins -= 1
            node.used = used
            if not node.pins:
                self._idle += 1
                self._offer(node)
        lease.blocks.clear()
        lease.path.clear()

    def flush(self) -> int:
        """Drop every cached block that nobody reads; returns how many."""
        dropped = self._idle
        while self._idle:
            self._evict_one()
        return dropped

    def check(self) -> None:
        """Raise AssertionError unless each block is free, private or cached exactly once as far as the pool can see."""
        nodes = list(self._walk(self._root))
        blocks = self._free + [node.block for node in nodes]
        assert len(blocks) == len(set(blocks)), "a block has two owners"
        assert len(nodes) == self._cached
        assert sum(not node.pins for node in nodes) == self._idle
        for node in nodes:
            assert node.pins >= 0
            assert node.pins >= max((child.pins for child in node.children.values()), default=0)

    def _walk(self, node: Node) -> list[Node]:
        return [found for child in node.children.values() for found in (child, *self._walk(child))]

    def _pin(self, node: Node) -> None:
        if not node.pins:
            self._idle -= 1
        node.pins += 1

    def _offer(self, node: Node) -> None:
        if not node.pins and not node.children and node is not self._root:
            heapq.heappush(self._evictable, (node.used, next(self._tie), node))

    def _evict_one(self) -> None:
        while True:
            used, _, node = heapq.heappop(self._evictable)
            parent = node.parent
            if parent is None or node.pins or node.children or node.used != used:
                continue
            del parent.children[node.key]
            node.parent = None
            self._free.append(node.block)
            self._idle -= 1
            self._cached -= 1
            self._offer(parent)
            return
