"""Against the real reference engine, a process with random weights: whatever it samples is recorded and continued."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from schemas.events import CellJoined
from schemas.records import CallRecord
from services.mesh.chat import load_tokenizer
from services.mesh.weights.layout import Qwen3Config
from services.rollout.reference.model import initialise, save
from tests.proxy.bodies import body_of, result_of
from tests.proxy.conftest import write_tokenizer
from tests.proxy.world import World


@pytest.fixture
async def cell(tmp_path: Path) -> AsyncIterator[tuple[Path, str]]:
    """Folder of a random policy, and the address of an engine that serves it."""
    folder = tmp_path / "random"
    write_tokenizer(folder)
    tokenizer = load_tokenizer(folder)
    config = Qwen3Config(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=4096,
        rope_theta=1e4,
        eos_token_id=tokenizer.eos_token_id,
    )
    save(folder, initialise(config, seed=0), config)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.rollout.reference", "--model", str(folder)),
        *("--port-file", str(tmp_path / "port"), "--weight-version", "3"),
    )
    try:
        async with asyncio.timeout(25):
            while not (tmp_path / "port").exists():
                assert process.returncode is None, "the engine ended"
                await asyncio.sleep(0.02)
        yield folder, f"http://127.0.0.1:{(tmp_path / 'port').read_text().strip()}"
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def test_the_engine_stops_at_a_text(cell: tuple[Path, str], tmp_path: Path) -> None:
    folder, url = cell
    tokenizer = load_tokenizer(folder)
    world = World(folder, tmp_path)
    await world.bus.open_run()
    joined = CellJoined(index=0, capacity=8, url=url, engine="reference", version=3, capabilities=[])
    await world.say("rollout", "cell.joined", "cell-0", joined)
    await world.place()
    await world.start()
    try:
        answer = await world.ask(body_of("task", stop_sequences=list("abcdefghijklmnopqrst")))
        (record,) = await world.records()
        assert isinstance(record, CallRecord)
        text = tokenizer.decode(record.output_ids)
        assert text.endswith(answer["stop_sequence"]) and not set(text[:-1]) & set("abcdefghijklmnopqrst")
        async with world.session.get(url + "/server_info") as response:
            totals = (await response.json())["totals"]
        assert totals["generated_tokens"] == len(record.output_ids)  # none was sampled in vain
    finally:
        await world.stop()


async def test_whatever_is_sampled_is_recorded_and_continued(cell: tuple[Path, str], tmp_path: Path) -> None:
    folder, url = cell
    world = World(folder, tmp_path)
    await world.bus.open_run()
    await world.say(
        "rollout",
        "cell.joined",
        "cell-0",
        CellJoined(index=0, capacity=8, url=url, engine="reference", version=3, capabilities=[]),
    )
    await world.place()
    await world.start()

    async def talk(number: int) -> None:
        messages: list[Any] = [f"task {number}"]
        for turn in range(4):
            body = body_of(*messages, max_tokens=40 if turn % 2 else 300, stream=bool(number % 2))
            content = (await world.ask(body, agent=f"a{number}"))["content"]
            calls = [block for block in content if block["type"] == "tool_use"]
            messages += [content, [result_of(call, "out") for call in calls] or f"go on {turn}"]

    try:
        await asyncio.gather(*(talk(number) for number in range(4)))
        records = [record for record in await world.records() if isinstance(record, CallRecord)]
        assert len(records) == 16
        # Every conversation is one branch: whatever the policy says, its next turn continues its ids.
        assert sum(record.parent is None for record in records) == 4
        for record in records:
            assert len(record.output_ids) == len(record.logprobs) and record.versions[0].version == 3
            assert all(logprob < 0 for logprob in record.logprobs)
        assert {record.finish for record in records} == {"stop", "length"}
        await world.finish()
        assert (await world.event("execution.sealed")).data.records == 16
    finally:
        await world.stop()
