"""The processes of the benchmark: nats-server, the scripted engine, one proxy as `gyre service proxy` starts it, and the
harness's side, which is this process. Everything is on loopback and ends with the stage.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from schemas import streams
from schemas.config import Config
from schemas.config_file import from_tree
from schemas.envelope import Event
from schemas.errors import EnvironmentMissing
from schemas.events import CellJoined, ExecutionPlaced, RunStarted
from schemas.flags import NEWEST
from schemas.ids import cell_id, execution_id
from services.cli.places import Places
from services.cli.plan import service_specs
from services.cli.proxy_bench.talk import Talk, write_tokenizer
from services.mesh.clock import SystemClock
from services.mesh.codec import decode
from services.mesh.nats_bus import NatsBus, connect
from services.mesh.publisher import Publisher
from services.mesh.server import NatsServer
from services.mesh.tokens import SECRET_BYTES, make_token

RUN = "r-bench"


class Asked(msgspec.Struct, frozen=True):
    """One request and its answer."""

    seconds: float
    input_tokens: int


class Stage:
    def __init__(self, folder: Path) -> None:
        self._folder, self._places = folder, Places(folder)
        self._server = NatsServer(self._places.nats)
        self._secret = os.urandom(SECRET_BYTES)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._executions = 0
        self.engine = self.proxy = ""
        self.proxy_pid = 0

    async def __aenter__(self) -> Self:
        try:
            await self._open()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def _open(self) -> None:
        policy = self._folder / "policy"
        write_tokenizer(policy)
        await self._server.start_async()
        config = _config(policy)
        run = self._places.run(RUN)
        run.mkdir(parents=True)
        (run / "secret").write_bytes(self._secret)
        self._bus: NatsBus = await connect(self._server.url, RUN, name="bench")
        await self._bus.open_run()
        await self._say(
            "operator", "run.started", RUN, RunStarted(seed=0, config=config, tasks=[], code="bench", flags=NEWEST)
        )
        engine = self._start(
            [sys.executable, "-m", "services.cli.proxy_bench.engine", str(policy)], stdout=subprocess.PIPE
        )
        assert engine.stdout is not None
        self.engine = (await asyncio.to_thread(engine.stdout.readline)).decode().strip()
        joined = CellJoined(index=0, capacity=1000, url=self.engine, engine="scripted", version=1, capabilities=[])
        await self._say("rollout", "cell.joined", cell_id(0), joined)
        specs = service_specs(config, run=RUN, url=self._server.url, state=self._folder, here=self._folder)
        (spec,) = [each for each in specs if each.name == "proxy"]
        proxy = self._start(spec.command, env={**os.environ, **spec.env})
        self.proxy_pid = proxy.pid
        self.proxy = (await self._event("service.joined", proxy)).data.url
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=600)
        )

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if hasattr(self, "session"):
            await self.session.close()
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            await asyncio.to_thread(process.wait)
            if process.stdout is not None:
                process.stdout.close()
        if hasattr(self, "_bus"):
            await self._bus.close()
        await self._server.stop_async()

    async def execution(self) -> str:
        """A new execution, placed at the engine: the token that it asks with."""
        name = execution_id(self._executions, 0)
        self._executions += 1
        await self._say("scheduler", "execution.placed", name, ExecutionPlaced(cell=cell_id(0), epoch=1, attempt=0))
        return make_token(self._secret, name, 0)

    async def ask(self, talk: Talk, token: str, *, url: str) -> Asked:
        """The next turn of a conversation, asked for as a harness does; the conversation takes the answer."""
        body = talk.body()
        headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
        began = time.perf_counter()
        async with self.session.post(f"{url}/v1/messages?beta=true", data=body, headers=headers) as response:
            answer = await response.read()
        seconds = time.perf_counter() - began
        if response.status != 200 or b"event: error" in answer:
            raise EnvironmentMissing(f"HTTP {response.status}: {answer[-300:].decode()}", where=url)
        started, content = _assemble(answer)
        talk.take(content)
        return Asked(seconds=seconds, input_tokens=started["usage"]["input_tokens"])

    def cpu_s(self) -> float:
        """Processor seconds of the proxy so far, all threads."""
        threads = Path(f"/proc/{self.proxy_pid}/task").glob("*/schedstat")
        return sum(int(each.read_text().split()[0]) for each in threads) / 1e9

    def resident_mb(self) -> float:
        """Resident memory of the proxy now."""
        for line in Path(f"/proc/{self.proxy_pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1]) / 1024
        raise EnvironmentMissing("the proxy is gone", where=str(self.proxy_pid))

    async def _say(self, owner: str, kind: str, entity: str, data: Any) -> None:
        publisher = Publisher(bus=self._bus, clock=SystemClock(), run=RUN, owner=owner, instance="bench")
        await publisher.say(kind, entity, data, id=f"{RUN}.{kind}.{entity}")

    async def _event(self, kind: str, process: subprocess.Popen[bytes]) -> Event:
        """The first of this kind, unless the process ends before."""

        async def read() -> Event:
            async for stored in self._bus.read(streams.log_stream(RUN), 0):
                event = decode(stored)
                if event.kind == kind:
                    return event
            raise AssertionError("the log has no end")

        found = asyncio.create_task(read())
        while not found.done():
            await asyncio.wait({found}, timeout=0.5)
            if process.poll() is not None:
                found.cancel()
                raise EnvironmentMissing(f"the proxy ended with {process.returncode}", where=str(self._folder))
        return found.result()

    def _start(self, command: list[str], **how: Any) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(command, start_new_session=True, **how)
        self._processes.append(process)
        return process


def _config(policy: Path) -> Config:
    tree = {
        "name": "bench",
        "steps": 3,
        "harness": {"command": ["true"]},
        "policy": {"path": str(policy)},
        "rollout": {"context_length": 2_000_000, "kv_tokens": 2_000_000},
    }
    return from_tree(tree, where="bench")


def _assemble(stream: bytes) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The message as it began, and its blocks with what came after."""
    started: dict[str, Any] = {}
    blocks: list[dict[str, Any]] = []
    parts: list[str] = []
    for line in stream.split(b"\n"):
        if not line.startswith(b"data: "):
            continue
        event = msgspec.json.decode(line[6:])
        if event["type"] == "message_start":
            started = event["message"]
        elif event["type"] == "content_block_start":
            blocks.append(event["content_block"])
            parts = []
        elif event["type"] == "content_block_delta":
            parts.append(event["delta"].get("partial_json") or event["delta"].get("text", ""))
        elif event["type"] == "content_block_stop":
            key = "input" if blocks[-1]["type"] == "tool_use" else "text"
            blocks[-1][key] = msgspec.json.decode("".join(parts)) if key == "input" else "".join(parts)
    return started, blocks
