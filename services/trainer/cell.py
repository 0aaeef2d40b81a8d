"""One rank of a training cell: takes micro-steps, makes one update a batch, gives its memory away between roles.

    released <--release()/acquire()--> idle --begin_batch()--> batch --micro_step()*--> batch --step()--> idle
                                                                 ^----- rollback() ----'
    The batch of a satellite ends with drop_batch(): only the core steps.

Invariants:

- exactly one optimizer step a batch, on the sum of its micro-steps' gradients; the loss (6) carries all divisors, so
  nothing depends on how many micro-steps there are or on their order;
- weights change in `step`, `load_flat` and `load` only;
- a micro-step that fails leaves the batch spoiled: `step` refuses until `rollback`;
- a released cell keeps its parameters, process and torch world, and refuses to train.

All synchronous, for one thread. In a cell of several ranks every rank makes the same calls.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from schemas.config import Trainer as TrainerConfig
from schemas.errors import TrainerError
from schemas.micro_steps import MicroStep
from services.mesh.weights.layout import read_config
from services.trainer import checkpoint
from services.trainer.arrays import PackedRows, tensors_of
from services.trainer.cpu_shim import megatron_device
from services.trainer.mcore import finalize_model_grads, parallel_state
from services.trainer.megatron import build_cell_model, run_micro_step, sharded_target_logprobs
from services.trainer.objective import (
    ObjectiveStats,
    ObjectiveTerms,
    execution_objective,
    target_entropy,
    target_logprobs,
)
from services.trainer.training_memory import TrainingMemory
from services.trainer.training_state import Manifest, flaw, load_state, save_state


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step."""

    version: int
    """Policy version after it."""
    loss: float
    """Of the batch: the sum of its micro-steps' shares of (6)."""
    grad_norm: float
    """L2 norm before clipping."""
    lr: float
    micro_steps: int
    seconds: float
    """Of the step alone, without the micro-steps."""


