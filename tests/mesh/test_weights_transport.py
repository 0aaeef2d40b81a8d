"""Weights cross between two real processes, over both transports, or the pull fails loudly."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from schemas.errors import ConfigError, EnvironmentMissing, TransportError
from services.mesh.weights import transport as transport_module
from services.mesh.weights.transport import (
    SharedMemoryTransport,
    Transport,
    WeightAddress,
    digest,
    open_transport,
)

SIZE = 50_000
EXPOSER = f"""
import sys
import msgspec, numpy as np
from services.mesh.weights.transport import WeightAddress, open_transport
with open_transport(sys.argv[1]) as transport:
    address = transport.expose(np.arange({SIZE}, dtype=np.float32), 7)
    print("ADDRESS " + msgspec.json.encode(address).decode(), flush=True)
    for line in sys.stdin:
        transport.withdraw(address)
        address = transport.expose(np.arange({SIZE}, dtype=np.float32) + 1, 8)
        print("ADDRESS " + msgspec.json.encode(address).decode(), flush=True)
"""


@pytest.fixture(scope="module", params=["mooncake", "shared-memory"])
def transport(request: pytest.FixtureRequest) -> Iterator[Transport]:
    try:
        opened = open_transport(request.param)
    except EnvironmentMissing as error:
        pytest.skip(str(error))
    with opened:
        yield opened


@contextmanager
def exposer(kind: str) -> Iterator[tuple[subprocess.Popen[str], WeightAddress]]:
    process = subprocess.Popen(
        [sys.executable, "-c", EXPOSER, kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        try:
            yield process, next_address(process)
        finally:
            process.kill()


def next_address(process: subprocess.Popen[str]) -> WeightAddress:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("ADDRESS "):
            return msgspec.json.decode(line.removeprefix("ADDRESS "), type=WeightAddress)
    raise AssertionError("the exposing process ended without an address")


def test_another_process_pulls_exactly_what_was_exposed(transport: Transport) -> None:
    with exposer(transport.kind) as (_, address):
        into = np.zeros(SIZE, dtype=np.float32)
        transport.pull(address, into)
    assert (address.version, address.kind) == (7, transport.kind)
    assert np.array_equal(into, np.arange(SIZE, dtype=np.float32))


def test_a_withdrawn_snapshot_cannot_be_pulled_but_its_successor_can(transport: Transport) -> None:
    with exposer(transport.kind) as (process, first):
        assert process.stdin is not None
        process.stdin.write("next\n")
        process.stdin.flush()
        second = next_address(process)
        into = np.zeros(SIZE, dtype=np.float32)
        with pytest.raises(TransportError, match="withdrawn"):
            transport.pull(first, into)
        transport.pull(second, into)
    assert into[0] == 1.0


def test_a_dead_peer_is_an_error(transport: Transport) -> None:
    with exposer(transport.kind) as (process, address):
        process.kill()
        process.wait()
        with pytest.raises(TransportError, match=r"died|could not read"):
            transport.pull(address, np.zeros(SIZE, dtype=np.float32))
    if transport.kind == "shared-memory":
        assert not Path(address.name).exists(), "what a dead process left behind is removed"


def test_a_wrong_digest_is_an_error(transport: Transport) -> None:
    with exposer(transport.kind) as (_, address):
        lying = msgspec.structs.replace(address, digest=digest(np.ones(1, dtype=np.float32)))
        with pytest.raises(TransportError, match="digest"):
            transport.pull(lying, np.zeros(SIZE, dtype=np.float32))


def test_expose_takes_a_snapshot(transport: Transport) -> None:
    buffer = np.arange(SIZE, dtype=np.float32)
    address = transport.expose(buffer, 1)
    buffer[:] = 0
    into = np.zeros(SIZE, dtype=np.float32)
    transport.pull(address, into)
    assert into[-1] == SIZE - 1
    transport.withdraw(address)
    with pytest.raises(TransportError, match="exposes no such"):
        transport.withdraw(address)


@pytest.mark.parametrize(
    "into", [np.zeros(3, dtype=np.float32), np.zeros(SIZE), np.zeros((SIZE, 2), dtype=np.float32)[:, 0]]
)
def test_a_destination_that_does_not_fit_is_refused(transport: Transport, into: np.ndarray) -> None:
    address = transport.expose(np.zeros(SIZE, dtype=np.float32), 1)
    with pytest.raises(TransportError, match=r"the destination holds|cannot be transferred"):
        transport.pull(address, into)


def test_both_ends_must_be_of_one_kind() -> None:
    with SharedMemoryTransport() as ours:
        foreign = WeightAddress(kind="mooncake", version=1, peer="127.0.0.1:1", bytes=4, digest="")
        with pytest.raises(TransportError, match="exposed over mooncake, this process opened shared-memory"):
            ours.pull(foreign, np.zeros(1, dtype=np.float32))


def test_auto_says_why_it_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(host: str) -> None:
        raise EnvironmentMissing("Mooncake cannot be loaded: libibverbs.so.1", remedy="install it")

    monkeypatch.setattr(transport_module, "_mooncake_engine", missing)
    with open_transport("auto") as opened:
        assert opened.kind == "shared-memory"
        assert "libibverbs" in opened.reason
    with pytest.raises(EnvironmentMissing, match="install it"):
        open_transport("mooncake")
    # Shared memory would not reach another machine.
    with pytest.raises(EnvironmentMissing, match="install it"):
        open_transport("auto", host="trainer")
    with pytest.raises(ConfigError, match="unknown transport 'rdma'"):
        open_transport("rdma")


def test_a_name_that_is_no_snapshot_is_never_opened(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"1234")
    address = WeightAddress(kind="shared-memory", version=1, peer="1", name=str(secret), bytes=4, digest="")
    with SharedMemoryTransport() as ours, pytest.raises(TransportError, match="no exposed snapshot"):
        ours.pull(address, np.zeros(1, dtype=np.float32))
    assert secret.exists()
