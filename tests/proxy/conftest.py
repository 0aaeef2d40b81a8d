"""A tokenizer and renderer without a policy, an engine that follows a script, and a proxy on an in-memory bus."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from schemas import streams
from schemas.config import Config
from schemas.config_file import from_tree
from schemas.envelope import Event
from schemas.events import CellJoined, ExecutionFinished, ExecutionPlaced, RouteMoved, RunStarted
from schemas.records import RecordEntry
from schemas.units import Value
from services.mesh import codec
from services.mesh.bus import Bus
from services.mesh.chat import CONTROL_TOKENS, MARKUP_TOKENS, ChatTokenizer, load_tokenizer, make_renderer
from services.mesh.clock import SystemClock
from services.mesh.memory_broker import MemoryBroker
from services.mesh.memory_bus import MemoryBus
from services.mesh.service import Context
from services.mesh.tokens import make_token
from services.mesh.tree_codec import decode_record
from services.proxy.calls import Flight
from services.proxy.encoder import Encoder
from services.proxy.service import DESK, serve

RUN, EXECUTION, SECRET = "r-proxy", "e-000001.00", b"k" * 32


def write_tokenizer(folder: Path) -> None:
    """Byte-level without merges: every byte is a token, so any split of text would show."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKUP_TOKENS])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(policy: Path) -> ChatTokenizer:
    return load_tokenizer(policy)


@pytest.fixture(scope="session")
def encoder(tokenizer: ChatTokenizer) -> Encoder:
    return Encoder(tokenizer, make_renderer(tokenizer))


def configured(
    policy: Path,
    *,
    eval: dict[str, Any] | None = None,
    context_length: int = 4096,
    budget_s: float = 900.0,
    **proxy: Any,
) -> Config:
    tree = {
        "name": "proxy",
        "steps": 21,
        "harness": {"command": ["true"], "timeout_s": min(budget_s, 600.0), "overall_timeout_s": budget_s},
        "policy": {"path": str(policy)},
        "eval": eval or {},
        "proxy": {"grace_s": 30.0, "max_new_tokens": 512, **proxy},
        "rollout": {"context_length": context_length, "kv_tokens": max(context_length, 65536)},
    }
    return from_tree(tree, where="test")


def call_text(name: str, arguments: Any) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


