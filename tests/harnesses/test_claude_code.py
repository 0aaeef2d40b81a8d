"""The real Claude Code does a whole task through the proxy: its tree is right, its tokens are exact, moves are not seen.

Version 2.1.220 runs sub-agents in the background and keeps its last turn over a compaction; 2.1.112 does neither, and
names no sub-agent in its headers.
"""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path

import pytest

from services.mesh.chat import ChatTokenizer
from tests.harnesses.checks import calls_are_unique, keeps, prints_no_end, shape, was_moved
from tests.harnesses.claude_code import rules, run_claude
from tests.harnesses.conftest import Program
from tests.harnesses.counting import DONE
from tests.harnesses.stage import Mover, staged

pytestmark = [pytest.mark.harness, pytest.mark.timeout(400)]  # an installation may be waited for

LATER, EARLIER = "claude-code", "claude-code-js"
SHAPES = {
    # The summary is asked for without the last turn, which is kept; what the summary begins is a tree of its own.
    LATER: [
        "main-summary: look > spawn > waiting > read > read-on > summary",
        "main: end",
        "main: look > spawn > waiting > read > read-on > last",
        "sub-agent: count-a > counted-a",
        "sub-agent: count-b > counted-b",
    ],
    EARLIER: [
        "main-summary: look > spawn > read > read-on > last > summary",
        "main: end",
        "sub-agent: count-a > counted-a",
        "sub-agent: count-b > counted-b",
    ],
}


@pytest.mark.parametrize(
    ("name", "seed", "restarts", "cuts"),
    [(EARLIER, None, 0, 0), (EARLIER, 3, 2, 2), (LATER, None, 0, 0), (LATER, 0, 0, 0), (LATER, 61, 3, 3)],
)
async def test_a_task_with_parallel_tools_sub_agents_and_a_compaction(
    program: Program,
    policy: Path,
    tokenizer: ChatTokenizer,
    tmp_path: Path,
    name: str,
    seed: int | None,
    restarts: int,
    cuts: int,
) -> None:
    path = program(name)
    async with staged(policy, tokenizer, tmp_path, rules(waits=name == LATER)) as stage:
        async with (
            nullcontext() if seed is None else Mover(stage, seed=seed, often=0.6, restarts=restarts, cuts=cuts).moving()
        ):
            report = await run_claude(stage, path)
        records = await stage.check()
    assert report["result"] == DONE
    by_name = stage.by_name(records)
    # The two sub-agents may come back together or one after the other.
    lines = [line.replace("one-back > ", "") for line in shape(by_name)]
    assert lines == SHAPES[name]
    was_moved(stage, records, seed is not None)
    assert (stage.moves["restart"] > 0, stage.moves["cut"] > 0) == (restarts > 0, cuts > 0)
    calls_are_unique(records, 10)
    prints_no_end(by_name["spawn"], tokenizer)
    if name == LATER:
        keeps(by_name["end"].input_ids, by_name["last"].output_ids)
        agents = {record.agent for record in records} - {""}
        assert len(agents) == 2 and all(re.fullmatch("a[0-9a-f]{16}", agent) for agent in agents)
