"""The evaluator on a memory bus, with real test scripts."""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest
import zstandard

from schemas import streams
from schemas.events import EvaluationClaimed, EvaluationRequested, GroupReady, RunFinished, ServiceJoined
from schemas.ids import evaluation_id, execution_id
from services.evaluator.book import LONGEST_RETRY_S, RETRY_S
from services.evaluator.service import CLAIM_REST_S, serve
from services.mesh.codec import decode
from services.mesh.memory_bus import MemoryBus
from services.mesh.workspace import pack
from tests.harness.agents import alive, file_of
from tests.mesh.virtual_clock import VirtualClock
from tests.mesh.workers import FULL_REWARD, World, make_task, memory_world, serving

EXECUTION, EVALUATION = "e-000000.00", "v-000000.00-1"


def writes(reward: str) -> str:
    return f"printf '%s' '{reward}' > \"$VERIFIER_LOGS/reward.txt\"\n"


async def world_of(folder: Path, tests: str, *, toml: str = "", clock: Any = None, **evaluator: Any) -> World:
    make_task(folder / "tasks" / "card", tests=tests, toml=toml)
    world = memory_world(folder, {"evaluator": evaluator}, clock=clock)
    await world.begin()
    return world


async def request(world: World, *, evaluation: str = EVALUATION, data: bytes | None = None, **changes: Any) -> int:
    """Ask for an evaluation of a workspace that holds `out.txt`."""
    if data is None:
        work = world.folder / "preserved"
        work.mkdir(exist_ok=True)
        (work / "out.txt").write_text("ada\n")
        data = pack(work)
    name = streams.workspace_blob(EXECUTION, 1)
    digest = await world.bus.put_blob(name, data)
    asked: dict[str, Any] = {
        "execution": EXECUTION,
        "attempt": 1,
        "task": "card",
        "task_digest": world.tasks[0].digest,
        "workspace": name,
        "workspace_digest": digest,
    } | changes
    tries = asked.get("tries", 1)
    return await world.say(
        "trajectories", "evaluation.requested", evaluation, EvaluationRequested(**asked), id=f"q-{evaluation}-{tries}"
    )


async def answer(world: World, evaluation: str = EVALUATION) -> Any:
    """Data of the first answer to an evaluation."""
    async for stored in world.bus.read(streams.log_stream(world.bus.run), 0, subject_filter="gyre.*.evaluator.>"):
        if stored.subject.endswith((f"{evaluation}.scored", f"{evaluation}.failed")):
            return (await world.wait("evaluation." + stored.subject.rpartition(".")[2], evaluation)).data
    raise AssertionError("the log ended")


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


async def test_of_two_evaluators_one_wins_each_claim(tmp_path: Path) -> None:
    world = await world_of(tmp_path, f'echo x >> "{tmp_path}/ran"; ' + FULL_REWARD)
    assert isinstance(world.bus, MemoryBus)
    names = [f"v-000000.{index:02d}-1" for index in range(12)]
    contexts = [
        world.context("evaluator", instance=name, bus=MemoryBus(world.bus.broker, "r-1", name=name))
        for name in ("evaluator-a", "evaluator-b")
    ]
    async with serving(serve, contexts[0]), serving(serve, contexts[1]):
        for name in names:
            await request(world, evaluation=name)
        for name in names:
            assert (await answer(world, name)).score == 1.0
    claims = await world.events("evaluation.claimed")
    assert sorted(claim.entity for claim in claims) == names
    assert (tmp_path / "ran").read_text().count("x") == len(names)


