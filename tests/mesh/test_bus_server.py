"""Our own nats-server: it starts, says clearly why it can't, keeps its store, and leaves no orphan."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from schemas.errors import BusError, EnvironmentMissing
from services.mesh import server as server_module
from services.mesh.nats_bus import connect
from services.mesh.server import NatsServer

RUN = "r-1"


def wait_for_end(pid: int, timeout_s: float = 10) -> bool:
    """Whether a process, child or not, ends in time."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], timeout_s)[0])
    finally:
        os.close(descriptor)


async def test_it_keeps_its_port_and_its_store(tmp_path: Path):
    server = NatsServer(tmp_path / "nats")
    assert not server.running and "stopped" in repr(server)
    server.start()
    port, pid = server.port, server.pid
    server.start()
    assert server.pid == pid, "a second start changes nothing"
    async with await connect(server.url, RUN, name="test") as bus:
        await bus.open_run()
        await bus.publish(f"LOG_{RUN}", f"gyre.{RUN}.a.b.c.d", b"x", msg_id="1")
    server.stop()
    assert wait_for_end(pid) and not server.running
    server.stop()
    await server.start_async()
    assert server.port == port and str(port) in server.url
    async with await connect(server.url, RUN, name="test") as bus:
        assert await bus.last_seq(f"LOG_{RUN}") == 1
    await server.stop_async()
    with pytest.raises(BusError, match="not started"):
        _ = server.pid


def test_it_syncs_every_write(tmp_path: Path):
    with NatsServer(tmp_path) as server:
        assert "sync_interval: always" in (tmp_path / "nats-server.conf").read_text()
        assert "listen" in server.log_file.read_text().lower()


def test_a_port_in_use_is_named(tmp_path: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = NatsServer(tmp_path, port=port)
        with pytest.raises(EnvironmentMissing, match=f"port {port} on 127.0.0.1") as refused:
            server.start()
    assert "another port" in refused.value.remedy
    assert not server.running
    server.start()
    assert server.port == port
    server.stop()


def test_two_servers_never_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server_module, "STOP_S", 0.2)
    with NatsServer(tmp_path), pytest.raises(EnvironmentMissing, match="another nats-server uses this folder"):
        NatsServer(tmp_path).start()


def test_a_server_that_cannot_run_says_why(tmp_path: Path):
    (tmp_path / "store").write_text("a file where the store should be")
    with pytest.raises(EnvironmentMissing, match=r"ended at once: .*(store|directory)"):
        NatsServer(tmp_path).start()


def test_a_missing_binary_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server_module.sys, "executable", str(tmp_path / "bin" / "python"))
    with pytest.raises(EnvironmentMissing, match="not installed") as missing:
        NatsServer(tmp_path).start()
    assert "make setup" in missing.value.remedy


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's death signal is Linux's")
def test_it_ends_with_its_parent(tmp_path: Path):
    """The parent is killed without a chance to clean up."""
    script = (
        "import pathlib, sys, time; from services.mesh.server import NatsServer; "
        f"s = NatsServer(pathlib.Path({str(tmp_path)!r})); s.start(); print(s.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.getcwd()}
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
    assert wait_for_end(pid)


def test_a_hung_server_is_ended_by_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server_module, "STOP_S", 0.2)
    server = NatsServer(tmp_path)
    server.start()
    pid = server.pid
    os.kill(pid, signal.SIGSTOP)
    server.stop()
    assert wait_for_end(pid) and not server.running
