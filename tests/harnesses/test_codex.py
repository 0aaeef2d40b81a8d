"""The real Codex does a whole task over the Responses API: its tree is right, its tokens are exact, moves are not seen."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from services.mesh.chat import ChatTokenizer
from tests.harnesses.checks import calls_are_unique, prints_no_end, shape, was_moved
from tests.harnesses.codex import rules, run_codex
from tests.harnesses.conftest import Program
from tests.harnesses.counting import DONE
from tests.harnesses.stage import Mover, staged

pytestmark = [pytest.mark.harness, pytest.mark.timeout(400)]  # an installation may be waited for


@pytest.mark.parametrize(("seed", "restarts", "cuts"), [(None, 0, 0), (1, 0, 0), (30, 3, 3)])
async def test_a_task_with_parallel_tools_sub_agents_and_a_compaction(
    program: Program, policy: Path, tokenizer: ChatTokenizer, tmp_path: Path, seed: int | None, restarts: int, cuts: int
) -> None:
    path = program("codex")
    async with staged(policy, tokenizer, tmp_path, rules()) as stage:
        async with (
            nullcontext() if seed is None else Mover(stage, seed=seed, often=0.6, restarts=restarts, cuts=cuts).moving()
        ):
            assert await run_codex(stage, path) == DONE
        records = await stage.check()
    by_name = stage.by_name(records)
    # A compaction is asked for without tools, so its prompt continues nothing.
    assert shape(by_name) == [
        "main-summary: summary",
        "main: end",
        "main: look > spawn > wait > read > last",
        "sub-agent: count-a > counted-a",
        "sub-agent: count-b > counted-b",
    ]
    was_moved(stage, records, seed is not None)
    assert (stage.moves["restart"] > 0, stage.moves["cut"] > 0) == (restarts > 0, cuts > 0)
    calls_are_unique(records, 10)
    prints_no_end(by_name["spawn"], tokenizer)
    agents = {record.agent for record in records} - {""}
    assert len(agents) == 2 and all(agent.count("-") == 4 for agent in agents), "not the ids of their threads"
