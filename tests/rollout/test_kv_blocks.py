"""Blocks are never lost and never in two hands, whatever requests do."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.rollout.reference.kv import BLOCK_SIZE, BlockPool, Lease

BLOCKS = 8
# Few different blocks of tokens, so that prefixes are often shared.
CHUNKS = [[letter] * BLOCK_SIZE for letter in (1, 2)]


def chunks(*letters: int) -> list[int]:
    return [token for letter in letters for token in CHUNKS[letter - 1]]


class Requests(RuleBasedStateMachine):
    """Leases come, grow, publish and go; the model is what each lease's tokens are and who wrote each block."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS)
        self.leases: list[tuple[Lease, list[int]]] = []
        # What a block holds: all tokens up to its end, as written by the one that computed it.
        self.written: dict[int, tuple[int, ...]] = {}

    @rule(path=st.lists(st.sampled_from([1, 2]), min_size=1, max_size=5), rest=st.integers(0, BLOCK_SIZE - 1))
    def admit(self, path: list[int], rest: int) -> None:
        tokens = chunks(*path) + [3] * rest
        lease = self.pool.acquire(tokens)
        assert lease.cached_tokens < len(tokens), "one token is always left to compute"
        if not self.pool.reserve(lease, len(tokens)):
            self.pool.release(lease)
            return
        for index in range(lease.cached_tokens // BLOCK_SIZE, len(tokens) // BLOCK_SIZE):
            self.written[lease.blocks[index]] = tuple(tokens[: (index + 1) * BLOCK_SIZE])
        self.leases.append((lease, tokens))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), more=st.integers(1, 2 * BLOCK_SIZE))
    def grow(self, data: st.DataObject, more: int) -> None:
        lease, tokens = data.draw(st.sampled_from(self.leases))
        before = list(lease.blocks)
        if not self.pool.reserve(lease, len(tokens) + more):
            assert lease.blocks == before
            return
        tokens.extend([2] * more)
        for index in range(len(lease.path), len(tokens) // BLOCK_SIZE):
            self.written[lease.blocks[index]] = tuple(tokens[: (index + 1) * BLOCK_SIZE])

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        lease, tokens = data.draw(st.sampled_from(self.leases))
        before = list(lease.blocks)
        assert self.pool.publish(lease, tokens) == (lease.blocks != before)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), publish=st.booleans())
    def finish(self, data: st.DataObject, publish: bool) -> None:
        pair = data.draw(st.sampled_from(self.leases))
        if publish:
            self.pool.publish(*pair)
        self.pool.release(pair[0])
        self.leases = [other for other in self.leases if other is not pair]

    @rule()
    def flush(self) -> None:
        self.pool.flush()
        assert self.pool.available == self.pool.free

    @invariant()
    def every_block_has_one_owner(self) -> None:
        self.pool.check()
        private = [block for lease, _ in self.leases for block in lease.blocks[len(lease.path) :]]
        assert len(private) == len(set(private))
        assert len(private) + self.pool.cached + self.pool.free == BLOCKS

    @invariant()
    def shared_blocks_hold_what_their_readers_expect(self) -> None:
        for lease, tokens in self.leases:
            for index in range(len(tokens) // BLOCK_SIZE):
                assert self.written[lease.blocks[index]] == tuple(tokens[: (index + 1) * BLOCK_SIZE])


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def test_the_least_recently_used_prefix_goes_first() -> None:
    pool = BlockPool(3)
    for letter in (1, 2):
        lease = pool.acquire(chunks(letter))
        assert pool.reserve(lease, BLOCK_SIZE)
        pool.publish(lease, chunks(letter))
        pool.release(lease)
    touched = pool.acquire([*chunks(1), 9])
    assert touched.cached_tokens == BLOCK_SIZE
    pool.release(touched)
    hungry = pool.acquire([9] * BLOCK_SIZE)
    assert pool.reserve(hungry, 2 * BLOCK_SIZE)
    assert repr(pool) == "<BlockPool 0 free, 2 private, 1 cached (1 idle)>"
    assert pool.acquire([*chunks(2), 9]).cached_tokens == 0
    assert pool.acquire([*chunks(1), 9]).cached_tokens == BLOCK_SIZE


def test_a_prefix_that_is_read_is_never_evicted() -> None:
    pool = BlockPool(2)
    reader = pool.acquire(chunks(1))
    assert pool.reserve(reader, BLOCK_SIZE)
    pool.publish(reader, chunks(1))
    other = pool.acquire([9])
    assert not pool.reserve(other, 2 * BLOCK_SIZE)
    assert pool.flush() == 0
    assert repr(pool) == "<BlockPool 1 free, 0 private, 1 cached (0 idle)>"
