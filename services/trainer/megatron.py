"""A Qwen3 policy as a Megatron-Core model: the torch world of one cell, the model, its optimizer, one micro-step.

One cell is one torch world of `tensor * pipeline` ranks and nothing else lives in it, so that Megatron sees a
data-parallel size of one and every collective of its own stays inside the cell. Invariants:

- parameters, gradients and optimizer state are float32;
- a micro-step adds its gradient to the gradient buffers and changes nothing else;
- all traffic between ranks is on the loopback interface unless `GLOO_SOCKET_IFNAME` says otherwise.

Without an accelerator the backend is gloo, and every call into Megatron is made inside `megatron_device`.
"""

from __future__ import annotations

import datetime
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import silu

from schemas.config import Trainer as TrainerConfig
from schemas.errors import TrainerError
from services.mesh.weights.layout import Qwen3Config
from services.trainer.arrays import PackedRows
from services.trainer.cpu_shim import has_accelerator, megatron_device
from services.trainer.mcore import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    GPTModel,
    MegatronOptimizer,
    OptimizerConfig,
    TransformerConfig,
    get_forward_backward_func,
    get_megatron_optimizer,
    parallel_state,
    vocab_parallel_cross_entropy,
)
from services.trainer.packed_attention import RowBounds, layer_spec

LossOf = Callable[[Tensor], tuple[Tensor, dict[str, Any]]]
"""Logits `[S, V / tensor]` to (loss, what to return); called on the last pipeline stage."""


class CellRanks(msgspec.Struct, frozen=True, kw_only=True):
    """This process's place in its cell."""

    rank: int = 0
    tensor: int = 1
    """Tensor-parallel size."""
    pipeline: int = 1
    """Pipeline-parallel size."""
    rendezvous: str = ""
    """`tcp://127.0.0.1:PORT` or `file:///PATH`, the same for all ranks; empty only for a cell of one rank."""

    @property
    def size(self) -> int:
        """Ranks of the cell."""
        return self.tensor * self.pipeline


@dataclass(frozen=True, kw_only=True)
class CellModel:
    """One rank's part of the policy and of its optimizer."""

    config: Qwen3Config
    megatron_config: TransformerConfig
    chunk: DistributedDataParallel
    """The model inside the wrapper that owns the gradient buffers."""
    optimizer: MegatronOptimizer

    @property
    def module(self) -> GPTModel:
        """The model itself."""
        return self.chunk.module


def open_world(ranks: CellRanks, *, timeout_s: float = 60.0) -> None:
    """Joins the torch world of the cell and sets up Megatron's groups in it. Blocks until every rank is there.

    Raises TrainerError where this process is in a world already or the ranks don't fit together.
    """
    if dist.is_initialized():
        raise TrainerError(
            "this process is in a torch world already",
            where="trainer",
            remedy="run one cell a process, or close_world()",
        )
    if not 0 <= ranks.rank < ranks.size:
        raise TrainerError(
            f"rank {ranks.rank} of {ranks.tensor} x {ranks.pipeline} ranks", where="trainer", remedy="correct the ranks"
        )
    if ranks.size > 1 and not ranks.rendezvous:
        raise TrainerError(
            "a cell of several ranks has no rendezvous",
            where="trainer",
            remedy="give all ranks one tcp:// or file:// URL",
        )
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    timeout = datetime.timedelta(seconds=timeout_s)
    backend = "nccl" if has_accelerator() else "gloo"
    if ranks.rendezvous:
        dist.init_process_group(
            backend, init_method=ranks.rendezvous, rank=ranks.rank, world_size=ranks.size, timeout=timeout
        )
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    with megatron_device():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=ranks.tensor,
            pipeline_model_parallel_size=ranks.pipeline,
            distributed_timeout_minutes=timeout_s / 60,
        )


