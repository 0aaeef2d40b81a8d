"""A world on a virtual loop."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from replay.virtual.life import Life
from replay.virtual.loop import VirtualLoop
from replay.virtual.network import Network
from replay.worlds.world import World


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    with VirtualLoop() as loop:  # type: ignore[abstract]  # what it lacks is not used
        yield loop


@pytest.fixture
def world(loop: VirtualLoop) -> World:
    return World(1, network=Network(loop), life=lambda name: Life(loop, name))
