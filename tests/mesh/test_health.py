"""Where a service listens, and what it tells others."""

from __future__ import annotations

import asyncio
import gc
import urllib.request
import warnings
from asyncio import to_thread

import pytest

from schemas.errors import EnvironmentMissing
from services.mesh.health import Health
from services.mesh.host import is_loopback, own_host


def get(url: str) -> int:
    with urllib.request.urlopen(url, timeout=5) as answer:
        status: int = answer.status
        return status


async def test_the_address_it_tells_is_the_one_it_binds() -> None:
    health = Health(service="packer", instance="packer", host="127.0.0.2")
    url = await health.start()
    try:
        assert url.startswith("http://127.0.0.2:")
        assert await to_thread(get, f"{url}/healthz") == 200
        port = url.rpartition(":")[2]
        with pytest.raises(OSError, match="refused"):
            await to_thread(get, f"http://127.0.0.1:{port}/healthz")
    finally:
        await health.stop()


async def test_a_name_stays_a_name() -> None:
    health = Health(service="packer", instance="packer", host="localhost")
    url = await health.start()
    try:
        assert url.startswith("http://localhost:")
        assert await to_thread(get, f"{url}/healthz") == 200
    finally:
        await health.stop()


async def test_a_host_of_another_machine_is_refused() -> None:
    # An address for documentation: no machine has it.
    health = Health(service="packer", instance="packer", host="192.0.2.1")
    with pytest.raises(EnvironmentMissing, match=r"(?s)192\.0\.2\.1.*must be a name of this machine"):
        await health.start()


def test_loopback_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GYRE_HOST", raising=False)
    assert own_host() == "127.0.0.1"
    monkeypatch.setenv("GYRE_HOST", "proxy")
    assert own_host() == "proxy"
    assert not is_loopback("proxy")
    assert is_loopback("127.0.0.2")
    assert is_loopback("localhost")


@pytest.mark.parametrize("steps", range(6))
async def test_one_that_is_cancelled_while_it_starts_leaves_no_socket_behind(steps: int) -> None:
    health = Health(service="proxy", instance="proxy")
    starting = asyncio.create_task(health.start())
    for _ in range(steps):
        await asyncio.sleep(0)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    await health.stop()
    with warnings.catch_warnings(record=True) as left:
        warnings.simplefilter("always", ResourceWarning)
        gc.collect()
    assert not left
