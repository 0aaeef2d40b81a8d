"""Who evaluates, and when: claims of several evaluators and of processes that died, retries, and the end of the run."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from schemas import streams
from schemas.events import EvaluationClaimed, EvaluationFailed, GroupReady, RunFinished, ServiceJoined
from schemas.ids import evaluation_id, execution_id
from services.evaluator.book import LONGEST_RETRY_S, RETRY_S
from services.evaluator.service import CLAIM_REST_S, serve
from services.mesh.codec import decode
from services.mesh.memory_bus import MemoryBus
from tests.evaluator.world import EVALUATION, EXECUTION, answer, request, world_of, writes
from tests.harness.agents import alive, file_of
from tests.mesh.virtual_clock import VirtualClock
from tests.mesh.workers import FULL_REWARD, serving


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


async def test_what_failed_before_is_not_said_again(tmp_path: Path) -> None:
    """The process before it had the same try, and is heard late: its failure answers the try, also for whoever runs it now."""
    os.mkfifo(tmp_path / "gate")
    world = await world_of(tmp_path, f'echo $$ > "{tmp_path}/up"; : < "{tmp_path}/gate"')
    async with serving(serve, world.context("evaluator")):
        await request(world)
        pid = int(await file_of(tmp_path / "up"))
        failed = EvaluationFailed(execution=EXECUTION, attempt=1, reason="timeout", tries=1)
        await world.say("evaluator", "evaluation.failed", EVALUATION, failed, id="heard-late")
        gate = os.open(tmp_path / "gate", os.O_RDWR)
        while alive(pid):
            await asyncio.sleep(0.002)
        await request(world, evaluation="v-000000.01-1")
        await answer(world, "v-000000.01-1")
        os.close(gate)
    said = [event.data.reason for event in await world.events("evaluation.failed") if event.entity == EVALUATION]
    assert said == ["timeout"]


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
