"""Parameters in two shapes: Megatron's, as a cell trains them, and Hugging Face's, as everything else knows them.

`correspondence` is the one table between the two; loading and exporting read it in opposite directions, so that a round
trip is exact. Megatron fuses what Hugging Face keeps apart:

- `linear_qkv` holds, for each query group in turn, its queries, its key and its value (`[groups, queries + 2,
  head_dim]`);
- `linear_fc1` holds gate then up.

and cuts tensors among the ranks of a tensor-parallel group: by rows, or by columns for the two projections back to the
hidden size. A pipeline stage holds its own layers; with a tied head the last stage holds a copy of the embedding, which
is loaded but never exported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor

from schemas.errors import TrainerError
from services.mesh.weights.layout import Qwen3Config, config_document, flat_size, layout
from services.trainer.mcore import get_transformer_layer_offset, parallel_state
from services.trainer.megatron import CellModel

TensorOf = Callable[[str], Tensor]
"""Hugging Face parameter name to its tensor."""

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


class Piece(NamedTuple):
    """A part of this rank's parameters and its place in a Hugging Face tensor.

    `tensor.view(shape).narrow(axis, start, here.shape[axis])` of the Hugging Face tensor `name` equals `here`.
    """

    name: str
    shape: tuple[int, ...]
    axis: int
    start: int
    here: Tensor
    """A view of this rank's parameter: writing to it changes the model."""
    owned: bool
    """Exported from this rank; other ranks may hold copies."""


def correspondence(model: CellModel) -> Iterator[Piece]:
    """All of this rank's parameters, each element once."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    first_layer = get_transformer_layer_offset(model.megatron_config)
    for name, parameter in model.module.named_parameters():
        here = parameter.data
        match = _LAYER.fullmatch(name)
        if match:
            prefix = f"model.layers.{int(match[1]) + first_layer}."
            yield from _layer_pieces(prefix, match[2], here, model.config, rank)
        elif name == "embedding.word_embeddings.weight":
            yield _cut("model.embed_tokens.weight", here, 0, rank)
        elif name == "output_layer.weight" and model.config.tie_word_embeddings:
            yield _cut("model.embed_tokens.weight", here, 0, rank)._replace(owned=False)
        elif name == "output_layer.weight":
            yield _cut("lm_head.weight", here, 0, rank)
        elif name == "decoder.final_layernorm.weight":
            yield _whole("model.norm.weight", here, rank)
        else:
            raise TrainerError(
                f"parameter {name} has no place in a Qwen3 checkpoint",
                where="trainer",
                remedy="use a dense Qwen3 policy",
            )


def write_parameters(model: CellModel, tensor_of: TensorOf) -> None:
    """Sets this rank's parameters from Hugging Face tensors. Raises TrainerError where one has another size."""
    shapes = {slot.name: slot.shape for slot in layout(model.config)}
    for piece in correspondence(model):
        tensor = tensor_of(piece.name)
        if tuple(tensor.shape) != shapes[piece.name]:
            raise TrainerError(
                f"{piece.name} has shape {list(tensor.shape)}, the config says {list(shapes[piece.name])}",
                where="checkpoint",
                remedy="config.json and the weights are of different models",
            )
        piece.here.copy_(tensor.reshape(piece.shape).narrow(piece.axis, piece.start, piece.here.shape[piece.axis]))


def load_flat(model: CellModel, flat: np.ndarray) -> None:
    """Sets this rank's parameters from the flat float32 buffer in which weights travel
    (`services.mesh.weights.layout`)."""
    views = _flat_views(model.config, torch.from_numpy(_checked(flat, model.config)))
    write_parameters(model, lambda name: views[name])


def flat_weights(model: CellModel, out: np.ndarray | None = None) -> np.ndarray:
    """The whole policy as the flat float32 buffer, in `out` if given; every rank of the cell calls it and gets all of
    it."""
    flat = np.zeros(flat_size(model.config), np.float32) if out is None else _checked(out, model.config)
    buffer = torch.from_numpy(flat)
    if dist.get_world_size() > 1:
        buffer.zero_()
    views = _flat_views(model.config, buffer)
    for piece in correspondence(model):
        if piece.owned:
            place = views[piece.name].view(piece.shape).narrow(piece.axis, piece.start, piece.here.shape[piece.axis])
            place.copy_(piece.here)
    if dist.get_world_size() > 1:
        # Each element has one owner and is zero elsewhere, so the sum is a gathering.
        moved = buffer.to(next(model.module.parameters()).device)
        dist.all_reduce(moved, group=parallel_state.get_model_parallel_group())
        if moved.data_ptr() != buffer.data_ptr():
            buffer.copy_(moved)
    return flat