async def test_at_most_so_many_at_a_time(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    tests = f'echo $$ > "{tmp_path}/up.$$"; : < "{tmp_path}/gate"; ' + FULL_REWARD
    world = await world_of(tmp_path, tests, workers=2)
    names = [f"v-000000.{index:02d}-1" for index in range(5)]
    async with serving(serve, world.context("evaluator")):
        for name in names:
            await request(world, evaluation=name)
        while len(list(tmp_path.glob("up.*"))) < 2:
            await asyncio.sleep(0.002)
        assert len(await world.events("evaluation.claimed")) == 2
        gate = os.open(tmp_path / "gate", os.O_RDWR)
        for name in names:
            assert (await answer(world, name)).score == 1.0
        os.close(gate)


async def test_what_was_claimed_and_not_answered_runs_again(tmp_path: Path) -> None:
    world = await world_of(tmp_path, FULL_REWARD)
    mine, other = EVALUATION, "v-000000.01-1"
    for evaluation, evaluator in ((mine, "evaluator"), (other, "evaluator-b")):
        await request(world, evaluation=evaluation)
        await world.say("evaluator", "evaluation.claimed", evaluation, EvaluationClaimed(evaluator=evaluator))
    async with serving(serve, world.context("evaluator")):
        await request(world, evaluation="v-000000.02-1")
        assert (await answer(world, mine)).score == 1.0
        assert (await answer(world, "v-000000.02-1")).score == 1.0
    scored = await world.events("evaluation.scored", "evaluation.failed")
    assert other not in [event.entity for event in scored]
    claims = [event for event in await world.events("evaluation.claimed") if event.entity == mine]
    assert claims[1].causation == claims[0].seq and claims[1].data.process > claims[0].data.process


async def test_a_dead_evaluators_claim_lapses_and_another_takes_it(tmp_path: Path) -> None:
    """Also the one that had claimed first, after another that took over died as well; and it is told apart by its id."""
    clock = VirtualClock()
    world = await world_of(tmp_path, FULL_REWARD, clock=clock, timeout_s=10)
    holds_us = round((2 * 10 + CLAIM_REST_S) * 1e6)
    await request(world)
    await world.say("evaluator", "evaluation.claimed", EVALUATION, EvaluationClaimed(evaluator="evaluator"), id="first")
    clock.advance(holds_us)
    seq = await world.say("evaluator", "evaluation.claimed", EVALUATION, EvaluationClaimed(evaluator="evaluator-b"))
    async with serving(serve, world.context("evaluator")):
        await request(world, evaluation="v-000000.01-1")
        await answer(world, "v-000000.01-1")
        clock.advance(holds_us - 1)
        await request(world, evaluation="v-000000.02-1")
        await answer(world, "v-000000.02-1")
        assert await world.events("evaluation.scored") == [
            event for event in await world.events("evaluation.scored") if event.entity != EVALUATION
        ], "it holds until then"
        clock.advance(1)
        assert (await answer(world)).score == 1.0
    claims = [event for event in await world.events("evaluation.claimed") if event.entity == EVALUATION]
    assert [claim.data.evaluator for claim in claims] == ["evaluator", "evaluator-b", "evaluator"]
    assert claims[-1].causation == seq


async def test_how_long_a_claim_has_held_is_known_by_anything_in_the_log(tmp_path: Path) -> None:
    """Else an evaluator that starts again and again, while nothing is evaluated, waits for a dead one without end."""
    clock = VirtualClock()
    world = await world_of(tmp_path, FULL_REWARD, clock=clock, timeout_s=10)
    await request(world)
    await world.say("evaluator", "evaluation.claimed", EVALUATION, EvaluationClaimed(evaluator="evaluator-b"))
    clock.advance(round((2 * 10 + CLAIM_REST_S) * 1e6))
    await world.say("evaluator", "service.joined", "evaluator", ServiceJoined(url="", pid=1))
    async with serving(serve, world.context("evaluator")):
        assert (await answer(world)).score == 1.0


async def test_a_claim_that_is_made_while_it_listens_lapses_too(tmp_path: Path) -> None:
    clock = VirtualClock()
    world = await world_of(tmp_path, FULL_REWARD, clock=clock, timeout_s=10, workers=1)
    # Asked for again after a failure, so that nobody may claim yet: then another evaluator does.
    async with serving(serve, world.context("evaluator")):
        await request(world, tries=2)
        await world.say("evaluator", "evaluation.claimed", EVALUATION, EvaluationClaimed(evaluator="evaluator-b"))
        await request(world, evaluation="v-000000.01-1")
        await answer(world, "v-000000.01-1")
        clock.advance(round((2 * 10 + CLAIM_REST_S) * 1e6))
        assert (await answer(world)).score == 1.0


async def test_what_a_dead_process_of_its_own_claims_late_is_claimed_again(tmp_path: Path) -> None:
    """Stored after the process that follows it joined; a later process's claim stays that one's."""
    clock = VirtualClock()
    world = await world_of(tmp_path, FULL_REWARD, clock=clock)
    late, later = EVALUATION, "v-000000.01-1"
    async with serving(serve, world.context("evaluator")):
        joined = (await world.wait("service.joined")).seq
        for evaluation, process in ((late, joined - 1), (later, joined + 1)):
            # Asked for again after a failure, so that it may not claim yet.
            await request(world, evaluation=evaluation, tries=2)
            claimed = EvaluationClaimed(evaluator="evaluator", process=process)
            await world.say("evaluator", "evaluation.claimed", evaluation, claimed)
        assert (await answer(world, late)).score == 1.0
        await request(world, evaluation="v-000000.02-1")
        await answer(world, "v-000000.02-1")
    scored = await world.events("evaluation.scored", "evaluation.failed")
    assert [event.entity for event in scored] == [late, "v-000000.02-1"]


async def test_stopping_in_the_middle_and_starting_again(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    tests = f'echo $$ >> "{tmp_path}/up"; : < "{tmp_path}/gate"; ' + writes("0.5")
    world = await world_of(tmp_path, tests)
    async with serving(serve, world.context("evaluator")):
        await request(world)
        pid = int(await file_of(tmp_path / "up"))
    assert not alive(pid)
    gate = os.open(tmp_path / "gate", os.O_RDWR)
    async with serving(serve, world.context("evaluator")):
        assert (await answer(world)).score == 0.5
    os.close(gate)
    kinds = [event.kind for event in await world.events("evaluation.claimed", "evaluation.scored", "evaluation.failed")]
    assert kinds == ["evaluation.claimed", "evaluation.claimed", "evaluation.scored"]


async def test_after_the_run_nothing_is_claimed(tmp_path: Path) -> None:
    world = await world_of(tmp_path, FULL_REWARD)
    await request(world)
    await world.say("operator", "run.finished", "r-1", RunFinished(steps=1, reason="stopped"))
    async with serving(serve, world.context("evaluator")):
        await world.wait("service.joined")
    assert await world.events("evaluation.claimed") == []


async def test_what_its_group_does_without_is_not_evaluated(tmp_path: Path) -> None:
    """Also not by an evaluator that starts again."""
    world = await world_of(tmp_path, writes("1"), workers=1)
    surplus, other = evaluation_id(execution_id(0, 1), 1), evaluation_id(execution_id(1, 0), 1)
    await request(world, evaluation=surplus, execution=execution_id(0, 1), attempt=1)
    ready = GroupReady(rewards=[], mean=0.0, std=0.0, surplus=[execution_id(0, 1)])
    await world.say("trajectories", "group.ready", "g-000000", ready)
    await request(world, evaluation=other, execution=execution_id(1, 0), attempt=1)
    async with serving(serve, world.context("evaluator")):
        await answer(world, other)
    assert [event.entity for event in await world.events("evaluation.claimed")] == [other]


async def test_what_failed_is_tried_again_later_and_later(tmp_path: Path) -> None:
    clock = VirtualClock(1)
    world = await world_of(tmp_path, "exit 1", clock=clock)
    async with serving(serve, world.context("evaluator")):
        for tries, wait_s in ((1, 0.0), (2, RETRY_S), (3, 2 * RETRY_S), (40, LONGEST_RETRY_S)):
            await request(world, tries=tries)
            if wait_s:
                while clock.next_deadline() is None:
                    await asyncio.sleep(0)
                assert clock.next_deadline() == clock.now_us() + round(wait_s * 1e6)
                clock.advance(round(wait_s * 1e6))
            async for stored in world.bus.read(
                streams.log_stream(world.bus.run), 0, subject_filter="gyre.*.evaluator.>"
            ):
                if stored.subject.endswith("failed") and decode(stored).data.tries == tries:
                    break
    claimed = [event.causation for event in await world.events("evaluation.claimed")]
    assert len(claimed) == len(set(claimed)) == 4


async def test_a_first_try_never_waits_whatever_the_clocks_say(tmp_path: Path) -> None:
    world = await world_of(tmp_path, writes("1"), clock=(clock := VirtualClock(10**12)))
    context = world.context("evaluator")
    context.clock = VirtualClock(0)
    async with serving(serve, context):
        await request(world)
        assert (await answer(world)).score == 1.0
    assert clock.now_us() == 10**12


async def test_a_held_out_task_is_scored_by_its_own_tests(tmp_path: Path) -> None:
    make_task(tmp_path / "held-out" / "card", tests=writes("0.25"))
    world = await world_of(tmp_path, writes("1.0"))
    async with serving(serve, world.context("evaluator")):
        await request(world, held_out=True, task_digest=world.held_out[0].digest)
        assert (await answer(world)).score == 0.25
        await request(world, evaluation="v-000000.01-1")
        assert (await answer(world, "v-000000.01-1")).score == 1.0
