"""The engine as a process: SGLang's routes, refusals, aborts, memory and weight updates over real HTTP."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
import torch

from schemas.errors import EnvironmentMissing
from services.mesh.weights.transport import digest, open_transport
from services.rollout.reference import __main__ as program
from services.rollout.reference.batcher import Batcher
from services.rollout.reference.model import Qwen3, flatten, save
from services.rollout.reference.request import Request
from services.rollout.reference.worker import Worker


class Engine:
    """A client of one engine process."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session

    async def post(self, route: str, body: object = None) -> tuple[int, Any]:
        async with self.session.post(route, data=b"" if body is None else msgspec.json.encode(body)) as reply:
            return reply.status, await decoded(reply)

    async def get(self, route: str) -> tuple[int, Any]:
        async with self.session.get(route) as reply:
            return reply.status, await decoded(reply)

    async def generate(
        self, rid: str, *, new: int = 8, prompt: list[int] | None = None, **params: Any
    ) -> dict[str, Any]:
        status, answer = await self.post("/generate", generation(rid, new=new, prompt=prompt, **params))
        assert status == 200, answer
        return answer

    async def load(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The load as soon as it is as `wanted`. Asking is what waits: each question passes between two steps."""
        while True:
            load = (await self.get("/v1/loads"))[1]["loads"][0]
            if wanted(load):
                return load

    async def generated(self) -> int:
        """Tokens that the engine has sampled since its start."""
        info = (await self.get("/server_info"))[1]
        return int(info["totals"]["generated_tokens"])

    async def refusal(self, route: str, body: object) -> str:
        status, answer = await self.post(route, body)
        assert status == 400, answer
        return answer["error"]["message"]


async def decoded(reply: aiohttp.ClientResponse) -> Any:
    raw = await reply.read()
    return msgspec.json.decode(raw) if reply.content_type == "application/json" and raw else raw.decode()


def generation(rid: str, *, new: int, prompt: list[int] | None = None, **params: Any) -> dict[str, Any]:
    return {
        "rid": rid,
        "input_ids": prompt or list(range(1, 41)),
        "sampling_params": {"max_new_tokens": new, "temperature": 1.0, "ignore_eos": True, **params},
        "return_logprob": True,
    }


def start(folder: Path, scratch: Path) -> tuple[subprocess.Popen[str], str]:
    """An engine process and its address."""
    port_file = scratch / "port"
    command = [
        sys.executable,
        "-m",
        "services.rollout.reference",
        "--model",
        str(folder),
        "--port-file",
        str(port_file),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    # The log line comes right after the port file.
    assert any("engine serves" in line for line in process.stdout)
    return process, f"http://127.0.0.1:{int(port_file.read_text())}"


@pytest.fixture(scope="module")
def process(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """One engine for the whole file: its start takes longer than all its tests."""
    running, base = start(folder, tmp_path_factory.mktemp("engine"))
    with running:
        yield running, base
        running.kill()


@pytest.fixture
async def engine(process: tuple[subprocess.Popen[str], str], folder: Path) -> AsyncIterator[Engine]:
    """A client of the engine, which is as new: version 0, empty cache."""
    async with aiohttp.ClientSession(process[1], timeout=aiohttp.ClientTimeout(total=30)) as session:
        client = Engine(session)
        await client.post("/update_weights_from_disk", {"model_path": str(folder), "weight_version": "0"})
        yield client


# Several seconds of generation: whatever a test does meanwhile happens while the request runs.
LONG = 8000


async def test_generate_state_and_cache(engine: Engine) -> None:
    before = await engine.generated()
    answer = await engine.generate("first", new=8, sampling_seed=3)
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 8}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (40, 8, 0)
    assert [entry[1] for entry in meta["output_token_logprobs"]] == answer["output_ids"]
    assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": 8}]
    again = await engine.generate("again", new=8, sampling_seed=3)
    assert again["output_ids"] == answer["output_ids"]
    assert again["meta_info"]["cached_tokens"] == 32
    stop = answer["output_ids"][3]
    stopped = await engine.generate("stops", new=8, sampling_seed=3, stop_token_ids=[stop])
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert stopped["output_ids"][-1] == stop
    assert (await engine.post("/flush_cache"))[0] == 200
    assert (await engine.generate("fresh", new=1))["meta_info"]["cached_tokens"] == 0
    assert (await engine.get("/health"))[0] == (await engine.get("/ready"))[0] == 200
    info = (await engine.get("/server_info"))[1]
    assert (info["state"], info["page_size"], info["max_total_num_tokens"]) == ("serving", 16, 32768)
    assert info["totals"]["generated_tokens"] - before == 8 + 8 + 4 + 1
    assert (await engine.get("/model_info"))[1]["weight_version"] == "0"


async def test_what_cannot_be_honoured_is_refused_by_name(engine: Engine) -> None:
    def body(**changes: Any) -> dict[str, Any]:
        return generation("r", new=4) | changes

    def sampling(**changes: Any) -> dict[str, Any]:
        return body(sampling_params={"max_new_tokens": 4} | changes)

    for request, said in (
        (body(colour="red"), "colour"),
        (sampling(logit_bias={"1": 2}), "logit_bias"),
        (sampling(top_p=0.9), "top_p is 0.9, only 1.0 is possible"),
        (sampling(top_k=5), "top_k"),
        (sampling(n=2), "n is 2"),
        (sampling(stop=["x"]), "stop needs no_stop_trim"),
        (sampling(stop="x", no_stop_trim=True), "there is no tokenizer"),
        (sampling(temperature=-1.0), "temperature"),
        (sampling(max_new_tokens=0), "max_new_tokens"),
        (sampling(max_new_tokens=9000), "Requested token count exceeds the model's maximum context length of 8192"),
        (body(input_ids=[]), "empty"),
        (body(input_ids=[5000]), "outside 0 .. 95"),
        (body(input_ids="text"), "Expected `array`, got `str` - at `$.input_ids`"),
        (body(stream=True), "stream"),
        (body(rid=""), "rid is empty"),
    ):
        assert said in await engine.refusal("/generate", request)
    assert "Invalid enum value 'soft'" in await engine.refusal("/pause_generation", {"mode": "soft"})
    assert "unknown memory tags" in await engine.refusal("/release_memory_occupation", {"tags": ["cuda_graph"]})


async def test_abort_and_duplicates(engine: Engine) -> None:
    running = [asyncio.ensure_future(engine.generate(f"ep-{name}", new=LONG)) for name in ("a1", "a2", "b1")]
    await engine.load(lambda load: load["num_running_reqs"] == 3)
    assert "in use" in await engine.refusal("/generate", generation("ep-a1", new=1))
    assert "3 running" in await engine.refusal("/flush_cache", None)
    assert "pause generation first" in await engine.refusal("/release_memory_occupation", {"tags": None})
    assert (await engine.post("/abort_request", {"rid": "unknown"}))[0] == 200
    assert (await engine.post("/abort_request", {"rid": "ep-a"}))[0] == 200
    for answer in await asyncio.gather(*running[:2]):
        meta = answer["meta_info"]
        assert meta["finish_reason"]["type"] == "abort"
        assert 0 < len(answer["output_ids"]) == meta["completion_tokens"] < LONG
    await engine.post("/abort_request", {"abort_all": True})
    assert (await running[2])["meta_info"]["finish_reason"]["type"] == "abort"


async def test_a_client_that_leaves_aborts_its_request(engine: Engine) -> None:
    before = await engine.generated()
    running = asyncio.ensure_future(engine.generate("leaves", new=LONG))
    await engine.load(lambda load: load["num_running_reqs"] == 1)
    running.cancel()
    await engine.load(lambda load: load["num_running_reqs"] == load["num_used_tokens"] == 0)
    assert await engine.generated() - before < LONG


async def test_pause_blocks_new_requests_until_generation_continues(engine: Engine) -> None:
    assert (await engine.post("/pause_generation", {"mode": "in_place"}))[1]["status"] == "ok"
    assert (await engine.get("/ready"))[0] == 503
    blocked = asyncio.ensure_future(engine.generate("blocked", new=4))
    await engine.load(lambda load: load["num_waiting_reqs"] == 1)
    assert not blocked.done()
    assert (await engine.post("/continue_generation", {"torch_empty_cache": True}))[1]["status"] == "ok"
    assert (await blocked)["meta_info"]["completion_tokens"] == 4


@pytest.fixture(params=["mooncake", "shared-memory"])
def transport_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_weights_arrive_by_transfer_in_mid_request(
    engine: Engine, other_model: Qwen3, transport_kind: str
) -> None:
    try:
        transport = open_transport(transport_kind)
    except EnvironmentMissing as error:
        pytest.skip(str(error))
    with transport:
        address = transport.expose(flatten(other_model).numpy(), 7)
        running = asyncio.ensure_future(engine.generate("spans", new=LONG))
        await engine.load(lambda load: load["num_running_reqs"] == 1)
        update = {"address": msgspec.to_builtins(address), "weight_version": 7, "flush_cache": True}
        status, done = await engine.post("/update_weights_from_transfer", update)
        assert (status, done["success"], done["num_retracted_requests"]) == (200, True, 1), done
        before = await engine.generated()
        while await engine.generated() == before:
            pass
        await engine.post("/abort_request", {"rid": "spans"})
        meta = (await running)["meta_info"]
        first, second = meta["weight_versions"]
        assert (first["version"], second["version"], meta["weight_version"]) == ("0", "7", "7")
        assert 0 == first["start"] < first["end"] == second["start"] < second["end"] == meta["completion_tokens"] < LONG
        assert (await engine.get("/model_info"))[1]["weight_version"] == "7"
        greedy = await engine.generate("greedy", new=6, temperature=0.0)
        assert greedy["output_ids"] == full_greedy(other_model, 6)
        lying = update | {"address": update["address"] | {"digest": digest(np.ones(1, dtype=np.float32))}}
        assert "digest" in await engine.refusal("/update_weights_from_transfer", lying)
        assert "flush_cache" in await engine.refusal("/update_weights_from_transfer", update | {"flush_cache": False})
        small = transport.expose(np.ones(3, dtype=np.float32), 8)
        refused = await engine.refusal("/update_weights_from_transfer", {"address": msgspec.to_builtins(small)})
        assert "12 bytes are exposed" in refused
    assert (await engine.get("/model_info"))[1]["weight_version"] == "7"
    assert transport_kind in (await engine.get("/server_info"))[1]["transports"]


def full_greedy(model: Qwen3, count: int) -> list[int]:
    tokens = list(range(1, 41))
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[40:]


async def test_memory_goes_down_and_up_and_weights_come_from_disk(
    engine: Engine, other_model: Qwen3, tmp_path: Path
) -> None:
    new = tmp_path / "new"
    save(new, other_model, other_model.config)
    await engine.post("/pause_generation", {"mode": "abort"})
    assert (await engine.post("/release_memory_occupation", {"tags": None}))[0] == 200
    info = (await engine.get("/server_info"))[1]
    assert (info["weight_bytes"], info["kv_bytes"]) == (0, 0)
    await engine.post("/continue_generation")
    assert (await engine.get("/ready"))[1] == {"ready": False, "state": "memory released"}
    waiting = asyncio.ensure_future(engine.generate("waits", new=6, temperature=0.0))
    await engine.load(lambda load: load["num_waiting_reqs"] == 1)
    disk = {"model_path": str(new), "weight_version": "12"}
    assert "resume the memory" in await engine.refusal("/update_weights_from_disk", disk)
    for tag in ("weights", "kv_cache"):
        assert (await engine.post("/resume_memory_occupation", {"tags": [tag]}))[0] == 200
    assert (await engine.get("/ready"))[1]["state"] == "waiting for weights"
    assert (await engine.post("/update_weights_from_disk", disk))[0] == 200
    answer = await waiting
    assert answer["output_ids"] == full_greedy(other_model, 6)
    assert answer["meta_info"]["weight_version"] == "12"
    assert "no config.json" in await engine.refusal("/update_weights_from_disk", {"model_path": str(tmp_path)})


async def test_a_signal_ends_the_process_cleanly(folder: Path, tmp_path: Path) -> None:
    process, base = await asyncio.to_thread(start, folder, tmp_path)
    with process:
        async with aiohttp.ClientSession(base) as session:
            client = Engine(session)
            running = asyncio.ensure_future(client.generate("last", new=LONG))
            await client.load(lambda load: load["num_running_reqs"] == 1)
            process.terminate()
            assert (await running)["meta_info"]["finish_reason"]["type"] == "abort"
        assert await asyncio.to_thread(process.wait) == 0


def test_bad_arguments_say_what_to_do(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--model", str(tmp_path)]) == 2
    assert "give the folder" in capsys.readouterr().err
    assert program.main(["--model", str(folder), "--context-length", "99999"]) == 2
    assert "the model was made for 8192" in capsys.readouterr().err


async def test_a_port_in_use_is_said(folder: Path) -> None:
    taken = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = taken.sockets[0].getsockname()[1]
    options = program.parse(["--model", str(folder), "--port", str(port)])
    with pytest.raises(EnvironmentMissing, match=f"port {port} cannot be opened"):
        await program.serve(options)
    taken.close()
    await taken.wait_closed()


async def test_when_the_batcher_fails_every_caller_hears_it(make_batcher: Callable[..., Batcher]) -> None:
    batcher = make_batcher()

    def broken() -> list[Request]:
        raise RuntimeError("a bug")

    batcher.step = broken  # type: ignore[method-assign]
    worker = Worker(batcher)
    worker.start()
    calls: list[Awaitable[Request]] = [
        worker.generate(Request(rid=rid, input_ids=[1], max_new_tokens=2)) for rid in ("a", "b")
    ]
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        assert "a bug" in str(outcome)
    await asyncio.wait_for(worker.failed.wait(), 5)
    await worker.stop()
