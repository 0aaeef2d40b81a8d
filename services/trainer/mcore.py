"""Everything of Megatron-Core that the trainer uses, imported once and in one place.

Importing this module loads torch and Megatron (about 3 s); only the process of a training cell does.
"""

from __future__ import annotations

from services.trainer.cpu_shim import megatron_import

with megatron_import():
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt.gpt_layer_specs import (
        HAVE_TE,
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

__all__ = [
    "HAVE_TE",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "DotProductAttention",
    "GPTModel",
    "MegatronOptimizer",
    "ModuleSpec",
    "OptimizerConfig",
    "PackedSeqParams",
    "TransformerConfig",
    "dist_checkpointing",
    "finalize_model_grads",
    "get_forward_backward_func",
    "get_gpt_layer_local_spec",
    "get_gpt_layer_with_transformer_engine_spec",
    "get_megatron_optimizer",
    "get_transformer_layer_offset",
    "parallel_state",
    "vocab_parallel_cross_entropy",
]
