"""Fixtures that every package's tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from services.mesh.server import NatsServer


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A real nats-server for the whole session; tests keep apart by using runs of their own. Don't stop it: a test
    that needs an outage starts its own."""
    with NatsServer(tmp_path_factory.mktemp("nats")) as server:
        yield server