class Cell:
    """The computing half of a trainer process. Needs `megatron.open_world` before.

    Example: `cell.begin_batch()`, `cell.micro_step(m)` for each claimed `m`, `cell.step().loss`.
    """

    def __init__(
        self,
        policy: str | Path,
        settings: TrainerConfig,
        terms: ObjectiveTerms,
        *,
        version: int = 0,
        scratch: str | Path | None = None,
    ) -> None:
        """Loads the Hugging Face style checkpoint `policy` as `version`; holds training memory from the start.

        `scratch` is where optimizer state waits on disk while the cell is released, if it has to.
        Raises ConfigError or TrainerError where the policy can't be used.
        """
        torch.set_num_threads(settings.threads)
        self.version = version
        self.terms = terms
        self._model = build_cell_model(read_config(policy), settings)
        with torch.no_grad():
            checkpoint.load_policy(self._model, policy)
        self._memory = TrainingMemory(self._model, scratch=scratch)
        self._open = False
        self._spoiled = False
        self._losses: list[float] = []

    def __repr__(self) -> str:
        return (
            f"<Cell {self.phase} version={self.version} micro_steps={len(self._losses)} held={self._memory.held_bytes}>"
        )

    @property
    def phase(self) -> Literal["released", "idle", "batch"]:
        """Where the cell is in its life; see the module."""
        if self._memory.released:
            return "released"
        return "batch" if self._open else "idle"

    @property
    def held_bytes(self) -> int:
        """Bytes of gradient buffers and optimizer state."""
        return self._memory.held_bytes

    def release(self) -> None:
        """Frees training memory. Refused inside a batch, whose gradients would be lost unseen."""
        self._demand("idle", "released", doing="release training memory")
        self._memory.release()

    def acquire(self) -> None:
        """Takes training memory again."""
        self._memory.acquire()

    def begin_batch(self) -> None:
        """Opens a batch with empty gradients."""
        self._demand("idle", doing="begin a batch")
        self._clear()
        self._open = True

    def micro_step(self, micro_step: MicroStep, *, entropy: bool = False) -> ObjectiveStats:
        """Forward and backward over one micro-step; its gradient is added to the batch's.

        Raises TrainerError where the arrays are inconsistent (nothing has happened then), or the loss is not finite
        (the batch is spoiled then). `entropy` costs a softmax more and needs the whole vocabulary on this rank.
        """
        self._demand("batch", doing="train a micro-step")
        rows = tensors_of(micro_step, vocab_size=self._model.config.vocab_size)
        was_spoiled, self._spoiled = self._spoiled, True
        result = run_micro_step(self._model, rows, lambda logits: self._loss(logits, rows, entropy))
        stats = _from_last_stage(result)
        self._spoiled = was_spoiled
        self._losses.append(stats.loss)
        return stats

    def rollback(self) -> None:
        """Drops all gradients of the open batch; it stays open and its micro-steps may be trained again."""
        self._demand("batch", doing="roll back")
        self._clear()

    def gradients(self) -> list[Tensor]:
        """A copy of the batch's gradient so far, float32 on the CPU, one flat tensor for each of Megatron's buffers."""
        self._demand("batch", doing="copy its gradients")
        self._demand_whole()
        return [buffer.grad_data.to("cpu", copy=True) for buffer in self._buffers]

    def set_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Takes the sum of several cells' `gradients` for the batch's gradient."""
        self._demand("batch", doing="take gradients")
        for buffer, gradient in zip(self._buffers, gradients, strict=True):
            buffer.grad_data.copy_(gradient)

    def drop_batch(self) -> None:
        """Closes the batch without an update: its gradients were given away or count no more."""
        self._demand("batch", doing="drop the batch")
        self._clear()
        self._open = False

    def step(self) -> StepResult:
        """Clips the batch's gradient, makes the optimizer step, closes the batch and raises the version by one.

        Raises TrainerError where the gradient is spoiled or not finite; weights are unchanged and the batch is open
        then.
        """
        self._demand("batch", doing="step")
        self._demand_whole()
        started = time.perf_counter()
        optimizer = self._model.optimizer
        with megatron_device():
            finalize_model_grads([self._model.chunk])
            optimizer.prepare_grads()
            grad_norm = float(optimizer.get_grad_norm())
            if not math.isfinite(grad_norm):
                self._spoiled = True
                optimizer.zero_grad()
                raise TrainerError(
                    f"the gradient norm is {grad_norm}", where="cell", remedy="roll back; look at the last micro-steps"
                )
            optimizer.step()
        result = StepResult(
            version=self.version + 1,
            loss=math.fsum(self._losses),
            grad_norm=grad_norm,
            lr=float(optimizer.param_groups[0]["lr"]),
            micro_steps=len(self._losses),
            seconds=time.perf_counter() - started,
        )
        self._clear()
        self._open = False
        self.version = result.version
        return result

    def flat_weights(self, out: np.ndarray | None = None) -> np.ndarray:
        """The policy as the float32 buffer of `services.mesh.weights.layout`, in `out` (registered memory) if given."""
        return checkpoint.flat_weights(self._model, out)

    def load_flat(self, flat: np.ndarray, *, version: int) -> None:
        """Takes weights that another cell exposed. Optimizer state is left as it is: a satellite has no use for it."""
        self._demand("idle", "released", doing="take weights")
        with torch.no_grad():
            checkpoint.load_flat(self._model, flat)
        self.version = version

    def save(self, folder: str | Path) -> Manifest:
        """Writes parameters, optimizer state and version to `folder`, durably; `.digest` of the result names the
        content."""
        self._demand("idle", doing="save a checkpoint")
        return save_state(self._model, folder, version=self.version)

    def load(self, folder: str | Path) -> Manifest:
        """Restores what `save` wrote, version included."""
        self._demand("idle", doing="load a checkpoint")
        manifest = load_state(self._model, folder)
        self.version = manifest.version
        return manifest

    def flaw(self, folder: str | Path, digest: str) -> str:
        """Why `folder` doesn't hold, whole, what was saved with this digest; empty when it does."""
        return flaw(folder, digest)

    def discard(self, folder: str | Path) -> None:
        """Removes what `save` wrote, if it is still there."""
        if Path(folder).exists():
            shutil.rmtree(folder)

    def save_policy(self, folder: str | Path) -> None:
        """Writes the policy as a Hugging Face style checkpoint (`config.json`, `model.safetensors`)."""
        flat = self.flat_weights()
        if dist.get_rank() == 0:
            checkpoint.save_policy(self._model.config, flat, folder)

    def close(self) -> None:
        """Drops the gradients and the file in which optimizer state may wait."""
        self._memory.close()

    def _loss(self, logits: Tensor, rows: PackedRows, entropy: bool) -> tuple[Tensor, dict[str, Any]]:
        sharded = parallel_state.get_tensor_model_parallel_world_size() > 1
        loss, stats = execution_objective(
            (sharded_target_logprobs if sharded else target_logprobs)(logits, rows),
            rows,
            self.terms,
            version=self.version,
            entropy_sum=target_entropy(logits, rows) if entropy and not sharded else None,
        )
        if not math.isfinite(stats.loss):
            raise TrainerError(
                f"the loss is {stats.loss}",
                where=f"micro-step {rows.micro_step}",
                remedy="roll back; look at its behaviour_logprob and at the weights",
            )
        return loss, {"stats": stats}

    def _clear(self) -> None:
        # The optimizer's .grad are views of the gradient buffers: the next backward would count them twice.
        self._model.optimizer.zero_grad()
        self._model.chunk.zero_grad_buffer()
        self._losses.clear()
        self._spoiled = False

    @property
    def _buffers(self) -> list[Any]:
        return [*self._model.chunk.buffers, *self._model.chunk.expert_parallel_buffers]

    def _demand_whole(self) -> None:
        if self._spoiled:
            raise TrainerError(
                "a micro-step of this batch failed half-way", where="cell", remedy="roll back and train the batch again"
            )

    def _demand(self, *phases: str, doing: str) -> None:
        if self.phase not in phases:
            remedies = {
                "released": "acquire() first",
                "idle": "begin_batch() first",
                "batch": "step() or finish the open batch first",
            }
            raise TrainerError(f"a cell that is {self.phase} can't {doing}", where="cell", remedy=remedies[self.phase])


def _from_last_stage(result: dict[str, Any] | None) -> ObjectiveStats:
    """Statistics as the last pipeline stage computed them, on every stage."""
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() == 1:
        assert result is not None
        stats: ObjectiveStats = result["stats"]
        return stats
    held = [result and result["stats"]]
    dist.broadcast_object_list(held, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
    received = held[0]
    assert isinstance(received, ObjectiveStats)
    return received
