"""The memory that only training needs: gradient buffers and optimizer state, down and up at a role change.

Parameters stay where they are, and so do the process, its torch world and Megatron's groups. Invariants:

- released, the buffers have no storage and Adam's moments are not on the device of the parameters;
- optimizer state comes back bit for bit; gradient buffers come back as zeros.

With an accelerator the state waits in host memory. Without one, host memory is what must be freed, so it waits in an
unlinked temporary file: it dies with the process, and a restarted cell begins from its last checkpoint.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import IO

import torch

from services.trainer.cpu_shim import has_accelerator, megatron_device
from services.trainer.megatron import CellModel


class TrainingMemory:
    """Gradient buffers and optimizer state of one rank.

    `held --release()--> released --acquire()--> held`; either call does nothing where it would change nothing.
    """

    def __init__(self, model: CellModel, *, scratch: str | Path | None = None) -> None:
        """`scratch`: folder of the temporary file, made if it is not there; by default the system's."""
        self._model = model
        self._scratch = scratch
        if scratch is not None:
            Path(scratch).mkdir(parents=True, exist_ok=True)
        self._waiting: IO[bytes] | None = None
        self.released = False

    @property
    def held_bytes(self) -> int:
        """Bytes of gradient buffers and optimizer state on the parameters' device."""
        device = next(self._model.module.parameters()).device
        adam = self._model.optimizer.optimizer.state
        held = [buffer.grad_data for buffer in self._model.chunk.buffers]
        held += [value for state in adam.values() for value in state.values() if value.device == device]
        return sum(int(tensor.untyped_storage().nbytes()) for tensor in held)

    def release(self) -> None:
        """Frees the memory. Gradients that are not stepped yet are lost."""
        if self.released:
            return
        with megatron_device():
            self._model.optimizer.zero_grad()
            if has_accelerator():
                self._model.optimizer.offload_to_cpu()
            else:
                self._spill()
            self._model.chunk.offload_grad_buffers()
        self.released = True

    def acquire(self) -> None:
        """Takes the memory again."""
        if not self.released:
            return
        with megatron_device():
            self._model.chunk.restore_grad_buffers()
            if has_accelerator():
                self._model.optimizer.restore_from_cpu()
            else:
                self._unspill()
        self.released = False

    def close(self) -> None:
        """Drops the temporary file."""
        if self._waiting is not None:
            self._waiting.close()
            self._waiting = None

    def _spill(self) -> None:
        adam = self._model.optimizer.optimizer.state
        parameters = self._model.optimizer.get_parameters()
        self._waiting = tempfile.TemporaryFile(dir=self._scratch)
        torch.save([dict(adam[parameter]) if parameter in adam else {} for parameter in parameters], self._waiting)
        adam.clear()

    def _unspill(self) -> None:
        assert self._waiting is not None
        self._waiting.seek(0)
        adam = self._model.optimizer.optimizer.state
        saved = torch.load(self._waiting, weights_only=True)
        for parameter, state in zip(self._model.optimizer.get_parameters(), saved, strict=True):
            if state:
                adam[parameter] = state
        self.close()