class Engine:
    """A cell's `/generate` and `/abort_request`. Each call takes the next line of `script`; with `hold` it waits for
    `release` first. `started` counts calls that arrived."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self.tokenizer = tokenizer
        self.end = tokenizer.eos_token_id
        self.script: deque[Any] = deque()
        self.calls: list[dict[str, Any]] = []
        self.epochs: list[str] = []
        self.aborted: list[str] = []
        self.hold = False
        self.release = asyncio.Event()
        self.arrived = asyncio.Condition()
        self.abort_seen = asyncio.Event()
        self.url = ""
        self.version = 7
        self._runner: web.AppRunner | None = None

    async def start(self) -> Engine:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]
        return self

    async def stop(self) -> None:
        if self._runner:
            await self._runner.cleanup()

    def say(self, text: str, *, finish: str = "stop") -> dict[str, Any]:
        """The answer that an engine gives which samples this text."""
        ids = self.tokenizer.encode(text) + ([self.end] if finish == "stop" else [])
        return self.ids(ids, finish=finish)

    def ids(self, ids: list[int], *, finish: str = "stop") -> dict[str, Any]:
        return {
            "output_ids": ids,
            "meta_info": {
                "finish_reason": {"type": finish},
                "completion_tokens": len(ids),
                "weight_version": str(self.version),
                "output_token_logprobs": [[-0.5 - i / 1000, token, None] for i, token in enumerate(ids)],
            },
        }

    async def until(self, count: int) -> None:
        """Until so many calls have arrived."""
        async with self.arrived:
            await self.arrived.wait_for(lambda: len(self.calls) >= count)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = msgspec.json.decode(await request.read())
        line = self.script.popleft() if self.script else self.say("ok")
        async with self.arrived:
            self.calls.append(body)
            self.epochs.append(request.headers["x-gyre-epoch"])
            self.arrived.notify_all()
        if line == "stale":
            return web.json_response({"error": {"type": "stale_epoch"}}, status=409)
        if line == "failed":
            return web.json_response({"error": {"message": "out of memory"}}, status=500)
        if line == "lost":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if self.hold:
            await self.release.wait()
        return web.json_response(line(body) if callable(line) else line)

    async def _abort(self, request: web.Request) -> web.Response:
        self.aborted.append((await request.json())["rid"])
        self.abort_seen.set()
        return web.json_response({})


async def until(true: Callable[[], bool]) -> None:
    """Lets the loop run until something that has no event of its own has happened."""
    async with asyncio.timeout(5):
        while not true():
            await asyncio.sleep(0)


class World:
    """A run with one proxy, of which a test can kill and start another on the same bus."""

    def __init__(self, policy: Path, folder: Path, **proxy: Any) -> None:
        self.config = configured(policy, **proxy)
        self.broker, self.clock, self.folder = MemoryBroker(SystemClock()), SystemClock(), folder
        self.bus: Bus = MemoryBus(self.broker, RUN, name="test")
        self.context: Context | None = None
        self.instance = "proxy"
        self._task: asyncio.Task[None] | None = None
        self._said = 0
        self.session = aiohttp.ClientSession()

    async def start(self, bus: Bus | None = None) -> None:
        context = Context(
            bus=bus or MemoryBus(self.broker, RUN, name="proxy"),
            clock=self.clock,
            started=RunStarted(seed=0, config=self.config, tasks=[], code="test"),
            run=RUN,
            service="proxy",
            instance=self.instance,
            folder=self.folder,
            cache=self.folder,
            here=self.folder,
            secret=SECRET,
        )
        self.context = context
        before = await self.bus.last_seq(streams.log_stream(RUN))
        self._task = asyncio.create_task(serve(context))
        joined = asyncio.create_task(self.event("service.joined", after=before))
        await asyncio.wait({self._task, joined}, return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            joined.cancel()
            self._task.result()

    async def kill(self) -> None:
        """The process is gone: nothing is said, nothing is aborted, connections break."""
        assert self._task and self.context
        await self.context.bus.close()
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError, BaseExceptionGroup):
            await self._task
        await self.context.health.stop()
        self._task = None

    async def stop(self) -> None:
        if self._task and self.context:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            await self.context.health.stop()
        await self.session.close()
        await self.bus.close()

    def flight(self, execution: str = EXECUTION) -> Flight:
        """The only call in flight of an execution."""
        assert self.context
        (flight,) = self.context.health.app[DESK].open[execution].flights.values()
        return flight

    @property
    def url(self) -> str:
        assert self.context
        return self.context.health.url

    async def say(self, owner: str, kind: str, entity: str, data: Value) -> int:
        self._said += 1
        return await self.bus.publish(
            streams.log_stream(RUN),
            streams.subject(RUN, owner, kind, entity),
            codec.encode(
                id=f"t-{self._said}",
                run=RUN,
                kind=kind,
                entity=entity,
                owner=owner,
                instance="",
                causation=0,
                data=data,
            ),
            msg_id=f"t-{self._said}",
        )

    async def join(self, cell: str, engine: Engine) -> None:
        await self.say(
            "rollout",
            "cell.joined",
            cell,
            CellJoined(index=0, capacity=8, url=engine.url, engine="scripted", version=engine.version, capabilities=[]),
        )

    async def place(
        self, execution: str = EXECUTION, *, cell: str = "cell-0", epoch: int = 1, attempt: int = 0
    ) -> None:
        await self.say(
            "scheduler", "execution.placed", execution, ExecutionPlaced(cell=cell, epoch=epoch, attempt=attempt)
        )

    async def move(self, source: str, target: str, epoch: int, execution: str = EXECUTION) -> None:
        await self.say(
            "scheduler",
            "route.moved",
            execution,
            RouteMoved(source=source, target=target, epoch=epoch, kv="recomputed"),
        )

    async def finish(self, execution: str = EXECUTION, attempt: int = 0) -> None:
        await self.say(
            "harness",
            "execution.finished",
            execution,
            ExecutionFinished(
                attempt=attempt, reason="completed", exit_code=0, seconds=1.0, workspace="", workspace_digest=""
            ),
        )

    async def event(self, kind: str, *, after: int = 0) -> Event:
        async for stored in self.bus.read(streams.log_stream(RUN), after):
            event = codec.decode(stored)
            if event.kind == kind:
                return event
        raise AssertionError("the log ended")

    async def events(self, kind: str) -> list[Event]:
        end = await self.bus.last_seq(streams.log_stream(RUN))
        found = [codec.decode(s) async for s in self.bus.read_range(streams.log_stream(RUN), 0, end)]
        return [event for event in found if event.kind == kind]

    async def records(self) -> list[RecordEntry]:
        end = await self.bus.last_seq(streams.records_stream(RUN))
        return [decode_record(s.data) async for s in self.bus.read_range(streams.records_stream(RUN), 0, end)]

    def headers(self, execution: str = EXECUTION, attempt: int = 0, agent: str = "") -> dict[str, str]:
        token = make_token(SECRET, execution, attempt)
        return {"authorization": f"Bearer {token}", **({"x-claude-code-agent-id": agent} if agent else {})}

    def post(self, body: dict[str, Any], path: str = "/v1/messages?beta=true", **who: Any) -> Any:
        return self.session.post(self.url + path, json=body, headers=self.headers(**who))

    async def ask(self, body: dict[str, Any], **who: Any) -> dict[str, Any]:
        """The answer, put together from the stream when it is one."""
        async with self.post(body, **who) as response:
            if not body.get("stream"):
                answer: dict[str, Any] = await response.json()
                assert response.status == 200, answer
                return answer
            assert response.status == 200
            return assemble(parse_events(await response.read()))


def parse_events(data: bytes) -> list[dict[str, Any]]:
    """Events of a stream, each framed as `event: TYPE`, one `data:` line and an empty line."""
    events = []
    for frame in data.decode().split("\n\n")[:-1]:
        name, line = frame.split("\n")
        event = json.loads(line.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def assemble(events: list[dict[str, Any]]) -> dict[str, Any]:
    """A message from its events, strict about their order."""
    assert events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop"
    message = events[0]["message"]
    opened: str | None = None
    for event in events[1:-1]:
        match event["type"]:
            case "ping":
                assert opened is None
            case "content_block_start":
                assert opened is None and event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                opened = ""
            case "content_block_delta":
                assert opened is not None and event["index"] == len(message["content"]) - 1
                delta, block = event["delta"], message["content"][-1]
                if delta["type"] == "input_json_delta":
                    assert block["type"] == "tool_use" and block["input"] == {}
                    opened += delta["partial_json"]
                else:
                    field = delta["type"].removesuffix("_delta")
                    assert block["type"] == field
                    block[field] += delta[field]
            case "content_block_stop":
                if message["content"][-1]["type"] == "tool_use":
                    message["content"][-1]["input"] = json.loads(opened or "{}")
                opened = None
            case "message_delta":
                assert opened is None
                message.update(event["delta"])
                message["usage"] = event["usage"]
            case other:
                raise AssertionError(f"unexpected {other}")
    return message


TOOLS = [{"name": "bash", "description": "Run.", "input_schema": {"type": "object", "properties": {}}}]


def body_of(*messages: Any, system: Any = "You are.", stream: bool = False, **more: Any) -> dict[str, Any]:
    """A request; strings alternate between user and assistant."""
    roles = ("user", "assistant")
    listed = [
        m if isinstance(m, dict) and "role" in m else {"role": roles[i % 2], "content": m}
        for i, m in enumerate(messages)
    ]
    extra = {"stream": True} if stream else {}
    return {"model": "policy", "max_tokens": 300, "system": system, "tools": TOOLS, "messages": listed, **extra, **more}


def result_of(call: dict[str, Any], text: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call["id"], "content": text}


@pytest.fixture
async def engine(tokenizer: ChatTokenizer) -> AsyncIterator[Engine]:
    started = await Engine(tokenizer).start()
    yield started
    started.release.set()
    await started.stop()


MakeWorld = Callable[..., Any]


@pytest.fixture
async def make_world(policy: Path, tmp_path: Path, engine: Engine) -> AsyncIterator[MakeWorld]:
    """Makes the world: a proxy that serves, one cell with the scripted engine, one execution placed on it."""
    made: list[World] = []

    async def make(**proxy: Any) -> World:
        world = World(policy, tmp_path, **proxy)
        await world.bus.open_run()
        await world.join("cell-0", engine)
        await world.place()
        await world.start()
        made.append(world)
        return world

    yield make
    engine.release.set()
    for world in made:
        await world.stop()


@pytest.fixture
async def world(make_world: MakeWorld) -> World:
    made: World = await make_world()
    return made
