"""The arrays of one micro-step: packed rows of tokens with everything that the objective (5), (6) needs.

A micro-step is a run of `S` tokens cut into `R` rows by `cu_seqlens`; each row is one trajectory of one of its `E`
executions. Arrays travel as little-endian bytes of the dtypes in `DTYPES`, so that this module needs no numpy.
Invariants, checked by `validate`:

- array lengths agree; `cu_seqlens` rises strictly from 0 to S;
- a target (`targets[u] == 1`) is predicted from position u-1 of its row, so the first token of a row is none;
- every target of an execution lies in this micro-step: `target_counts[e]` (L_i) is their number, over all its rows;
- `behaviour_logprob[u]` is the engine's own log-probability of target u under logits divided by `temperature[u]`.

At a token that is no target, `behaviour_logprob`, `temperature` and `token_version` mean nothing.
"""

from __future__ import annotations

import array
import math
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

import msgspec

from schemas.errors import TrainerError

DTYPES = {
    "cu_seqlens": "<i4",
    "tokens": "<i4",
    "targets": "|u1",
    "behaviour_logprob": "<f4",
    "temperature": "<f4",
    "token_version": "<i4",
    "row_execution": "<i4",
}
"""Field name to dtype, in numpy's spelling."""

_Number = TypeVar("_Number", int, float)
_POSITIVE_LOGPROB = 1e-3
"""Rounding may lift the log-probability of a sure token above 0, but not above this."""


class MicroStep(msgspec.Struct, frozen=True, kw_only=True):
    """One micro-step. S tokens, R rows, E executions; see the module for dtypes."""

    micro_step: str
    batch: str
    cu_seqlens: bytes
    """int32 [R+1]: row r is `tokens[cu_seqlens[r]:cu_seqlens[r+1]]`."""
    tokens: bytes
    """int32 [S]."""
    targets: bytes
    """uint8 [S]: 1 where the token is trained."""
    behaviour_logprob: bytes
    """float32 [S]: log p_roll of equation (5)."""
    temperature: bytes
    """float32 [S]: the logits that predict this token are divided by it."""
    token_version: bytes
    """int32 [S]: policy version that sampled the token."""
    row_execution: bytes
    """int32 [R]: index into `executions`."""
    executions: tuple[str, ...]
    """E execution ids."""
    advantages: tuple[float, ...]
    """A_i of each execution."""
    target_counts: tuple[int, ...]
    """L_i of each execution."""

    @property
    def token_count(self) -> int:
        """S."""
        return len(self.tokens) // 4


def encode(micro_step: MicroStep) -> bytes:
    """MessagePack bytes; `decode` restores an equal value."""
    return _encoder.encode(micro_step)


def decode(data: bytes) -> MicroStep:
    """The value that `encode` wrote. Raises TrainerError where the bytes are something else; does not `validate`."""
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise TrainerError(
            f"the micro-step cannot be decoded: {error}",
            where="micro-step",
            remedy="packer and trainer must run the same version; look at who wrote the object",
        ) from error


def validate(micro_step: MicroStep, *, vocab_size: int | None = None) -> None:
    """Raises TrainerError that names the micro-step and the field, at the first invariant that does not hold."""
    cu_seqlens = _integers(micro_step, "cu_seqlens")
    tokens = _integers(micro_step, "tokens")
    row_execution = _integers(micro_step, "row_execution")
    size, rows, executions = len(tokens), len(row_execution), len(micro_step.executions)
    _check_rows(micro_step, cu_seqlens, size, rows)
    if vocab_size is not None and size and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise _wrong(
            micro_step, "tokens", f"ids from {min(tokens)} to {max(tokens)} outside a vocabulary of {vocab_size}"
        )
    if len(set(micro_step.executions)) != executions:
        raise _wrong(micro_step, "executions", "an id occurs twice")
    if rows and not 0 <= min(row_execution) <= max(row_execution) < executions:
        raise _wrong(micro_step, "row_execution", f"an index outside the {executions} executions")
    for field, value in (("advantages", micro_step.advantages), ("target_counts", micro_step.target_counts)):
        if len(value) != executions:
            raise _wrong(micro_step, field, f"{len(value)} values for {executions} executions")
    if not all(math.isfinite(advantage) for advantage in micro_step.advantages):
        raise _wrong(micro_step, "advantages", "a value is not finite")
    for field, length in (
        ("targets", len(micro_step.targets)),
        ("behaviour_logprob", len(_floats(micro_step, "behaviour_logprob"))),
        ("temperature", len(_floats(micro_step, "temperature"))),
        ("token_version", len(_integers(micro_step, "token_version"))),
    ):
        if length != size:
            raise _wrong(micro_step, field, f"{length} values for {size} tokens")
    _check_targets(micro_step, cu_seqlens, row_execution)