def close_world() -> None:
    """Leaves the torch world; models built in it can be used no more."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def build_cell_model(config: Qwen3Config, settings: TrainerConfig) -> CellModel:
    """This rank's part of the policy, with parameters that are not set yet, and its Adam optimizer.

    Needs `open_world`. Raises TrainerError where the heads, the vocabulary or the layers can't be divided among the
    ranks.
    """
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    pipeline = parallel_state.get_pipeline_model_parallel_world_size()
    for name, size, parts in (
        ("num_key_value_heads", config.num_key_value_heads, tensor),
        ("vocab_size", config.vocab_size, tensor),
        ("intermediate_size", config.intermediate_size, tensor),
        ("num_hidden_layers", config.num_hidden_layers, pipeline),
    ):
        if size % parts:
            raise TrainerError(
                f"{name} = {size} can't be divided among {parts} ranks",
                where="trainer",
                remedy="take a tensor- or pipeline-parallel size that divides it",
            )
    with megatron_device() as device:
        megatron_config = _transformer_config(config, tensor=tensor, pipeline=pipeline)
        module = GPTModel(
            config=megatron_config,
            transformer_layer_spec=layer_spec(),
            vocab_size=config.vocab_size,
            max_sequence_length=config.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=config.tie_word_embeddings,
            position_embedding_type="rope",
            rotary_base=config.rope_theta,
        ).to(device)
        chunk = DistributedDataParallel(
            megatron_config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), module
        )
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=settings.lr,
                adam_beta1=settings.betas[0],
                adam_beta2=settings.betas[1],
                weight_decay=settings.weight_decay,
                clip_grad=settings.grad_clip,
                params_dtype=torch.float32,
            ),
            [chunk],
        )
    # Megatron leaves it to a learning rate scheduler, which a constant rate has no use for, to spare norms the decay.
    for group in optimizer.param_groups:
        group["weight_decay"] = settings.weight_decay * group["wd_mult"]
    return CellModel(config=config, megatron_config=megatron_config, chunk=chunk, optimizer=optimizer)


def run_micro_step(
    model: CellModel, rows: PackedRows, loss_of: LossOf, *, backward: bool = True
) -> dict[str, Any] | None:
    """Forward and, unless told otherwise, backward over one packed micro-step; every rank of the cell makes the same
    calls.

    The gradient of `loss_of`'s loss is added to the gradient buffers. Returns what `loss_of` returned beside the loss,
    or None on a pipeline stage that isn't the last. One call is one warm-up and one drain of the pipeline.
    """

    def forward_step(micro_steps: Any, chunk: Any) -> tuple[Tensor, LossOf]:
        packed: PackedRows = next(micro_steps)
        output = chunk(
            packed.tokens[None],
            packed.positions[None],
            None,
            packed_seq_params=RowBounds(packed.cu_seqlens, packed.row_lengths),
        )
        return output, lambda logits: loss_of(logits.squeeze(0))

    with megatron_device() as device:
        results = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter([rows.to(device)]),
            model=[model.chunk],
            num_microbatches=1,
            seq_length=rows.size,
            micro_batch_size=1,
            forward_only=not backward,
        )
    return results[0] if results else None


def sharded_target_logprobs(logits: Tensor, rows: PackedRows) -> Tensor:
    """`objective.target_logprobs` where each rank of the tensor-parallel group holds `logits [S, V / tensor]`."""
    predicting = logits[rows.target_positions - 1].float() / rows.temperature[:, None]
    losses: Tensor = vocab_parallel_cross_entropy(predicting, rows.tokens[rows.target_positions])
    return -losses


def _transformer_config(config: Qwen3Config, *, tensor: int, pipeline: int) -> TransformerConfig:
    return TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=config.head_dim,
        layernorm_epsilon=config.rms_norm_eps,
        normalization="RMSNorm",
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        # Weights come from a checkpoint always.
        perform_initialization=False,
        use_cpu_initialization=not has_accelerator(),
        # Fused kernels exist for CUDA only; unfused is the same arithmetic.
        gradient_accumulation_fusion=False,
        bias_activation_fusion=has_accelerator(),
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        cuda_graph_scope=[],
    )


logging.getLogger("megatron.core").setLevel(logging.WARNING)
