"""A small policy, micro-steps over it, and cells that train it, all in one torch world of this process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from schemas.config import Trainer as TrainerConfig
from schemas.micro_steps import MicroStep
from services.mesh.clock import SystemClock
from services.mesh.memory_broker import MemoryBroker
from services.mesh.memory_bus import MemoryBus
from services.mesh.service import Context
from services.mesh.weights.layout import Qwen3Config
from services.rollout.reference import model as reference
from services.trainer.cell import Cell
from services.trainer.megatron import CellRanks, close_world, open_world
from services.trainer.objective import ObjectiveTerms
from tests.trainer.shared_cells import LOOSE, Alone, Cells, Faults, SharedCell
from tests.trainer.stage import RUN, Stage

CONFIG = Qwen3Config(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
    rope_theta=10_000.0,
)
SETTINGS = TrainerConfig(lr=1e-3, weight_decay=0.1, grad_clip=0.05)
TERMS = ObjectiveTerms(groups=2, executions=4)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One trajectory: its tokens, which of them are targets, and what the engine said of each token."""

    execution: str
    tokens: Sequence[int]
    targets: Sequence[int]
    logprobs: Sequence[float] | None = None
    """Per token; -1.0 everywhere if absent."""
    temperature: float = 1.0
    version: int = 0


def pack_rows(
    rows: Sequence[Row], advantages: Mapping[str, float], *, name: str = "m-000001.000", batch: str = "b-000001"
) -> MicroStep:
    executions = list(advantages)
    lengths = [len(row.tokens) for row in rows]

    def packed(values: Sequence[Sequence[float]], dtype: str) -> bytes:
        return np.concatenate([np.asarray(value) for value in values]).astype(dtype).tobytes()

    return MicroStep(
        micro_step=name,
        batch=batch,
        cu_seqlens=np.cumsum([0, *lengths]).astype("<i4").tobytes(),
        tokens=packed([row.tokens for row in rows], "<i4"),
        targets=packed([np.isin(np.arange(len(row.tokens)), row.targets) for row in rows], "|u1"),
        behaviour_logprob=packed([row.logprobs or [-1.0] * len(row.tokens) for row in rows], "<f4"),
        temperature=packed([[row.temperature] * len(row.tokens) for row in rows], "<f4"),
        token_version=packed([[row.version] * len(row.tokens) for row in rows], "<i4"),
        row_execution=np.array([executions.index(row.execution) for row in rows], "<i4").tobytes(),
        executions=tuple(executions),
        advantages=tuple(advantages.values()),
        target_counts=tuple(sum(len(row.targets) for row in rows if row.execution == name) for name in executions),
    )


def sampled_rows(
    model: reference.Qwen3, seed: int, count: int, *, noise: float = 0.003, temperature: float = 1.0, version: int = 0
) -> list[Row]:
    """Random trajectories, two an execution, whose log-probabilities are the model's own up to `noise`."""
    random = np.random.default_rng(seed)
    rows = []
    for index in range(count):
        length = int(random.integers(4, 24))
        tokens = random.integers(0, model.config.vocab_size, length)
        with torch.no_grad():
            logits = model(torch.from_numpy(tokens)[None])[0] / temperature
        own = torch.log_softmax(logits, -1)[torch.arange(length - 1), torch.from_numpy(tokens[1:])]
        rows.append(
            Row(
                execution=f"e-{index // 2:06d}.00",
                tokens=tokens.tolist(),
                targets=sorted(
                    random.choice(np.arange(1, length), size=int(random.integers(1, length)), replace=False)
                ),
                logprobs=[0.0, *(own.numpy() + random.normal(0, noise, length - 1)).clip(max=0.0).tolist()],
                temperature=temperature,
                version=version,
            )
        )
    return rows


@pytest.fixture(scope="session")
def world() -> Iterator[None]:
    torch.set_num_threads(1)
    open_world(CellRanks())
    yield
    close_world()


@pytest.fixture
def make_row() -> type[Row]:
    return Row


@pytest.fixture
def pack() -> Callable[..., MicroStep]:
    return pack_rows


@pytest.fixture
def sample() -> Callable[..., list[Row]]:
    return sampled_rows


@pytest.fixture(scope="session")
def config() -> Qwen3Config:
    return CONFIG


@pytest.fixture
def settings() -> TrainerConfig:
    return SETTINGS


@pytest.fixture
def terms() -> ObjectiveTerms:
    return TERMS


@pytest.fixture(scope="session")
def policy_model() -> reference.Qwen3:
    return reference.initialise(CONFIG, seed=3, std=0.2)


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory, policy_model: reference.Qwen3) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    reference.save(folder, policy_model, CONFIG)
    return folder


@pytest.fixture
def make_cell(world: None, policy: Path, tmp_path: Path) -> Iterator[Callable[..., Cell]]:
    made: list[Cell] = []

    def make(settings: TrainerConfig = SETTINGS, terms: ObjectiveTerms = TERMS) -> Cell:
        made.append(Cell(policy, settings, terms, scratch=tmp_path))
        return made[-1]

    yield make
    for cell in made:
        cell.close()


@pytest.fixture
def micro_steps(
    pack: Callable[..., MicroStep], sample: Callable[..., list[Any]], policy_model: Any
) -> Callable[[str, int], list[MicroStep]]:
    def make(batch: str, count: int) -> list[MicroStep]:
        made = []
        for index in range(count):
            rows = sample(policy_model, seed=index, count=4)
            advantages = {name: 1.0 - 2.0 * (i % 2) for i, name in enumerate(dict.fromkeys(r.execution for r in rows))}
            made.append(pack(rows, advantages, name=f"m-{batch[2:]}.{index:03d}", batch=batch))
        return made

    return make


@pytest.fixture
async def stage(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Stage]:
    """For cells that share batches. Its parameter is `trainer.lost_s`."""
    bus = MemoryBus(MemoryBroker(SystemClock()), RUN, name="test")
    await bus.open_run()

    def build(context: Context) -> Cell:
        raise AssertionError("cells build themselves")

    yield Stage(bus, tmp_path, build, trainable=3, lost_s=getattr(request, "param", 60.0))
    await bus.close()


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
def cells(world: None, policy: Path, settings: TrainerConfig, stage: Stage, faults: Faults, tmp_path: Path) -> Cells:
    return Cells(stage, faults, lambda name: SharedCell(policy, settings, LOOSE, scratch=tmp_path / name))


@pytest.fixture
def alone(make_cell: Callable[..., Cell]) -> Callable[..., Alone]:
    def train(*batches: list[MicroStep]) -> Alone:
        cell = make_cell(terms=LOOSE)
        gradients, results = [], []
        for batch in batches:
            cell.begin_batch()
            for micro_step in batch:
                cell.micro_step(micro_step)
            gradients.append(torch.cat(cell.gradients()))
            results.append(cell.step())
        return Alone(gradients=gradients, results=results, weights=cell.flat_weights())

    return train
