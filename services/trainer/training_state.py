"""What a training cell must not lose: parameters and optimizer state, on disk, whole or not at all.

    FOLDER/manifest.json      version, ranks, layout fingerprint, digest of every file
    FOLDER/rank-00000.pt      that rank's parameters and Adam state by parameter name (torch.save)

Invariants:

- a folder of that name holds a complete checkpoint: files are written and fsynced in a hidden folder beside it, which
  is renamed last;
- what is loaded is bit for bit what was saved, or TrainerError is raised and the cell is as before;
- every rank holds its own shard, so a checkpoint loads only into the same tensor- and pipeline-parallel sizes. The
  policy itself is independent of them (`checkpoint.save_policy`).

Megatron's `dist_checkpointing.save` works on a CPU, but spawns a manager process for good and forks a writer at each
save, inside a process that holds connections and threads; that is why each rank writes its own file here.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from schemas.errors import TrainerError
from services.mesh.weights.layout import fingerprint
from services.trainer.mcore import parallel_state
from services.trainer.megatron import CellModel

MANIFEST = "manifest.json"


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint says of itself."""

    version: int
    """Policy version of the parameters."""
    tensor: int
    pipeline: int
    layout: str
    """`services.mesh.weights.layout.fingerprint` of the policy."""
    files: dict[str, str]
    """File name to blake2b digest of its bytes, in hex."""

    @property
    def digest(self) -> str:
        """One digest for the whole checkpoint."""
        return hashlib.blake2b(msgspec.json.encode(self.files, order="sorted"), digest_size=16).hexdigest()


def save_state(model: CellModel, folder: str | Path, *, version: int) -> Manifest:
    """Writes the checkpoint, replacing one of the same name; every rank of the cell calls it with the same arguments.

    Durable when it returns. Raises TrainerError where the disk refuses.
    """
    folder = Path(folder)
    partial = folder.with_name(f".{folder.name}.partial")
    rank = dist.get_rank()
    name = f"rank-{rank:05d}.pt"
    try:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        dist.barrier()
        torch.save(_state_of(model), partial / name)
        _sync(partial / name)
        digests: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(digests, (name, _digest(partial / name)))
        manifest = Manifest(
            version=version,
            tensor=parallel_state.get_tensor_model_parallel_world_size(),
            pipeline=parallel_state.get_pipeline_model_parallel_world_size(),
            layout=fingerprint(model.config),
            files=dict(digests),
        )
        if rank == 0:
            (partial / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
            _sync(partial / MANIFEST)
            _sync(partial)
            _put_in_place(partial, folder)
        dist.barrier()
    except OSError as error:
        raise TrainerError(
            f"the checkpoint can't be written: {error}",
            where=str(folder),
            remedy="free space there or give another folder; training goes on from memory",
        ) from error
    return manifest


def load_state(model: CellModel, folder: str | Path) -> Manifest:
    """Sets parameters and optimizer state from a checkpoint; every rank of the cell calls it.

    Raises TrainerError where it is absent, damaged, or of another policy or other ranks; nothing has changed then.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    name = f"rank-{dist.get_rank():05d}.pt"
    here = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        fingerprint(model.config),
    )
    if (manifest.tensor, manifest.pipeline, manifest.layout) != here:
        raise TrainerError(
            f"it is of {manifest.tensor} x {manifest.pipeline} ranks and layout {manifest.layout}, "
            f"this cell of {here[0]} x {here[1]} ranks and layout {here[2]}",
            where=str(folder),
            remedy="resume with the same policy and the same ranks",
        )
    path = folder / name
    if not path.exists() or _digest(path) != manifest.files.get(name):
        raise TrainerError(
            f"{name} isn't what was saved",
            where=str(folder),
            remedy="restore an earlier checkpoint; this one is damaged",
        )
    _put_state(model, torch.load(path, map_location="cpu", weights_only=True))
    return manifest


def read_manifest(folder: str | Path) -> Manifest:
    """The manifest of a checkpoint. Raises TrainerError where there is none."""
    try:
        return msgspec.json.decode((Path(folder) / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError) as error:
        raise TrainerError(
            f"there is no checkpoint: {error}", where=str(folder), remedy="give a folder that a trainer saved"
        ) from error


def flaw(folder: str | Path, digest: str) -> str:
    """Why the checkpoint is not the one with this digest, whole; empty when it is."""
    folder = Path(folder)
    try:
        manifest = read_manifest(folder)
    except TrainerError as error:
        return error.what
    if manifest.digest != digest:
        return "it is another one than the log names"
    for name, expected in manifest.files.items():
        path = folder / name
        if not path.exists():
            return f"{name} is not there"
        if _digest(path) != expected:
            return f"{name} is not what was saved"
    return ""


def _state_of(model: CellModel) -> dict[str, Any]:
    adam = model.optimizer.optimizer.state
    return {
        "parameters": {name: parameter.detach() for name, parameter in model.module.named_parameters()},
        "adam": {
            name: dict(adam[parameter]) for name, parameter in model.module.named_parameters() if parameter in adam
        },
    }


@torch.no_grad()
def _put_state(model: CellModel, state: dict[str, Any]) -> None:
    adam = model.optimizer.optimizer.state
    adam.clear()
    for name, parameter in model.module.named_parameters():
        parameter.copy_(state["parameters"][name])
        if name in state["adam"]:
            # Adam counts its steps in a tensor that stays on the CPU; the moments live beside the parameter.
            adam[parameter] = {
                key: value if key == "step" else value.to(parameter.device)
                for key, value in state["adam"][name].items()
            }


def _put_in_place(partial: Path, folder: Path) -> None:
    if folder.exists():
        old = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
        partial.rename(folder)
        shutil.rmtree(old)
    else:
        partial.rename(folder)
    _sync(folder.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
