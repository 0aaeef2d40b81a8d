"""The real OpenCode does a whole task over Chat Completions: its tree is right, its tokens are exact, moves are not seen."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from services.mesh.chat import ChatTokenizer
from tests.harnesses.checks import calls_are_unique, prints_no_end, shape, was_moved
from tests.harnesses.conftest import Program
from tests.harnesses.counting import DONE
from tests.harnesses.opencode import rules, run_opencode
from tests.harnesses.stage import Mover, staged

pytestmark = [pytest.mark.harness, pytest.mark.timeout(600)]


@pytest.mark.parametrize("seed", [None, 1])
async def test_a_task_with_parallel_tools_sub_agents_and_a_helper(
    program: Program, policy: Path, tokenizer: ChatTokenizer, tmp_path: Path, seed: int | None
) -> None:
    path = program("opencode")
    async with staged(policy, tokenizer, tmp_path, rules()) as stage:
        async with nullcontext() if seed is None else Mover(stage, seed=seed, often=0.6).moving():
            assert await run_opencode(stage, path) == DONE
        records = await stage.check()
    by_name = stage.by_name(records)
    assert shape(by_name) == [
        "main: look > spawn > end",
        "sub-agent: count-a > counted-a",
        "sub-agent: count-b > counted-b",
        "sub-agent: title",
    ]
    was_moved(stage, records, seed is not None)
    calls_are_unique(records, 6)
    prints_no_end(by_name["spawn"], tokenizer)
    agents = [by_name[name].agent for name in ("look", "title", "count-a", "count-b")]
    assert agents[:2] == ["", "helper"] and len(set(agents)) == 4
