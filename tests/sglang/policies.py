"""Checkpoints that a real SGLang serves, written by our own code and all of one architecture.

`taught` calls the quickstart's tools and ends its turns; `wide` has random weights and as good as never ends a turn, so
that there is time to move it; `shaken` is a later version of another one.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from services.mesh.chat import TOKENIZER_FILE, load_tokenizer
from services.mesh.weights.layout import flat_size, layout
from services.rollout.policy.__main__ import make
from services.rollout.policy.warm_start import Recipe
from services.rollout.reference.model import initialise, load, save

BRIEF = Recipe(
    hidden=64,
    head_dim=16,
    intermediate=192,
    tokenizer_executions=100,
    careful_steps=40,
    sloppy_steps=4,
    careful_pool=100,
    sloppy_pool=20,
    executions=8,
)
"""Enough for well-formed calls, in some seconds."""


def taught(out: Path) -> Path:
    out.mkdir()
    make(out, seed=0, recipe=BRIEF)
    return _readable(out)


def wide(out: Path, like: Path, *, seed: int) -> Path:
    """Wider than usual, so that the distribution is far from uniform, but it as good as never ends its turn: the first
    dimension stays what it was in the embedding, and only there have the tokens that end one the other sign."""
    config = load(like).config
    model = initialise(config, seed=seed, std=0.4)
    tokenizer = load_tokenizer(like)
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        embedding[:, 0] = 12.0
        embedding[[tokenizer.eos_token_id, tokenizer.pad_token_id], 0] = -12.0
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight[0] = 0.0
    save(out, model, config)
    shutil.copy(like / TOKENIZER_FILE, out)
    return _readable(out)


def shaken(out: Path, like: Path, *, seed: int) -> Path:
    """Some noise added to every weight."""
    model = load(like)
    noise = torch.randn(flat_size(model.config), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for slot in layout(model.config):
            part = noise[slot.offset : slot.offset + slot.size].view(slot.shape)
            model.get_parameter(slot.name).add_(0.01 * part)
    save(out, model, model.config)
    shutil.copy(like / TOKENIZER_FILE, out)
    return _readable(out)


def _readable(folder: Path) -> Path:
    """transformers, by which SGLang reads the tokenizer, wants to be told its class."""
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder
