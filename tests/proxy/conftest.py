"""A tokenizer and renderer without a policy, a scripted engine, and a proxy on an in-memory bus."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from services.mesh.chat import CONTROL_TOKENS, MARKUP_TOKENS, ChatTokenizer, load_tokenizer, make_renderer
from services.proxy.encoder import Encoder
from tests.proxy.engines import Engine
from tests.proxy.world import World


def write_tokenizer(folder: Path) -> None:
    """Byte-level without merges: every byte is a token, so any split of text would show."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKUP_TOKENS])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(policy: Path) -> ChatTokenizer:
    return load_tokenizer(policy)


@pytest.fixture(scope="session")
def encoder(tokenizer: ChatTokenizer) -> Encoder:
    return Encoder(tokenizer, make_renderer(tokenizer))


@pytest.fixture
async def engine(tokenizer: ChatTokenizer) -> AsyncIterator[Engine]:
    started = await Engine(tokenizer).start()
    yield started
    started.release.set()
    await started.stop()


MakeWorld = Callable[..., Any]


@pytest.fixture
async def make_world(policy: Path, tmp_path: Path, engine: Engine) -> AsyncIterator[MakeWorld]:
    """Makes the world: a proxy that serves, one cell with the scripted engine, one execution placed on it."""
    made: list[World] = []

    async def make(**proxy: Any) -> World:
        world = World(policy, tmp_path, **proxy)
        await world.bus.open_run()
        await world.join("cell-0", engine)
        await world.place()
        await world.start()
        made.append(world)
        return world

    yield make
    engine.release.set()
    for world in made:
        await world.stop()


@pytest.fixture
async def world(make_world: MakeWorld) -> World:
    made: World = await make_world()
    return made