def _check_rows(micro_step: MicroStep, cu_seqlens: Sequence[int], size: int, rows: int) -> None:
    if rows == 0:
        raise _wrong(micro_step, "row_execution", "there is no row")
    if len(cu_seqlens) != rows + 1:
        raise _wrong(micro_step, "cu_seqlens", f"{len(cu_seqlens)} values for {rows} rows; it takes one more than rows")
    if cu_seqlens[0] != 0 or cu_seqlens[-1] != size:
        raise _wrong(micro_step, "cu_seqlens", f"goes from {cu_seqlens[0]} to {cu_seqlens[-1]}, not from 0 to {size}")
    if any(stop <= start for start, stop in pairwise(cu_seqlens)):
        raise _wrong(micro_step, "cu_seqlens", "does not rise strictly: a row is empty")


def _check_targets(micro_step: MicroStep, cu_seqlens: Sequence[int], row_execution: Sequence[int]) -> None:
    targets = micro_step.targets
    if targets.translate(None, b"\x00\x01"):
        raise _wrong(micro_step, "targets", "a value is neither 0 nor 1")
    first = next((row for row, start in enumerate(cu_seqlens[:-1]) if targets[start]), None)
    if first is not None:
        raise _wrong(micro_step, "targets", f"the first token of row {first} is a target, and nothing predicts it")
    counts = [0] * len(micro_step.executions)
    for row, execution in enumerate(row_execution):
        counts[execution] += targets.count(1, cu_seqlens[row], cu_seqlens[row + 1])
    for execution, (found, stated) in enumerate(zip(counts, micro_step.target_counts, strict=True)):
        if found != stated:
            name = micro_step.executions[execution]
            raise _wrong(micro_step, "target_counts", f"{name} has {found} targets here and L_i = {stated}")
    logprob = _floats(micro_step, "behaviour_logprob")
    temperature = _floats(micro_step, "temperature")
    version = _integers(micro_step, "token_version")
    for token, target in enumerate(targets):
        if not target:
            continue
        if not -math.inf < logprob[token] <= _POSITIVE_LOGPROB:
            raise _wrong(micro_step, "behaviour_logprob", f"{logprob[token]} at target {token} is no log-probability")
        if not 0.0 < temperature[token] < math.inf:
            raise _wrong(micro_step, "temperature", f"{temperature[token]} at target {token} is not positive")
        if version[token] < 0:
            raise _wrong(micro_step, "token_version", f"{version[token]} at target {token} is no version")


def _integers(micro_step: MicroStep, field: str) -> array.array[int]:
    values: array.array[int] = array.array("B" if DTYPES[field] == "|u1" else "i")
    return _filled(micro_step, field, values)


def _floats(micro_step: MicroStep, field: str) -> array.array[float]:
    values: array.array[float] = array.array("f")
    return _filled(micro_step, field, values)


def _filled(micro_step: MicroStep, field: str, values: array.array[_Number]) -> array.array[_Number]:
    data: bytes = getattr(micro_step, field)
    if len(data) % values.itemsize:
        raise _wrong(micro_step, field, f"{len(data)} bytes are no whole number of {DTYPES[field]} values")
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _wrong(micro_step: MicroStep, field: str, what: str) -> TrainerError:
    return TrainerError(
        what,
        where=f"micro-step {micro_step.micro_step}, field {field}",
        remedy="the packer made it wrongly; it cannot be trained",
    )


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(MicroStep)
