"""Megatron-Core where there is no accelerator.

Megatron-Core names CUDA in places that are no choice of the caller's. Everything it computes there works on a CPU as
well; only the names are in the way. `megatron_device` maps them to the CPU for as long as it is entered, and
`megatron_import` spares an import that has no use without a GPU. Invariants:

- with an accelerator both do nothing to torch: real CUDA is never touched;
- without one, torch is as before when the outermost `megatron_device` is left; `torch.cuda.is_available()` stays False;
- what is entered is said once, in the log.

Each piece and what needs it in megatron-core 0.16:

| piece | because |
| --- | --- |
| `torch.cuda.current_device` | DDP gradient buffers and the rotary table are allocated on `torch.cuda.current_device()` |
| `device="cuda"` to CPU | scalars of the schedules, of the FP32 optimizer and of gradient norms |
| `Tensor.cuda` | the copy of a tied embedding on the last pipeline stage |
| `Tensor.type` says `torch.cuda...` | gradient clipping and the distributed optimizer assert the name of the type |
| `torch.cuda.synchronize`, `empty_cache` | freeing and restoring gradient buffers, pipeline communication |

The mode is one of this thread, so other threads of the process see plain torch factory functions.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_log = logging.getLogger(__name__)
_said: list[str] = []


def has_accelerator() -> bool:
    """Whether Megatron runs on CUDA in this process."""
    return torch.cuda.is_available()


@contextlib.contextmanager
def megatron_import() -> Iterator[None]:
    """Around the first import of Megatron: its notices of optional libraries are dropped, and without an accelerator
    its `torch.compile` decorators are skipped, which would load the compiler (seconds, 70 MB) and then run nothing
    faster."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if not has_accelerator():
            stack.enter_context(mock.patch.object(torch, "compile", _uncompiled))
        yield


@contextlib.contextmanager
def megatron_device() -> Iterator[torch.device]:
    """The device that Megatron's code runs on while this is entered; may be entered inside itself.

    Megatron warns of defaults of its own that it means to change; those warnings are dropped.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", module=r"megatron\.")
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
        if has_accelerator():
            yield torch.device("cuda", torch.cuda.current_device())
            return
        if not _said:
            _said.append("no accelerator: Megatron-Core's CUDA calls run on the CPU")
            _log.info(_said[0])
        for name, stand_in in _STAND_INS.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        stack.enter_context(mock.patch.object(torch.Tensor, "cuda", _same_tensor))
        stack.enter_context(_CudaNamesOnCpu())
        yield _CPU


class _CudaNamesOnCpu(TorchFunctionMode):
    """Rewrites `device=` arguments that name CUDA, and lets a CPU tensor's type pass for a CUDA one."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs = {**kwargs, "device": _CPU}
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1).replace("cuda.cuda.", "cuda.")
        return func(*args, **kwargs)


def _uncompiled(model: Any = None, **_options: Any) -> Any:
    """Stands in for `torch.compile`, as a decorator with or without options."""
    return model if model is not None else lambda function: function


def _same_tensor(tensor: torch.Tensor, *_arguments: Any, **_options: Any) -> torch.Tensor:
    return tensor


_STAND_INS: dict[str, Callable[..., Any]] = {
    "current_device": lambda: _CPU,
    "synchronize": lambda *_arguments: None,
    "empty_cache": lambda: None,
}
