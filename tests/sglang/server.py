"""One real SGLang server on loopback, without an accelerator: a process of the environment that `install` makes.

    start ── the port answers ── ready ── stop

What is set here is what an engine needs for the proxy's records to be exact: its weight version is a number, sampling is
PyTorch's plain one, and its context is `MARGIN` tokens longer than what the proxy believes.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from services.mesh.processes import die_with, kill_group
from tests.sglang.install import PYTHON

STUBS = Path(__file__).with_name("stubs")
START_S = 240.0
STOP_S = 10.0
MARGIN = 6
"""SGLang takes prompts of up to its context length less 7 tokens; the proxy sends up to its own less 1."""


class Server:
    """The process and its address. `folder` gets its log."""

    def __init__(self, model: Path, *, version: int, context_length: int, folder: Path, dtype: str = "float32") -> None:
        self.log = folder / f"sglang-{version}.log"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [PYTHON, "-m", "sglang.launch_server", "--model-path", model, "--host", "127.0.0.1", "--port", port]
        command += ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
        command += ["--dtype", dtype, "--weight-version", version, "--context-length", context_length + MARGIN]
        command += ["--max-total-tokens", 16384, "--max-running-requests", 16, "--mem-fraction-static", 0.2]
        command += ["--disable-overlap-schedule", "--skip-server-warmup", "--log-level", "info"]
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
            "PYTHONPATH": str(STUBS),
            "SGLANG_USE_CPU_ENGINE": "1",
            "OMP_NUM_THREADS": "1",
            # It would look for names, licences and updates elsewhere.
            "HF_HUB_OFFLINE": "1",
        }
        parent = os.getpid()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
                preexec_fn=lambda: die_with(parent),  # noqa: PLW1509  there is one thread
            )

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_ready(self) -> None:
        """Until it takes requests. Raises AssertionError with the end of its log."""
        end = time.monotonic() + START_S
        while time.monotonic() < end and self.process.poll() is None:
            try:
                self.get("/ready")
                return
            except OSError:
                time.sleep(0.2)
        raise AssertionError(f"SGLang did not start, {self.log} ends with:\n{self.log.read_text()[-3000:]}")

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=60) as response:
            return json.loads(response.read() or b"null")

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The answer, decoded. Raises HTTPError for a refusal."""
        data, headers = json.dumps(body).encode(), {"content-type": "application/json"}
        request = urllib.request.Request(self.url + path, data=data, headers=headers)
        with urllib.request.urlopen(request, timeout=120) as response:
            return json.loads(response.read() or b"null")

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            kill_group(self.process.pid)
            self.process.wait()
