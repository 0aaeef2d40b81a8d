"""The real Qwen Code does a whole task over Chat Completions: its tree is right, its tokens are exact, moves are not seen."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from services.mesh.chat import ChatTokenizer
from tests.harnesses.checks import calls_are_unique, keeps, prints_no_end, shape, was_moved
from tests.harnesses.conftest import Program
from tests.harnesses.counting import DONE
from tests.harnesses.qwen_code import rules, run_qwen
from tests.harnesses.stage import Mover, staged

pytestmark = [pytest.mark.harness, pytest.mark.timeout(600)]


@pytest.mark.parametrize(("seed", "restarts", "cuts"), [(None, 0, 0), (1, 0, 0), (30, 2, 2)])
async def test_a_task_with_parallel_tools_sub_agents_and_a_compaction(
    program: Program, policy: Path, tokenizer: ChatTokenizer, tmp_path: Path, seed: int | None, restarts: int, cuts: int
) -> None:
    path = program("qwen-code")
    work = tmp_path / "files"
    work.mkdir()
    async with staged(policy, tokenizer, tmp_path, rules(work)) as stage:
        async with (
            nullcontext() if seed is None else Mover(stage, seed=seed, often=0.6, restarts=restarts, cuts=cuts).moving()
        ):
            said = await run_qwen(stage, path)
        records = await stage.check()
    assert said == DONE
    by_name = stage.by_name(records)
    # The two sub-agents may come back together or one after the other.
    lines = [line.replace("one-back > ", "") for line in shape(by_name)]
    assert lines == [
        "main-summary: look > spawn > waiting > read > read-on > last > summary",
        "main: end",
        "sub-agent: count-a > counted-a",
        "sub-agent: count-b > counted-b",
    ]
    was_moved(stage, records, seed is not None)
    assert (stage.moves["restart"] > 0, stage.moves["cut"] > 0) == (restarts > 0, cuts > 0)
    calls_are_unique(records, 10)
    prints_no_end(by_name["spawn"], tokenizer)
    keeps(by_name["end"].input_ids, by_name["last"].output_ids)
