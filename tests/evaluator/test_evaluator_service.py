"""What the evaluator says of a workspace: scores, failures and their reasons, with real test scripts on a memory bus."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest
import zstandard

from services.evaluator.service import serve
from tests.evaluator.world import EVALUATION, EXECUTION, answer, request, world_of, writes
from tests.harness.agents import alive, file_of
from tests.mesh.virtual_clock import VirtualClock
from tests.mesh.workers import FULL_REWARD, make_task, serving


async def answered(folder: Path, tests: str, **settings: Any) -> Any:
    world = await world_of(folder, tests, **settings)
    async with serving(serve, world.context("evaluator")):
        await request(world)
        return await answer(world)


@pytest.mark.parametrize(("reward", "score"), [("1", 1.0), ("0", 0.0), ("0.25\n", 0.25), (" .5 ", 0.5), ("1e-2", 0.01)])
async def test_partial_rewards(tmp_path: Path, reward: str, score: float) -> None:
    assert (await answered(tmp_path, writes(reward))).score == score


async def test_a_score_says_what_was_evaluated(tmp_path: Path) -> None:
    tests = '[ "$(cat out.txt)" = ada ] && [ -f "$(dirname "$0")/test.sh" ] && ' + FULL_REWARD + "exit 7"
    world = await world_of(tmp_path, tests)
    async with serving(serve, world.context("evaluator")):
        seq = await request(world, branch=4)
        scored = await answer(world)
    assert (scored.score, scored.valid, scored.branch) == (1.0, True, 4)
    assert (scored.execution, scored.attempt, scored.reference) == (EXECUTION, 1, f"workspace/{EXECUTION}.1")
    assert scored.workspace_digest == (await world.events("evaluation.requested"))[0].data.workspace_digest
    claimed, said = await world.events("evaluation.claimed", "evaluation.scored")
    assert (claimed.data.evaluator, claimed.causation, said.causation) == ("evaluator", seq, seq)
    assert said.id == f"q-{EVALUATION}-1.scored.1"
    assert os.listdir(tmp_path / "evaluations" / "evaluator") == []


async def test_json_rewards(tmp_path: Path) -> None:
    tests = """echo '{"reward": 0.75, "more": "text"}' > "$VERIFIER_LOGS/reward.json"\n"""
    assert (await answered(tmp_path, tests)).score == 0.75


@pytest.mark.parametrize(
    ("tests", "reason"),
    [
        ("exit 1", "no_reward"),
        (writes(""), "bad_reward"),
        (writes("nan"), "bad_reward"),
        (writes("good"), "bad_reward"),
        (writes("0.5 0.5"), "bad_reward"),
        (writes("-0.1"), "reward_out_of_range"),
        (writes("1.0001"), "reward_out_of_range"),
        (writes("inf"), "reward_out_of_range"),
        ("head -c 9000 /dev/zero > $VERIFIER_LOGS/reward.txt", "bad_reward"),
        ("printf '\\xff' > $VERIFIER_LOGS/reward.txt", "bad_reward"),
        ("mkfifo $VERIFIER_LOGS/reward.txt", "bad_reward"),
        ("mkdir $VERIFIER_LOGS/reward.txt", "bad_reward"),
        ("echo 1 > x; ln -s $PWD/x $VERIFIER_LOGS/reward.txt", "bad_reward"),
        ('echo \'{"reward": "1"}\' > $VERIFIER_LOGS/reward.json', "bad_reward"),
        ("echo '[]' > $VERIFIER_LOGS/reward.json", "bad_reward"),
        ("rm -r $VERIFIER_LOGS", "no_reward"),
    ],
)
async def test_what_is_no_reward_fails_with_a_code(tmp_path: Path, tests: str, reason: str) -> None:
    failed = await answered(tmp_path, tests)
    assert (failed.reason, failed.tries) == (reason, 1)


async def test_a_timeout_ends_the_tests_and_their_children(tmp_path: Path) -> None:
    clock = VirtualClock()
    tests = f'setsid sleep 600 & echo $! > "{tmp_path}/child"; echo $$ > "{tmp_path}/up"; ' + FULL_REWARD + "wait"
    world = await world_of(tmp_path, tests, toml="[verifier]\ntimeout_sec = 7\n", clock=clock)
    async with serving(serve, world.context("evaluator")):
        await request(world)
        pids = [int(await file_of(tmp_path / name)) for name in ("child", "up")]
        clock.advance(7_000_000)
        failed = await answer(world)
    assert failed.reason == "timeout"
    assert not any(alive(pid) for pid in pids)


@pytest.mark.parametrize("name", ["../evil", "/evil", "sub/../../evil"])
async def test_a_hostile_workspace_is_refused(tmp_path: Path, name: str) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.addfile(tarfile.TarInfo(name))
    world = await world_of(tmp_path, FULL_REWARD)
    async with serving(serve, world.context("evaluator")):
        await request(world, data=zstandard.ZstdCompressor().compress(buffer.getvalue()))
        assert (await answer(world)).reason == "workspace_refused"
    assert list(tmp_path.rglob("evil")) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"workspace": "workspace/none"}, "no_workspace"),
        ({"workspace": ""}, "no_workspace"),
        ({"workspace_digest": "0" * 64}, "workspace_damaged"),
        ({"task": "none"}, "no_task"),
        ({"task_digest": "0" * 64}, "task_changed"),
    ],
)
async def test_a_request_that_does_not_fit(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    world = await world_of(tmp_path, FULL_REWARD)
    async with serving(serve, world.context("evaluator")):
        await request(world, **changes)
        assert (await answer(world)).reason == reason


async def test_a_changed_task_is_not_scored(tmp_path: Path) -> None:
    world = await world_of(tmp_path, writes("0"))
    (tmp_path / "tasks" / "card" / "tests" / "test.sh").write_text(FULL_REWARD)
    async with serving(serve, world.context("evaluator")):
        await request(world)
        assert (await answer(world)).reason == "task_changed"


async def test_asked_again_after_a_failure(tmp_path: Path) -> None:
    tests = f'[ -f "{tmp_path}/second" ] && ' + FULL_REWARD
    world = await world_of(tmp_path, tests)
    async with serving(serve, world.context("evaluator")):
        await request(world)
        assert (await answer(world)).reason == "no_reward"
        (tmp_path / "second").touch()
        await request(world, tries=2)
        assert (await world.wait("evaluation.scored")).data.score == 1.0
    claims = await world.events("evaluation.claimed")
    assert [claim.id for claim in claims] == [f"q-{EVALUATION}-{tries}.claimed.{tries}.evaluator" for tries in (1, 2)]


async def test_a_held_out_task_is_scored_by_its_own_tests(tmp_path: Path) -> None:
    make_task(tmp_path / "held-out" / "card", tests=writes("0.25"))
    world = await world_of(tmp_path, writes("1.0"))
    async with serving(serve, world.context("evaluator")):
        await request(world, held_out=True, task_digest=world.held_out[0].digest)
        assert (await answer(world)).score == 0.25
        await request(world, evaluation="v-000000.01-1")
        assert (await answer(world, "v-000000.01-1")).score == 1.0
