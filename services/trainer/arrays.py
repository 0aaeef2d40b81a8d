"""A micro-step as tensors: what the model and the objective read.

`tensors_of` validates first, so whoever holds a `PackedRows` may rely on the invariants of `schemas.micro_steps`.
Values that only select or count (targets, executions) are gathered to the T target tokens once, here. Tensors are on
the CPU; `to` moves them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from schemas.micro_steps import DTYPES, MicroStep, validate


@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """S tokens in R rows of E executions, T of them targets, in packed order."""

    micro_step: str
    executions: tuple[str, ...]
    tokens: Tensor
    """int64 [S]."""
    positions: Tensor
    """int64 [S]: place of each token in its row."""
    cu_seqlens: Tensor
    """int32 [R+1]."""
    row_lengths: tuple[int, ...]
    """R lengths, the same as `cu_seqlens` says, where Python needs them without a device synchronisation."""
    target_positions: Tensor
    """int64 [T]: u, the packed position of each target; it is predicted from u-1."""
    behaviour_logprob: Tensor
    """float32 [T]."""
    temperature: Tensor
    """float32 [T]."""
    token_version: Tensor
    """int32 [T]."""
    target_execution: Tensor
    """int64 [T]: execution of each target."""
    advantages: Tensor
    """float32 [E]."""
    target_counts: Tensor
    """int64 [E]: L_i."""

    @property
    def size(self) -> int:
        """S."""
        return int(self.tokens.numel())

    def to(self, device: torch.device) -> PackedRows:
        """The same rows on `device`."""
        moved = {
            field.name: getattr(self, field.name).to(device, non_blocking=True)
            for field in fields(self)
            if isinstance(getattr(self, field.name), Tensor)
        }
        return replace(self, **moved)


def array_of(micro_step: MicroStep, field: str) -> np.ndarray:
    """One field of `DTYPES` as a read-only numpy array in little-endian order, without a copy."""
    return np.frombuffer(getattr(micro_step, field), dtype=DTYPES[field])


def tensors_of(micro_step: MicroStep, *, vocab_size: int | None = None) -> PackedRows:
    """Validated tensors of one micro-step. Raises TrainerError where `schemas.micro_steps.validate` does."""
    validate(micro_step, vocab_size=vocab_size)
    cu_seqlens = array_of(micro_step, "cu_seqlens").astype(np.int64)
    lengths = np.diff(cu_seqlens)
    size = int(cu_seqlens[-1])
    targets = np.flatnonzero(array_of(micro_step, "targets"))
    token_execution = np.repeat(array_of(micro_step, "row_execution").astype(np.int64), lengths)
    return PackedRows(
        micro_step=micro_step.micro_step,
        executions=micro_step.executions,
        tokens=torch.from_numpy(array_of(micro_step, "tokens").astype(np.int64)),
        positions=torch.from_numpy(np.arange(size) - np.repeat(cu_seqlens[:-1], lengths)),
        cu_seqlens=torch.from_numpy(cu_seqlens.astype(np.int32)),
        row_lengths=tuple(lengths.tolist()),
        target_positions=torch.from_numpy(targets),
        behaviour_logprob=torch.from_numpy(array_of(micro_step, "behaviour_logprob").astype(np.float32)[targets]),
        temperature=torch.from_numpy(array_of(micro_step, "temperature").astype(np.float32)[targets]),
        token_version=torch.from_numpy(array_of(micro_step, "token_version").astype(np.int32)[targets]),
        target_execution=torch.from_numpy(token_execution[targets]),
        advantages=torch.tensor(micro_step.advantages, dtype=torch.float32),
        target_counts=torch.tensor(micro_step.target_counts, dtype=torch.int64),
    )