def load_policy(model: CellModel, folder: str | Path) -> None:
    """Sets this rank's parameters from the `*.safetensors` of a Hugging Face style folder.

    Raises TrainerError where a file can't be read or a parameter is missing or of another size.
    """
    files = sorted(Path(folder).glob("*.safetensors"))
    remedy = "give the folder of a Hugging Face style Qwen3 checkpoint"
    if not files:
        raise TrainerError("there is no *.safetensors", where=str(folder), remedy=remedy)
    try:
        opened = [safe_open(path, framework="pt") for path in files]
        found = {name: file for file in opened for name in file.keys()}
        missing = [slot.name for slot in layout(model.config) if slot.name not in found]
        if missing:
            raise TrainerError(
                f"{len(missing)} parameters are missing: {missing[0]} ...", where=str(folder), remedy=remedy
            )
        write_parameters(model, lambda name: found[name].get_tensor(name))
    except (SafetensorError, OSError) as error:
        raise TrainerError(f"the weights can't be read: {error}", where=str(folder), remedy=remedy) from error


def save_policy(config: Qwen3Config, flat: np.ndarray, folder: str | Path) -> None:
    """Writes the flat buffer as a Hugging Face style checkpoint: `config.json` and `model.safetensors`, float32."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    flat = _checked(flat, config)
    tensors = {slot.name: flat[slot.offset : slot.offset + slot.size].reshape(slot.shape) for slot in layout(config)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_bytes(msgspec.json.format(msgspec.json.encode(config_document(config)), indent=2))


def _layer_pieces(prefix: str, name: str, here: Tensor, config: Qwen3Config, rank: int) -> Iterator[Piece]:
    """Pieces of one parameter of one layer. Transformer Engine keeps a norm inside the projection that follows it."""
    head, hidden = config.head_dim, config.hidden_size
    if name == "self_attention.linear_qkv.weight":
        queries = config.num_attention_heads // config.num_key_value_heads
        groups = here.view(-1, queries + 2, head, hidden)
        for part, first, count in (("q", 0, queries), ("k", queries, 1), ("v", queries + 1, 1)):
            shape = (config.num_key_value_heads, count, head, hidden)
            view = groups[:, first : first + count]
            yield Piece(f"{prefix}self_attn.{part}_proj.weight", shape, 0, rank * len(groups), view, True)
    elif name == "mlp.linear_fc1.weight":
        for part, view in zip(("gate", "up"), here.chunk(2), strict=True):
            yield _cut(f"{prefix}mlp.{part}_proj.weight", view, 0, rank)
    elif name == "self_attention.linear_proj.weight":
        yield _cut(f"{prefix}self_attn.o_proj.weight", here, 1, rank)
    elif name == "mlp.linear_fc2.weight":
        yield _cut(f"{prefix}mlp.down_proj.weight", here, 1, rank)
    elif name in _NORMS:
        yield _whole(prefix + _NORMS[name], here, rank)
    else:
        raise TrainerError(
            f"layer parameter {name} has no place in a Qwen3 checkpoint",
            where="trainer",
            remedy="use a dense Qwen3 policy",
        )


_NORMS = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
}


def _cut(name: str, here: Tensor, axis: int, rank: int) -> Piece:
    """A tensor that is cut among the tensor-parallel ranks along `axis`."""
    shape = list(here.shape)
    shape[axis] *= parallel_state.get_tensor_model_parallel_world_size()
    return Piece(name, tuple(shape), axis, rank * here.shape[axis], here, True)


def _whole(name: str, here: Tensor, rank: int) -> Piece:
    """A tensor of which every tensor-parallel rank has a copy; the first owns it."""
    return Piece(name, tuple(here.shape), 0, 0, here, rank == 0)


def _flat_views(config: Qwen3Config, flat: Tensor) -> dict[str, Tensor]:
    return {slot.name: flat[slot.offset : slot.offset + slot.size].view(slot.shape) for slot in layout(config)}


def _checked(flat: np.ndarray, config: Qwen3Config) -> np.ndarray:
    if flat.dtype != np.float32 or flat.shape != (flat_size(config),):
        raise TrainerError(
            f"a weight buffer of {flat.shape} {flat.dtype}, not ({flat_size(config)},) float32",
            where="trainer",
            remedy="both sides must derive the layout from the same config.json",
        )
    return flat
