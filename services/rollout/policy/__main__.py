"""Make the quickstart's starting policy: `python -m services.rollout.policy --out DIR --seed 0 [--threads 2]`.

Writes config.json, model.safetensors, tokenizer.json and warm_start.json (seed, digest of recipe and code, measured
reward, seconds). The folder appears whole or not at all; the caller caches it.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from schemas.errors import ConfigError, GyreError
from services.mesh.chat import TOKENIZER_FILE, load_tokenizer, make_renderer
from services.rollout.policy.demonstrations import corpus, executions, rows
from services.rollout.policy.demonstrator import CAREFUL, SLOPPY
from services.rollout.policy.quickstart import FOLDER, Quickstart, load_quickstart
from services.rollout.policy.rollouts import play
from services.rollout.policy.vocabulary import phrases, train_tokenizer
from services.rollout.policy.warm_start import Recipe, config_for, train
from services.rollout.reference.model import Qwen3, save

MEASURED = 128
"""Executions over which the starting reward is measured."""


def code_digest(recipe: Recipe, quickstart_folder: Path = FOLDER) -> str:
    """A digest of the recipe and of every file that the policy is made from; a cache may be keyed by it."""
    own = Path(__file__).parent
    files = [*own.glob("*.py"), own.parent / "reference" / "model.py", own.parents[1] / "mesh" / "chat.py"]
    files += [quickstart_folder / "conversation.py", quickstart_folder / "make_tasks.py"]
    digest = hashlib.sha256(msgspec.json.encode(recipe))
    for path in sorted(files):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def measure(model: Qwen3, renderer: Any, tokenizer: Any, quickstart: Quickstart, seed: int) -> dict[str, float]:
    """How the policy does as it is, over MEASURED executions."""
    rng = random.Random(f"measure/{seed}")
    draws = [(rng.choice(quickstart.cards), f"measure/{seed}/{index}") for index in range(MEASURED)]
    done = play(model, renderer, tokenizer, quickstart, draws, torch.Generator().manual_seed(seed))
    calls = sum(execution.calls for execution in done)
    return {
        "reward": sum(execution.reward for execution in done) / MEASURED,
        "well_formed": 1 - sum(execution.malformed for execution in done) / max(calls, 1),
        "tokens_per_execution": sum(len(context.ids) for one in done for context in one.contexts) / MEASURED,
        "sampled_per_execution": sum(execution.generated for execution in done) / MEASURED,
    }


def make(out: Path, *, seed: int, recipe: Recipe) -> dict[str, Any]:
    """Make the policy in the folder `out`, which exists and is empty; returns what warm_start.json says."""
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:5.1f} s] {text}", flush=True)

    quickstart = load_quickstart()
    texts, fixed = corpus(quickstart, count=recipe.tokenizer_executions, seed="tokenizer")
    train_tokenizer(texts, phrases(fixed), recipe.vocabulary).save(str(out / TOKENIZER_FILE))
    tokenizer = load_tokenizer(out)
    renderer = make_renderer(tokenizer)
    careful, sloppy = (
        list(rows(executions(quickstart, manner, count=count, seed=f"{name}/{seed}"), renderer, tokenizer))
        for name, manner, count in (("careful", CAREFUL, recipe.careful_pool), ("sloppy", SLOPPY, recipe.sloppy_pool))
    )
    say(f"tokenizer of {tokenizer.vocab_size} ids, {len(careful) + len(sloppy)} demonstrations")
    steps = recipe.careful_steps + recipe.sloppy_steps

    def progress(step: int, loss: float) -> None:
        if (step + 1) % 10 == 0 or step + 1 == steps:
            say(f"step {step + 1}/{steps}  loss {loss:.3f}  {'careful' if step < recipe.careful_steps else 'sloppy'}")

    config = config_for(recipe, vocabulary=tokenizer.vocab_size, eos=tokenizer.eos_token_id)
    model = train(recipe, config, careful, sloppy, seed=seed, report=progress)
    save(out, model, config)
    figures = measure(model, renderer, tokenizer, quickstart, seed)
    seconds = round(time.monotonic() - started, 1)
    say("  ".join(f"{name} {value:.3g}" for name, value in figures.items()))
    note = {"seed": seed, "digest": code_digest(recipe), "torch": str(torch.__version__), **figures, "seconds": seconds}
    (out / "warm_start.json").write_bytes(msgspec.json.format(msgspec.json.encode(note)) + b"\n")
    return note


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, make the policy beside its place, and move it there."""
    parser = argparse.ArgumentParser(prog="python -m services.rollout.policy", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    out: Path = options.out.resolve()
    part = out.with_name(f".{out.name}.part")
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ConfigError("something is there already", where=str(out), remedy="give a new folder, or remove it")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        make(part, seed=options.seed, recipe=Recipe())
        if out.exists():
            out.rmdir()
        part.rename(out)
    except GyreError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    finally:
        shutil.rmtree(part, ignore_errors=True)
    print(f"policy in {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
