"""What the proxy recorded, beside a fresh scoring of the same ids.

A record's tokens are scored under the weights of their version: by our own forward pass in float64, and, while an engine
holds that version, by the engine itself, which computes the whole sequence anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
import torch

from schemas.records import CallRecord, RecordEntry, VersionSpan
from services.rollout.reference.model import load
from tests.sglang.server import Server


class Sequence(msgspec.Struct, frozen=True):
    """One call with its whole prompt."""

    prompt: list[int]
    record: CallRecord

    def span(self, version: int) -> VersionSpan:
        (span,) = (span for span in self.record.versions if span.version == version)
        return span


class Gap(msgspec.Struct, frozen=True):
    """How far recorded and scored log-probabilities are apart."""

    tokens: int = 0
    largest: float = 0.0
    total: float = 0.0

    @property
    def mean(self) -> float:
        return self.total / self.tokens

    def __add__(self, other: Gap) -> Gap:
        return Gap(self.tokens + other.tokens, max(self.largest, other.largest), self.total + other.total)


def sequences(entries: Iterable[RecordEntry]) -> list[Sequence]:
    """All calls in order, each with the ids of its path."""
    ids: dict[str | None, list[int]] = {None: []}
    found = []
    for record in entries:
        if isinstance(record, CallRecord):
            prompt = ids[record.parent] + record.input_ids
            ids[record.call] = prompt + record.output_ids
            found.append(Sequence(prompt, record))
    return found


def gap(sequence: Sequence, span: VersionSpan, scored: list[float]) -> Gap:
    """Of one span; `scored` is the log-probability of each of its tokens."""
    recorded = sequence.record.logprobs[span.start : span.end]
    apart = [abs(ours - theirs) for ours, theirs in zip(recorded, scored, strict=True)]
    return Gap(len(apart), max(apart), sum(apart))


def by_model(found: Iterable[Sequence], policies: Mapping[int, Path]) -> Gap:
    """All tokens of all sequences, at the temperature of each record. `policies` has the folder of every version."""
    models = {version: load(folder, torch.float64) for version, folder in policies.items()}
    total = Gap()
    for sequence in found:
        record = sequence.record
        ids, output = torch.tensor([sequence.prompt + record.output_ids]), torch.tensor(record.output_ids)
        for span in record.versions:
            with torch.inference_mode():
                logits = models[span.version](ids)[0, len(sequence.prompt) - 1 : -1] / record.temperature
            scored = logits.log_softmax(-1).gather(1, output[:, None]).squeeze(1).tolist()
            total += gap(sequence, span, scored[span.start : span.end])
    return total


def by_engine(found: Iterable[Sequence], server: Server) -> Gap:
    """The tokens of the version that the server holds. It scores at temperature 1, whatever was sampled at."""
    version = int(server.get("/model_info")["weight_version"])
    total = Gap()
    for sequence in found:
        assert sequence.record.temperature == 1.0
        ids = sequence.prompt + sequence.record.output_ids
        body = {"input_ids": ids, "return_logprob": True, "logprob_start_len": 0}
        answer = server.post("/generate", {**body, "sampling_params": {"max_new_tokens": 0}})
        pairs = answer["meta_info"]["input_token_logprobs"]
        # It says 0 for the last id of a vocabulary; what it scores is that id.
        assert len(pairs) == len(ids) and all(pair[1] in (0, token) for pair, token in zip(pairs, ids, strict=True))
        scored = [pair[0] for pair in pairs[len(sequence.prompt) :]]
        for span in sequence.record.versions:
            if span.version == version:
                total += gap(sequence, span, scored[span.start : span.end])
    return total
