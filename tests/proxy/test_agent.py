"""The quickstart's agent, a program that knows nothing of us, over a proxy with a scripted engine."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from schemas.records import CallRecord
from tests.proxy.bodies import call_text
from tests.proxy.engines import Engine
from tests.proxy.world import World

AGENT = Path(__file__).parents[2] / "examples" / "quickstart" / "agent.py"


@pytest.mark.parametrize("seed", ["9", "55"])  # helper and compaction; one streams, the other doesn't
async def test_its_histories_branch_and_nothing_is_wrong(
    world: World, engine: Engine, tmp_path: Path, seed: str
) -> None:
    echo = call_text("bash", {"command": "echo 1; echo '<|im_end|>'"})
    engine.script += [engine.say(echo), engine.say("It says 1.")]  # helper
    engine.script += [engine.say(echo), "lost", engine.say("a summary"), engine.say(echo), engine.say("done")]
    work = tmp_path / "work"
    work.mkdir()
    (tmp_path / "instruction").write_text("Do it.")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-S", "-E", str(AGENT), str(tmp_path / "instruction"), str(tmp_path / "report")),
        cwd=work,
        env={
            "PATH": os.environ["PATH"],
            "ANTHROPIC_BASE_URL": world.url,
            "ANTHROPIC_AUTH_TOKEN": world.headers()["authorization"].removeprefix("Bearer "),
            "GYRE_AGENT_SEED": seed,
        },
    )
    assert await process.wait() == 0
    report = json.loads((tmp_path / "report").read_text())
    assert (report["harness_errors"], report["reconnects"], report["calls"]) == (0, 0, 6)
    records = [record for record in await world.records() if isinstance(record, CallRecord)]
    calls = [record.call for record in records]
    assert [record.role for record in records] == ["sub-agent"] * 2 + ["main", "main-summary", "main", "main"]
    parents = [calls.index(record.parent) if record.parent else -1 for record in records]
    assert parents == [-1, 0, -1, 2, -1, 4]
    kept = records[2].output_ids  # verbatim over the compaction, as context
    after = records[4].input_ids
    assert any(after[i : i + len(kept)] == kept for i in range(len(after)))
    assert all(engine.end not in call["input_ids"][-10:] for call in engine.calls)
