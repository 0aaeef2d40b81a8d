"""The adapter over a real engine process: what a cell relies on when it leaves and comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from schemas.config import Rollout
from schemas.errors import EngineError
from services.mesh.weights.transport import open_transport
from services.rollout.adapter import EngineDied, ReferenceAdapter
from services.rollout.reference.model import Qwen3, flatten


@pytest.fixture
async def adapter(folder: Path, tmp_path: Path) -> AsyncIterator[ReferenceAdapter]:
    config = Rollout(context_length=8192, kv_tokens=16384)
    made = ReferenceAdapter(config=config, model=folder, max_running=8, folder=tmp_path / "engine")
    await made.start()
    yield made
    await made.stop()


async def generate(adapter: ReferenceAdapter, rid: str, new: int) -> dict[str, Any]:
    params = {"max_new_tokens": new, "temperature": 1.0, "ignore_eos": True}
    body = {"rid": rid * 32, "input_ids": [1, 2, 3], "sampling_params": params, "return_logprob": True}
    status, answer = await adapter.generate(msgspec.json.encode(body))
    assert status == 200
    decoded: dict[str, Any] = msgspec.json.decode(answer)
    return decoded


async def running(adapter: ReferenceAdapter, count: int) -> None:
    """Until the engine has so many requests; each question passes between two of its steps."""
    assert adapter._http
    while True:
        async with adapter._http.get(f"{adapter._url}/v1/loads") as response:
            (load,) = (await response.json())["loads"]
        if load["num_running_reqs"] == count:
            return


async def test_all_are_ended_with_what_they_have_and_memory_comes_and_goes(
    adapter: ReferenceAdapter, other_model: Qwen3
) -> None:
    calls = [asyncio.create_task(generate(adapter, rid, 8000)) for rid in "ab"]
    await running(adapter, 2)
    await adapter.abort_all()
    for answer in await asyncio.gather(*calls):
        meta = answer["meta_info"]
        assert meta["finish_reason"]["type"] == "abort"
        assert len(answer["output_ids"]) == len(meta["output_token_logprobs"]) == meta["completion_tokens"]
    # A call whose caller goes away in this very moment doesn't keep the memory.
    late = asyncio.create_task(generate(adapter, "c", 8000))
    await running(adapter, 1)
    late.cancel()
    await adapter.release_memory()
    await adapter.resume_memory()
    transport = open_transport("shared-memory")
    flat = flatten(other_model).numpy()
    address = transport.expose(np.ascontiguousarray(flat), version=5)
    await adapter.pull_weights(msgspec.to_builtins(address), 5)
    answer = await generate(adapter, "d", 4)
    assert len(answer["output_ids"]) == 4 and answer["meta_info"]["weight_version"] == "5"
    await asyncio.gather(late, return_exceptions=True)
    transport.close()


async def test_an_engine_that_dies_with_a_call_is_told_apart_from_one_that_is_gone_or_stopped(
    adapter: ReferenceAdapter,
) -> None:
    call = asyncio.create_task(generate(adapter, "a", 8000))
    await running(adapter, 1)
    assert adapter._process
    adapter._process.kill()
    with pytest.raises(EngineDied):
        await call
    await adapter.died()
    with pytest.raises(EngineError) as gone:
        await generate(adapter, "b", 1)
    assert not isinstance(gone.value, EngineDied)
    await adapter.stop()
    await adapter.start()
    call = asyncio.create_task(generate(adapter, "c", 8000))
    await running(adapter, 1)
    await adapter.stop()
    with pytest.raises(EngineError) as stopped:
        await call
    assert not isinstance(stopped.value, EngineDied)
