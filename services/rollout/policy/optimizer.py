"""The warm start's optimizer: Muon on matrices, AdamW on embedding and norms, in float32.

Muon (momentum, then the nearest semi-orthogonal matrix by five Newton-Schulz steps) learns to copy in half the steps
that AdamW needs. `torch.optim.Muon` runs its iteration in bfloat16, which is far too slow on a CPU, so it is here.
Matrices of one shape are stepped together as one batch.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic x -> a x + b x^3 + c x^5 whose iteration drives singular values towards one."""


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """The nearly semi-orthogonal matrices `[n, rows, columns]` with the same singular vectors."""
    a, b, c = NEWTON_SCHULZ
    x: Tensor = matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class MuonAdamW:
    """`step(rate)` updates every parameter of a Qwen3; `rate` in [0, 1] scales both learning rates."""

    def __init__(self, model: nn.Module, *, muon_lr: float, adamw_lr: float, momentum: float = 0.95) -> None:
        named = list(model.named_parameters())
        matrices = [parameter for name, parameter in named if parameter.ndim == 2 and ".layers." in name]
        rest = [parameter for name, parameter in named if not (parameter.ndim == 2 and ".layers." in name)]
        shapes = dict.fromkeys(tuple(matrix.shape) for matrix in matrices)
        self._groups = [[matrix for matrix in matrices if tuple(matrix.shape) == shape] for shape in shapes]
        self._momenta = [torch.zeros(len(group), *group[0].shape) for group in self._groups]
        self._momentum = momentum
        self._muon_lr, self._adamw_lr = muon_lr, adamw_lr
        self._adamw = torch.optim.AdamW(rest, lr=adamw_lr, betas=(0.9, 0.95), weight_decay=0.0)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One update from the parameters' gradients, which are cleared."""
        for group, momenta in zip(self._groups, self._momenta, strict=True):
            gradients = torch.stack(_gradients(group))
            momenta.mul_(self._momentum).add_(gradients)
            updates = orthogonalise(gradients + self._momentum * momenta)
            rows, columns = updates.shape[-2:]
            scale = rate * self._muon_lr * max(1.0, rows / columns) ** 0.5
            for matrix, update in zip(group, updates, strict=True):
                matrix.sub_(update, alpha=scale)
                matrix.grad = None
        for settings in self._adamw.param_groups:
            settings["lr"] = rate * self._adamw_lr
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
