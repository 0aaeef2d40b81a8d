"""What a cell needs of its rollout engine, and the adapter to the `reference` engine.

An adapter owns the engine's process. What an engine cannot do it says in `capabilities`; nothing pretends. Requests and
answers of `generate` are SGLang's native ones and pass through unread.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from schemas.config import Rollout
from schemas.errors import EngineError

START_S = 120.0
"""Bound on the start of an engine process."""
STOP_S = 5.0
CONTROL_S = 120.0
"""Bound on one control call: memory and weights."""


class EngineDied(EngineError):
    """The engine had a call in hand, and went away before its answer, of itself: it wasn't stopped."""


class EngineAdapter(Protocol):
    """One engine process of one cell."""

    engine: str
    capabilities: list[str]

    async def start(self) -> None:
        """Start the process and wait until it is ready. Raises EngineError with the end of its log."""

    async def stop(self) -> None: ...

    async def died(self) -> int:
        """Returns the exit code once the process is gone."""

    async def generate(self, body: bytes) -> tuple[int, bytes]:
        """Status and body of the engine's answer. Cancelling it aborts the request at the engine. Raises EngineError
        where no answer came, and its EngineDied where the engine had the request by then."""

    async def abort(self, body: bytes) -> tuple[int, bytes]: ...

    async def abort_all(self) -> None:
        """End every request that the engine has by now; each is answered with what was sampled."""

    async def pull_weights(self, address: dict[str, Any], version: int) -> None:
        """Weights of `version` are served when this returns; running requests go on with fresh KV."""

    async def release_memory(self) -> None:
        """Give weights and KV memory back. Requests whose callers have gone may still be running: they are ended."""

    async def resume_memory(self) -> None:
        """Take the memory again; weights must be pulled before anything is generated."""


class ReferenceAdapter:
    """The small torch engine in a process of its own."""

    engine = "reference"

    def __init__(self, *, config: Rollout, model: Path, max_running: int, folder: Path) -> None:
        self.capabilities = ["abort", "release_memory", "weights_from_transfer", "version_spans"]
        self._config, self._model, self._max_running = config, model, max_running
        self._folder = folder
        self._process: asyncio.subprocess.Process | None = None
        self._http: aiohttp.ClientSession | None = None
        self._url = ""
        self._stopping = False

    async def start(self) -> None:
        self._stopping = False
        self._folder.mkdir(parents=True, exist_ok=True)
        port_file = self._folder / "engine.port"
        port_file.unlink(missing_ok=True)
        log = self._folder / "engine.log"
        with log.open("ab") as sink:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "services.rollout.reference",
                "--model",
                str(self._model),
                "--port",
                "0",
                "--port-file",
                str(port_file),
                "--dtype",
                self._config.dtype,
                "--max-running",
                str(self._max_running),
                "--kv-tokens",
                str(self._config.kv_tokens),
                "--context-length",
                str(self._config.context_length),
                "--threads",
                str(self._config.threads),
                stdout=sink,
                stderr=sink,
                stdin=asyncio.subprocess.DEVNULL,
            )
        died = asyncio.create_task(self._process.wait())
        written = asyncio.create_task(_port_written(port_file))
        try:
            async with asyncio.timeout(START_S):
                await asyncio.wait({died, written}, return_when=asyncio.FIRST_COMPLETED)
            if not written.done():
                raise EngineError(
                    f"the engine ended with code {died.result()} before it was ready: {_tail(log)}",
                    where=str(log),
                    remedy="read the engine's log",
                )
        except TimeoutError:
            raise EngineError(f"the engine was not ready within {START_S:.0f} s", where=str(log)) from None
        finally:
            died.cancel()
            written.cancel()
        self._url = f"http://127.0.0.1:{written.result()}"
        self._http = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0)
        )

    async def stop(self) -> None:
        self._stopping = True
        if self._http:
            await self._http.close()
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    async def died(self) -> int:
        assert self._process is not None
        return await self._process.wait()

    async def generate(self, body: bytes) -> tuple[int, bytes]:
        return await self._post("/generate", body)

    async def abort(self, body: bytes) -> tuple[int, bytes]:
        return await self._post("/abort_request", body)

    async def abort_all(self) -> None:
        await self._control("/abort_request", {"abort_all": True})

    async def pull_weights(self, address: dict[str, Any], version: int) -> None:
        await self._control("/update_weights_from_transfer", {"address": address, "weight_version": str(version)})

    async def release_memory(self) -> None:
        # A caller's leaving reaches the engine in its own time; a paused engine takes nothing up meanwhile.
        await self._control("/pause_generation", {"mode": "abort"})
        await self._control("/release_memory_occupation", {"tags": None})

    async def resume_memory(self) -> None:
        await self._control("/resume_memory_occupation", {"tags": None})
        await self._control("/continue_generation", {})

    async def _post(self, route: str, body: bytes) -> tuple[int, bytes]:
        assert self._http is not None
        headers = {"content-type": "application/json"}
        try:
            async with self._http.post(self._url + route, data=body, headers=headers) as response:
                return response.status, await response.read()
        except aiohttp.ClientError as error:
            saw_it = not (self._stopping or isinstance(error, aiohttp.ClientConnectorError))
            raise (EngineDied if saw_it else EngineError)(repr(error), where=self._url) from None

    async def _control(self, route: str, body: dict[str, Any]) -> None:
        assert self._http is not None
        try:
            async with (
                asyncio.timeout(CONTROL_S),
                self._http.post(self._url + route, json=body) as response,
            ):
                text = await response.text()
        except (TimeoutError, aiohttp.ClientError) as error:
            raise EngineError(f"{route} failed: {error!r}", where=self._url) from None
        if response.status != 200:
            raise EngineError(f"{route} answered {response.status}: {text[:300]}", where=self._url)


async def _port_written(path: Path) -> int:
    """The engine writes the file by a rename once it serves; there is nobody to tell us but the file system."""
    while True:
        with contextlib.suppress(FileNotFoundError, ValueError):
            return int(path.read_text())
        await asyncio.sleep(0.05)


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "its log is empty"
