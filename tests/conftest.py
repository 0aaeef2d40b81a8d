"""Fixtures that every package's tests share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import structlog

from services.mesh.server import NatsServer


@pytest.fixture(autouse=True)
def logging_as_it_comes() -> Iterator[None]:
    """A command that was run in this process has set up logging to a stream that ends with its test."""
    yield
    structlog.reset_defaults()


@pytest.fixture(autouse=True)
def garbage_is_collected() -> Iterator[None]:
    """What is measured, or must repeat exactly, switches the collector off; afterwards it is on again."""
    yield
    assert gc.isenabled(), "the collector of garbage was left switched off"


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A real nats-server for the whole session; tests keep apart by using runs of their own. Don't stop it: a test
    that needs an outage starts its own."""
    with NatsServer(tmp_path_factory.mktemp("nats")) as server:
        yield server
