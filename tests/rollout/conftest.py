"""A tiny random policy, its checkpoint folder, and batchers over it; a stage for a cell."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import torch

from services.mesh.bus import Bus
from services.mesh.clock import SystemClock
from services.mesh.memory_broker import MemoryBroker
from services.mesh.memory_bus import MemoryBus
from services.mesh.weights.layout import Qwen3Config
from services.rollout.reference.batcher import Batcher
from services.rollout.reference.decode import PagedDecoder
from services.rollout.reference.kv import BLOCK_SIZE
from services.rollout.reference.model import Qwen3, flatten, initialise, save
from tests.rollout.stage import RUN, Stage

CONFIG = Qwen3Config(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=8192,
    rope_theta=1e4,
    eos_token_id=0,
)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model() -> Qwen3:
    # Wider than usual, so that the distribution is far from uniform.
    return initialise(CONFIG, seed=0, std=0.3)


@pytest.fixture(scope="session")
def other_model() -> Qwen3:
    return initialise(CONFIG, seed=1, std=0.3)


@pytest.fixture(scope="session")
def folder(model: Qwen3, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy")
    save(path, model, CONFIG)
    return path


MakeBatcher = Callable[..., Batcher]


@pytest.fixture
def make_batcher(model: Qwen3) -> MakeBatcher:
    """A batcher over the tiny policy."""

    def make(
        *, dtype: torch.dtype = torch.float32, kv_tokens: int = 4096, max_running: int = 8, prefill_tokens: int = 512
    ) -> Batcher:
        decoder = PagedDecoder(
            CONFIG, dtype=dtype, num_blocks=kv_tokens // BLOCK_SIZE, context_length=CONFIG.max_position_embeddings
        )
        decoder.set_weights(flatten(model))
        return Batcher(
            decoder,
            context_length=CONFIG.max_position_embeddings,
            max_running=max_running,
            prefill_tokens=prefill_tokens,
        )

    return make


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    bus = MemoryBus(MemoryBroker(SystemClock()), RUN, name="test")
    await bus.open_run()
    yield bus
    await bus.close()


@pytest.fixture
async def stage(bus: Bus, tmp_path: Path) -> Stage:
    return Stage(bus, tmp_path, drain_s=60.0)
