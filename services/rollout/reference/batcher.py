"""Continuous batching: a synchronous core that one thread drives by calling `step` again and again.

A request's way:

    submit -> waiting --admit--> running (prefill, then one token a step) -> finished
                 ^------------ retract ------------'

Invariants:

- requests join and leave the batch at every step; waiting ones are admitted first come, first served;
- weights change only between steps, and every running request is retracted then: its next token is conditioned on keys
  and values of the new weights, and its spans say which tokens came from which version;
- in float64 each request is computed by itself, one token at a time: its answer depends on weights, ids and seed only;
- a request that fits the context and the pool always finishes: when blocks run out, the youngest running one is
  retracted.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from services.rollout.reference.decode import PagedDecoder
from services.rollout.reference.kv import BLOCK_SIZE, BlockPool
from services.rollout.reference.request import Finish, Request, RequestRefused
from services.rollout.reference.sampling import sample

PauseMode = Literal["abort", "retract", "in_place"]
MEMORY_TAGS = ("weights", "kv_cache")


class Batcher:
    """Owns the decoder, the block pool and all requests. Not thread-safe: one thread calls everything.

    Each method that ends requests returns them; a request is returned exactly once.
    """

    def __init__(
        self,
        decoder: PagedDecoder,
        *,
        context_length: int,
        max_running: int = 32,
        prefill_tokens: int = 512,
        weight_version: str = "0",
    ) -> None:
        self.decoder = decoder
        self.pool = BlockPool(decoder.num_blocks)
        self.context_length = context_length
        self.max_running = max_running
        self.weight_version = weight_version
        self.paused: PauseMode | None = None
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.generated = 0
        self.prefilled = 0
        self.reused = 0
        self.retractions = 0
        self.steps = 0
        # In float64 each pass is one token of one request: its shapes, and so its bits, are the same whoever else runs.
        self._alone = decoder.dtype == torch.float64
        # Token by token the same number takes several times as long, and everyone waits for it.
        self.prefill_tokens = max(1, prefill_tokens // 8) if self._alone else prefill_tokens
        self._free_rows = list(range(max_running - 1, -1, -1))
        blocks = -(-context_length // BLOCK_SIZE)
        self._tables = np.zeros((max_running, blocks), dtype=np.int64)
        self._temperatures = np.zeros(max_running, dtype=np.float64)

    def __repr__(self) -> str:
        state = f"paused {self.paused}" if self.paused else "ready" if self.ready else "released"
        return (
            f"<Batcher {state} version {self.weight_version}: "
            f"{len(self.running)} running, {len(self.waiting)} waiting, {self.pool!r}>"
        )

    @property
    def ready(self) -> bool:
        """Whether a request that comes now would be served: not paused, weights loaded, KV pool there."""
        return self.paused is None and self.decoder.has_weights and self.decoder.has_kv

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do."""
        return self.ready and bool(self.running or self.waiting)

    # Requests

    def submit(self, request: Request) -> None:
        """Queue a request. Raises RequestRefused if it could never be served or its rid is in use."""
        total = request.prompt_tokens + request.max_new_tokens
        limit = min(self.context_length, self.pool.num_blocks * BLOCK_SIZE)
        if not request.tokens:
            raise RequestRefused("input_ids is empty")
        if total > limit:
            raise RequestRefused(
                f"Requested token count exceeds the model's maximum context length of {limit} tokens: "
                f"{request.prompt_tokens} input + {request.max_new_tokens} new = {total}"
            )
        vocabulary = self.decoder.config.vocab_size
        if min(request.tokens) < 0 or max(request.tokens) >= vocabulary:
            raise RequestRefused(f"input_ids has ids outside 0 .. {vocabulary - 1}")
        if any(other.rid == request.rid for other in (*self.running, *self.waiting)):
            raise RequestRefused(f"rid {request.rid!r} is in use by a request that has not finished")
        self.waiting.append(request)

    def abort(self, rid: str = "", *, exact: bool = False, everything: bool = False) -> list[Request]:
        """End requests whose rid begins with `rid` (SGLang's rule), is `rid` (`exact`), or all of them.

        They keep what they have sampled. An empty prefix matches none.
        """
        chosen = [
            request
            for request in (*self.running, *self.waiting)
            if everything or (request.rid == rid if exact else bool(rid) and request.rid.startswith(rid))
        ]
        for request in chosen:
            self._end(request, Finish(type="abort", message="Abort before finishing"))
        return chosen

    def step(self) -> list[Request]:
        """Admit, prefill up to the budget, then sample one token for every request that is ready; the finished ones."""
        if not self.busy:
            return []
        self.steps += 1
        self._admit()
        finished = self._prefill()
        self._make_room()
        rows = [request for request in self.running if request.pending == 1]
        groups = [[request] for request in rows] if self._alone else [rows] if rows else []
        for group in groups:
            finished += self._decode(group)
        return finished

    # Control: between steps only

    def pause(self, mode: PauseMode) -> list[Request]:
        """Stop stepping. `abort` ends everything; `retract` gives up KV and queues again; `in_place` keeps KV."""
        ended = self.abort(everything=True) if mode == "abort" else []
        if mode == "retract":
            self._retract_all(publish=True)
        self.paused = mode
        return ended

    def resume(self) -> None:
        """Go on after `pause`."""
        self.paused = None

    def flush(self) -> None:
        """Empty the prefix cache. Raises RequestRefused while there are requests."""
        if self.running or self.waiting:
            raise RequestRefused(
                f"the cache cannot be flushed with {len(self.running)} running and {len(self.waiting)} waiting requests"
            )
        self.pool.flush()

    def set_weights(self, flat: Tensor, version: str) -> int:
        """Swap all weights for the flat float32 buffer; returns how many running requests were retracted for it.

        Their KV and the prefix cache belong to the old weights and are dropped. Raises EngineError, and changes
        nothing, if the buffer does not fit or the weights are released.
        """
        retracted = len(self.running)
        self.decoder.set_weights(flat)
        self._retract_all(publish=False)
        for request in self.waiting:
            request.close_span(self.weight_version)
        self.pool.flush()
        self.weight_version = version
        return retracted

    def release_memory(self, tags: list[str]) -> None:
        """Free the tensors of `tags` (`weights`, `kv_cache`). Raises RequestRefused while requests run unpaused.

        Released weights are gone: after `resume_memory` requests wait until new ones are set.
        """
        self._check_tags(tags)
        if self.paused is None and (self.running or self.waiting):
            raise RequestRefused(
                f"memory cannot be released with {len(self.running)} running and {len(self.waiting)} waiting requests; "
                "pause generation first"
            )
        if "kv_cache" in tags:
            self._retract_all(publish=False)
            self.pool.flush()
            self.decoder.drop_kv()
        if "weights" in tags:
            self.decoder.drop_weights()

    def resume_memory(self, tags: list[str]) -> None:
        """Allocate the tensors of `tags` again. Raises RequestRefused for a tag that is not released."""
        self._check_tags(tags)
        for tag, size in (("kv_cache", self.decoder.kv_bytes), ("weights", self.decoder.weight_bytes)):
            if tag in tags and size:
                raise RequestRefused(f"{tag} is not released")
        if "kv_cache" in tags:
            self.decoder.allocate_kv()
        if "weights" in tags:
            self.decoder.allocate_weights()

    @staticmethod
    def _check_tags(tags: list[str]) -> None:
        unknown = sorted(set(tags) - set(MEMORY_TAGS))
        if unknown:
            raise RequestRefused(f"unknown memory tags {unknown}: this engine has {list(MEMORY_TAGS)}")

    # The parts of a step

    def _admit(self) -> None:
        while self.waiting and self._free_rows:
            request = self.waiting[0]
            lease = self.pool.acquire(request.tokens)
            if not self.pool.reserve(lease, len(request.tokens) + 1):
                self.pool.release(lease)
                return
            self.waiting.popleft()
            request.lease = lease
            request.row = self._free_rows.pop()
            request.computed = lease.cached_tokens
            if request.cached_tokens is None:
                request.cached_tokens = lease.cached_tokens
            self.reused += lease.cached_tokens
            self._temperatures[request.row] = request.temperature
            self._write_table(request)
            self.running.append(request)

    def _prefill(self) -> list[Request]:
        """Compute pending tokens, oldest request first; those that become complete sample their next token here."""
        budget = self.prefill_tokens
        finished: list[Request] = []
        for request in list(self.running):
            if request.pending <= 1:
                continue
            if not budget:
                break
            target = request.computed + min(budget, request.pending)
            budget -= target - request.computed
            self.prefilled += target - request.computed
            size = 1 if self._alone else target - request.computed
            while request.computed < target:
                logits = self._run([request], size)
                request.computed += size
            if request.pending:
                break
            if self.pool.publish(request.lease, request.tokens):
                self._write_table(request)
            finished += self._take([request], logits)
        return finished

    def _make_room(self) -> None:
        """Blocks for the next token of everyone who decodes; the youngest make way until the others fit."""
        for request in list(self.running):
            if request.row < 0 or request.pending != 1 or request.lease.capacity >= len(request.tokens):
                continue
            while not self.pool.reserve(request.lease, len(request.tokens)):
                youngest = self.running[-1]
                self._retract(youngest, publish=True)
                if youngest is request:
                    break
            else:
                self._write_table(request)

    def _decode(self, group: list[Request]) -> list[Request]:
        logits = self._run(group, 1)
        for request in group:
            request.computed += 1
        return self._take(group, logits)

    def _run(self, group: list[Request], length: int) -> Tensor:
        starts = [request.computed for request in group]
        ids = torch.tensor(
            [request.tokens[start : start + length] for request, start in zip(group, starts, strict=True)]
        )
        blocks = (max(starts) + length - 1) // BLOCK_SIZE + 1
        tables = torch.from_numpy(self._tables[[request.row for request in group], :blocks])
        return self.decoder.run(ids, torch.tensor(starts), tables)

    def _take(self, group: list[Request], logits: Tensor) -> list[Request]:
        """Sample one token for each request; the finished ones."""
        temperatures = torch.from_numpy(self._temperatures[[request.row for request in group]])
        draws = torch.tensor([request.draws[request.sampled] for request in group], dtype=torch.float64)
        ids, logprobs = sample(logits, temperatures, draws)
        finished = []
        for request, token, logprob in zip(group, ids, logprobs, strict=True):
            # Also false for NaN: weights that diverged must not look like an answer.
            if not logprob > float("-inf"):
                message = f"logits of weights version {self.weight_version} are not finite"
                self._end(request, Finish(type="abort", message=message, status_code=500))
                finished.append(request)
                continue
            request.tokens.append(token)
            request.logprobs.append(logprob)
            self.generated += 1
            if token in request.stop_ids:
                self._end(request, Finish(type="stop", matched=token))
                finished.append(request)
            elif request.stop_texts and (text := request.stop_texts.matched(request.tokens, request.sampled)):
                self._end(request, Finish(type="stop", matched=text))
                finished.append(request)
            elif request.sampled == request.max_new_tokens:
                self._end(request, Finish(type="length", length=request.max_new_tokens))
                finished.append(request)
        return finished

    # Leaving the batch

    def _end(self, request: Request, finish: Finish) -> None:
        request.close_span(self.weight_version)
        request.weight_version = self.weight_version
        request.finish = finish
        if request.row >= 0:
            self._leave(request, publish=True)
        else:
            self.waiting.remove(request)

    def _retract(self, request: Request, *, publish: bool) -> None:
        """Back to the head of the queue; what was sampled stays, keys and values are computed again."""
        request.retractions += 1
        self.retractions += 1
        self._leave(request, publish=publish)
        self.waiting.appendleft(request)

    def _retract_all(self, *, publish: bool) -> None:
        # The youngest first, so that the oldest ends at the head of the queue.
        for request in reversed(list(self.running)):
            self._retract(request, publish=publish)

    def _leave(self, request: Request, *, publish: bool) -> None:
        if publish:
            self.pool.publish(request.lease, request.tokens[: request.computed])
        self.pool.release(request.lease)
        self.running.remove(request)
        self._free_rows.append(request.row)
        request.row, request.computed = -1, 0

    def _write_table(self, request: Request) -> None:
        blocks = request.lease.blocks
        self._tables[request.row, : len(blocks)] = blocks

    def check(self) -> None:
        """Raise AssertionError if a block or a row is lost or has two owners."""
        self.pool.check()
        leased = [block for request in self.running for block in request.lease.blocks[len(request.lease.path) :]]
        assert len(leased) == len(set(leased))
        assert len(leased) + self.pool.cached + self.pool.free == self.pool.num_blocks
        assert len(self.running) + len(self._free_rows) == self.max_running
