"""A sampled answer that moves between two real engines in float64 has the log-probabilities of one fresh scoring."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import torch

from schemas.events import CellJoined
from schemas.records import CallRecord
from services.mesh.chat import load_tokenizer
from services.mesh.weights.layout import Qwen3Config
from services.rollout.reference.model import initialise, load, save
from tests.proxy.bodies import body_of
from tests.proxy.conftest import write_tokenizer
from tests.proxy.world import World

MOVE_AFTER = 12
"""Tokens that an engine has sampled at least before the call moves on."""


class Cell:
    """One engine process, which a test stops and continues between two tokens."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, http: aiohttp.ClientSession) -> None:
        self.process, self.url, self._http = process, url, http

    async def generated(self) -> int:
        async with self._http.get(f"{self.url}/server_info") as response:
            return int((await response.json())["totals"]["generated_tokens"])

    async def pause(self) -> None:
        """Calls stay where they are; aborts are still heard."""
        async with self._http.post(f"{self.url}/pause_generation", json={"mode": "in_place"}) as response:
            assert response.status == 200

    async def go_on(self) -> None:
        async with self._http.post(f"{self.url}/continue_generation") as response:
            assert response.status == 200

    async def stop_midway(self) -> None:
        """Standing still as soon as some more tokens are sampled; asking is what waits."""
        wanted = await self.generated() + MOVE_AFTER
        while await self.generated() < wanted:
            pass
        await self.pause()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "random"
    write_tokenizer(folder)
    tokenizer = load_tokenizer(folder)
    config = Qwen3Config(
        vocab_size=tokenizer.vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        rope_theta=1e4,
        eos_token_id=tokenizer.eos_token_id,
    )
    # Wider than usual, so that the distribution is far from uniform.
    save(folder, initialise(config, seed=1, std=0.2), config)
    return folder


@pytest.fixture
async def cells(folder: Path, tmp_path: Path) -> AsyncIterator[list[Cell]]:
    """Two engines over the same weights, which they call version 3 and 4."""
    processes = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.rollout.reference", "--model", str(folder), "--dtype", "float64"),
            *("--port-file", str(tmp_path / f"port{index}"), "--weight-version", str(3 + index)),
        )
        for index in range(2)
    ]
    try:
        async with asyncio.timeout(60), aiohttp.ClientSession() as http:
            while not all((tmp_path / f"port{index}").exists() for index in range(2)):
                assert all(process.returncode is None for process in processes), "an engine ended"
                await asyncio.sleep(0.02)
            ports = [(tmp_path / f"port{index}").read_text().strip() for index in range(2)]
            yield [
                Cell(process, f"http://127.0.0.1:{port}", http) for process, port in zip(processes, ports, strict=True)
            ]
    finally:
        for process in processes:
            if process.returncode is None:
                process.terminate()
            await process.wait()


def score(folder: Path, prompt: list[int], output: list[int]) -> list[float]:
    """Log-probabilities of `output` after `prompt` by one forward pass of the whole sequence."""
    model = load(folder, torch.float64)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + output]))[0, len(prompt) - 1 : -1]
    scored: list[float] = logits.log_softmax(-1).gather(1, torch.tensor(output)[:, None]).squeeze(1).tolist()
    return scored


async def test_a_moved_answer_scores_as_if_it_had_never_moved(cells: list[Cell], folder: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    world = World(folder, tmp_path)
    await world.bus.open_run()
    for index, cell in enumerate(cells):
        joined = CellJoined(
            index=index, capacity=8, url=cell.url, engine="reference", version=3 + index, capabilities=[]
        )
        await world.say("rollout", "cell.joined", f"cell-{index}", joined)
    await world.place()
    await world.start()
    zero, one = cells
    try:
        ask = asyncio.create_task(world.ask(body_of("say something long", max_tokens=400)))
        await zero.stop_midway()
        await world.move("cell-0", "cell-1", 2)
        await one.stop_midway()
        await zero.go_on()
        await world.move("cell-1", "cell-0", 3)
        await ask
        (record,) = await world.records()
    finally:
        await world.stop()
    assert isinstance(record, CallRecord)
    assert [span.version for span in record.versions] == [3, 4, 3]
    assert all(span.end - span.start >= MOVE_AFTER for span in record.versions[:2])
    # Each part draws from numbers of its own: it isn't the beginning of the answer again.
    first, second = (record.output_ids[span.start : span.start + MOVE_AFTER] for span in record.versions[:2])
    assert first != second
    scored = score(folder, record.input_ids, record.output_ids)
    assert max(abs(ours - theirs) for ours, theirs in zip(record.logprobs, scored, strict=True)) < 1e-9
