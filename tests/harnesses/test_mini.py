"""The real mini-swe-agent does a task over Chat Completions, not streamed: one path, exact tokens, moves are not seen."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from services.mesh.chat import ChatTokenizer
from tests.harnesses.checks import calls_are_unique, shape, was_moved
from tests.harnesses.conftest import Program
from tests.harnesses.mini import rules, run_mini
from tests.harnesses.stage import Mover, staged

pytestmark = [pytest.mark.harness, pytest.mark.timeout(600)]


@pytest.mark.parametrize("seed", [None, 1])
async def test_a_task_with_parallel_tools(
    program: Program, policy: Path, tokenizer: ChatTokenizer, tmp_path: Path, seed: int | None
) -> None:
    path = program("mini-swe-agent")
    async with staged(policy, tokenizer, tmp_path, rules()) as stage:
        async with nullcontext() if seed is None else Mover(stage, seed=seed, often=0.6).moving():
            assert "SUBMITTED" in await run_mini(stage, path)
        records = await stage.check()
    by_name = stage.by_name(records)
    assert shape(by_name) == ["main: look > write > end"]
    was_moved(stage, records, seed is not None)
    calls_are_unique(records, 4)
