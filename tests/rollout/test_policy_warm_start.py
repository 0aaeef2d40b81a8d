"""The warm start as a command, with a recipe of seconds, and the sampler that measures it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from services.mesh.chat import load_tokenizer, make_renderer
from services.rollout.policy import __main__ as command
from services.rollout.policy.optimizer import orthogonalise
from services.rollout.policy.quickstart import load_quickstart
from services.rollout.policy.rollouts import play
from services.rollout.policy.sampling import sample
from services.rollout.policy.warm_start import Recipe, rate
from services.rollout.reference.model import initialise, load
from tests.rollout.conftest import CONFIG

TINY = Recipe(
    tokenizer_executions=20,
    hidden=32,
    heads=2,
    kv_heads=1,
    head_dim=16,
    intermediate=64,
    careful_steps=3,
    sloppy_steps=2,
    careful_pool=12,
    sloppy_pool=12,
    executions=4,
)


@pytest.fixture(autouse=True)
def few_executions(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(command, "MEASURED", 4)
    yield


def make(out: Path, seed: int = 0) -> Path:
    out.mkdir()
    command.make(out, seed=seed, recipe=TINY)
    return out


def test_what_is_written_loads_and_depends_on_the_seed_alone(tmp_path: Path) -> None:
    first, again, other = make(tmp_path / "a"), make(tmp_path / "b"), make(tmp_path / "c", seed=1)
    names = ["config.json", "model.safetensors", "tokenizer.json", "warm_start.json"]
    assert sorted(path.name for path in first.iterdir()) == names
    for name in names[:3]:
        assert (first / name).read_bytes() == (again / name).read_bytes()
    assert (first / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()
    model, tokenizer = load(first), load_tokenizer(first)
    assert model.config.vocab_size % 64 == 0 and model.config.vocab_size >= tokenizer.vocab_size
    assert model.config.eos_token_ids == (tokenizer.eos_token_id,)
    note = msgspec.json.decode((first / "warm_start.json").read_bytes())
    assert note["seed"] == 0 and 0 <= note["reward"] <= 1 and len(note["digest"]) == 16


def test_the_command_wants_a_new_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert command.main(["--out", str(tmp_path), "--threads", "1"]) == 2
    assert "something is there already" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_rate_goes_up_stays_and_falls() -> None:
    recipe = Recipe()
    rates = [rate(recipe, step) for step in range(recipe.careful_steps + recipe.sloppy_steps)]
    assert rates[0] == 0.1 and rates[recipe.careful_steps - 1] == 1.0
    falling = rates[recipe.careful_steps :]
    assert falling == sorted(falling, reverse=True) and falling[0] == 0.6 and recipe.floor < falling[-1] < 0.05


def test_orthogonalise_brings_singular_values_near_one() -> None:
    matrices = torch.randn(3, 48, 16, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrices))
    assert 0.6 < values.min() and values.max() < 1.3


def test_sampled_logprobs_are_those_of_the_model() -> None:
    model = initialise(CONFIG, seed=0, std=0.3)
    prompts = [[5, 6, 7, 8, 9], [11], [12, 13, 14]]
    done = sample(model, prompts, most=12, stops={0, 1, 2, 3}, generator=torch.Generator().manual_seed(0))
    assert len({len(one.ids) for one in done}) > 1
    for prompt, one in zip(prompts, done, strict=True):
        assert all(token > 3 for token in one.ids[:-1]) and (one.ids[-1] <= 3 or len(one.ids) == 12)
        with torch.no_grad():
            logits = model(torch.tensor([prompt + one.ids]))[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(one.ids).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(torch.tensor(one.logprobs), expected, atol=1e-5, rtol=0)


def test_a_policy_that_writes_nonsense_still_ends(tmp_path: Path) -> None:
    folder = make(tmp_path / "policy")
    quickstart, tokenizer = load_quickstart(), load_tokenizer(folder)
    draws = [(quickstart.cards[index], str(index)) for index in range(6)]
    generator = torch.Generator().manual_seed(0)
    for execution in play(load(folder), make_renderer(tokenizer), tokenizer, quickstart, draws, generator):
        assert execution.asked is None and execution.generated > 0 and 0 <= execution.reward <= 1
        for context in execution.contexts:
            assert len(context.ids) == len(context.logprobs)
