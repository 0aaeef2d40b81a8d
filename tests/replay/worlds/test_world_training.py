"""Gradients that can be counted, and the group that adds them up while members die at any time."""

from __future__ import annotations

import asyncio
from contextvars import copy_context
from typing import Any

import pytest

from replay.virtual.life import Life
from replay.virtual.loop import VirtualLoop
from replay.worlds.disk import DAMAGED, Disk
from replay.worlds.exchange import WorldExchange
from replay.worlds.group import ANSWER_S, TIMEOUT_S, WorldGroup
from replay.worlds.training import Inline, Takes, swapped
from replay.worlds.world import CHECKPOINTS, CellScript, Flat, World
from schemas import events as e
from schemas.errors import TrainerError, TransportError
from tests.replay.worlds.training_cells import FOLDER, SCRIPT, Main, cell_of, lives, meeting, micro_step


def test_a_step_counts_each_target_once(loop: VirtualLoop, world: World) -> None:
    async def main(life: Life) -> None:
        cell, work = cell_of(world), Inline()
        await work(cell.begin_batch)
        for index, targets in enumerate((3, 5)):
            stats = await work(lambda index=index, targets=targets: cell.micro_step(micro_step(index, targets)))
            assert (stats.targets, stats.tokens, stats.masked) == (targets, targets + 1, [False])
        result = await work(cell.step)
        assert (result.version, cell.version, cell.phase) == (1, 1, "idle")
        manifest = await work(lambda: cell.save(FOLDER))
        other = cell_of(world)
        assert other.load(FOLDER) == manifest
        assert other.flat_weights().digest == cell.flat_weights().digest == manifest.digest
        world.disks[CHECKPOINTS].damage(FOLDER, swapped)
        assert cell_of(world).flaw(FOLDER, manifest.digest)
        assert cell_of(world).load(FOLDER).digest != manifest.digest
        world.disks[CHECKPOINTS].damage(FOLDER, lambda _: DAMAGED)
        with pytest.raises(TrainerError, match="isn't what was saved"):
            cell_of(world).load(FOLDER)
        other.discard(FOLDER)
        with pytest.raises(TrainerError, match="there is no checkpoint"):
            cell_of(world).load(FOLDER)
        world.disks[CHECKPOINTS].full = True
        with pytest.raises(TrainerError, match="No space left"):
            await cell.save(FOLDER)

    (life,) = lives(loop, main)
    life.ended.result()
    assert [step.gradient for step in world.steps] == [{"m-000001.000": 3, "m-000001.001": 5}]


def test_phases_are_kept(loop: VirtualLoop, world: World) -> None:
    cell = cell_of(world)
    assert isinstance(cell.release(), Takes) and cell.phase == "released"
    with pytest.raises(TrainerError, match="released can't begin"):
        cell.begin_batch()
    cell.acquire()
    cell.begin_batch()
    with pytest.raises(TrainerError, match="batch can't release"):
        cell.release()
    with pytest.raises(TrainerError, match="batch can't take weights"):
        cell.load_flat(Flat("x", 1), version=1)
    cell.drop_batch()
    cell.load_flat(Flat("x", 1), version=2)
    assert len(world.violations) == 1


@pytest.mark.parametrize("eager", [False, True])
def test_members_meet_add_up_and_get_weights(loop: VirtualLoop, world: World, eager: bool) -> None:
    script = CellScript(move_s=1, eager=eager)
    rendezvous: asyncio.Future[str] = loop.create_future()
    got: dict[int, Any] = {}

    def member(rank: int) -> Main:
        async def main(life: Life) -> None:
            group = WorldGroup(world, life, script, host=rank == 0)
            if rank == 0:
                rendezvous.set_result(group.rendezvous)
            where = await rendezvous
            for round in range(2):
                gradient = {f"m-{rank}": 10 * round + rank}
                while not await group.meet(meeting(rank, 3, where, batch=f"b-{round:06d}"), 0.2):
                    await asyncio.sleep(0)
                await group.reduce(gradient)
                flat = Flat("core", 7) if rank == 0 else Flat("mine", 6)
                await group.broadcast(flat)
                got[rank] = (dict(sorted(gradient.items())), flat.digest, flat.version)

        return main

    for life in lives(loop, member(0), member(1), member(2)):
        life.ended.result()
    assert got[0][0] == {"m-0": 10, "m-1": 11, "m-2": 12}
    assert {each[1:] for each in got.values()} == {("core", 7)}
    assert world.stores == {}


@pytest.mark.parametrize("steps", range(1, 40, 2))
def test_a_member_that_dies_fails_the_others_and_the_next_meeting_works(
    loop: VirtualLoop, world: World, steps: int
) -> None:
    rendezvous: asyncio.Future[str] = loop.create_future()
    sums: list[dict[str, int]] = []
    reborn: list[Life] = []

    def member(rank: int, keys: list[str]) -> Main:
        async def main(life: Life) -> None:
            group = WorldGroup(world, life, SCRIPT, host=rank == 0)
            if rank == 0 and not rendezvous.done():
                rendezvous.set_result(group.rendezvous)
            where = await rendezvous
            for key in keys:
                gradient = {f"m-{rank}": 1}
                try:
                    while not (met := await group.meet(meeting(rank, 3, where, key), 0.2)):
                        if key == "k0" and reborn:
                            break
                    if not met:
                        continue
                    await group.reduce(gradient)
                except TrainerError:
                    continue
                if rank == 0:
                    sums.append(gradient)
            await asyncio.sleep(100)

        return main

    victim = Life(loop, "trainer-cell-2")
    victim.begin(member(2, ["k0", "k1"])(victim))
    victim.strike_at, victim.strike = steps, victim.kill

    def again() -> None:
        life = Life(loop, "trainer-cell-2", number=1)
        life.begin(member(2, ["k1"])(life))
        reborn.append(life)

    victim.at_end(again)
    survivors = lives(loop, member(0, ["k0", "k1"]), member(1, ["k0", "k1"]))
    for life in survivors:
        life.ended.result()
    # A sum is whole or was not made, and the meeting after the death comes to one.
    assert all(each == {"m-0": 1, "m-1": 1, "m-2": 1} for each in sums)
    assert sums


def test_a_core_that_dies_takes_its_store(loop: VirtualLoop, world: World) -> None:
    rendezvous: asyncio.Future[str] = loop.create_future()

    async def core(life: Life) -> None:
        rendezvous.set_result(WorldGroup(world, life, SCRIPT, host=True).rendezvous)
        await asyncio.sleep(5)

    async def satellite(life: Life) -> None:
        group = WorldGroup(world, life, SCRIPT, host=False)
        where = await rendezvous
        assert not await group.meet(meeting(1, 2, where), 1.0)
        assert not group.trouble
        for _ in range(2):
            assert not await group.meet(meeting(1, 2, where), 60.0)
            assert group.trouble
        with pytest.raises(TrainerError, match="in no group"):
            await group.reduce({})

    for life in lives(loop, core, satellite):
        life.ended.result()


@pytest.mark.parametrize("silent", [False, True])
def test_a_member_whose_host_is_gone_is_waited_for_longer(loop: VirtualLoop, world: World, silent: bool) -> None:
    """A process that is killed closes its connections; a host that is gone does not."""
    rendezvous: asyncio.Future[str] = loop.create_future()
    failed_s: list[float] = []

    async def core(life: Life) -> None:
        group = WorldGroup(world, life, SCRIPT, host=True)
        rendezvous.set_result(group.rendezvous)
        while not await group.meet(meeting(0, 2, group.rendezvous), 0.2):
            pass
        loop.call_later(2, lambda: victim.kill(silent=silent), context=outside)
        with pytest.raises(TrainerError):
            await group.reduce({})
        failed_s.append(loop.time())

    async def satellite() -> None:
        group = WorldGroup(world, victim, SCRIPT, host=False)
        while not await group.meet(meeting(1, 2, await rendezvous), 0.2):
            pass
        await asyncio.sleep(60)

    outside = copy_context()
    victim = Life(loop, "trainer-cell-1")
    victim.begin(satellite())
    for life in lives(loop, core):
        life.ended.result()
    assert (failed_s[0] > TIMEOUT_S) is silent


@pytest.mark.parametrize("how", ["held", "host gone"])
def test_a_store_that_does_not_answer_is_no_end(loop: VirtualLoop, world: World, how: str) -> None:
    rendezvous: asyncio.Future[str] = loop.create_future()

    async def core() -> None:
        group = WorldGroup(world, victim, SCRIPT, host=True)
        rendezvous.set_result(group.rendezvous)
        while not await group.meet(meeting(0, 2, group.rendezvous), 0.2):
            pass
        await asyncio.sleep(60)

    async def satellite(life: Life) -> None:
        group = WorldGroup(world, life, SCRIPT, host=False)
        where = await rendezvous
        loop.call_soon(victim.hold if how == "held" else lambda: victim.kill(silent=True), context=outside)
        await asyncio.sleep(0.1)
        assert not await group.meet(meeting(1, 2, where), 0.2)
        assert group.trouble and loop.time() >= ANSWER_S
        loop.call_soon(victim.go_on, context=outside)
        await asyncio.sleep(0.1)
        assert await group.meet(meeting(1, 2, where), 0.2) is (how == "held")

    outside = copy_context()
    victim = Life(loop, "trainer-cell-0")
    victim.begin(core())
    for life in lives(loop, satellite):
        life.ended.result()


def test_a_group_is_built_once_at_its_place(loop: VirtualLoop, world: World) -> None:
    """Whoever comes back to a meeting that came to nothing finds the addresses of those who are gone."""

    async def core(life: Life) -> None:
        group = WorldGroup(world, life, SCRIPT, host=True)
        assert await group.meet(meeting(0, 1, group.rendezvous), 0.2)
        group.leave()
        with pytest.raises(TrainerError, match="a group was before"):
            await group.meet(meeting(0, 1, group.rendezvous), 0.2)
        assert await group.meet(meeting(0, 1, group.rendezvous, "another key"), 0.2)

    for life in lives(loop, core):
        life.ended.result()


def test_an_exposure_lives_as_long_as_its_process(loop: VirtualLoop, world: World) -> None:
    said: asyncio.Future[e.WeightsExposed] = loop.create_future()

    async def core(life: Life) -> None:
        exchange = WorldExchange(world, life, move_s=1)
        address = await exchange.expose_flat(Flat("w", 4), 4, "join")
        said.set_result(e.WeightsExposed(version=4, purpose="join", address={"name": address.name}, bytes=64))
        await asyncio.sleep(10)

    async def satellite(life: Life) -> None:
        exchange, cell = WorldExchange(world, life, move_s=1), cell_of(world, "cell-1")
        exposed = await said
        await exchange.pull(exposed, cell)
        assert (cell.version, cell.flat_weights().digest) == (4, "w")
        await asyncio.sleep(20)
        with pytest.raises(TransportError):
            await exchange.pull(exposed, cell)

    for life in lives(loop, core, satellite):
        life.ended.result()
    assert world.exposures == {}


def test_what_is_put_back_is_what_was_whole_last() -> None:
    disk = Disk()
    for content in ("old", "new"):
        disk.make(FOLDER)
        disk.write(FOLDER, "manifest", content)
        assert disk.damage(FOLDER, lambda _: DAMAGED)
        assert disk.read(FOLDER, "manifest") is DAMAGED
    assert not disk.damage(FOLDER, None)
    assert disk.folders == {}
    disk.mend(FOLDER)
    assert disk.read(FOLDER, "manifest") == "new"
    disk.make(FOLDER)
    disk.write(FOLDER, "manifest", "newest")
    disk.mend(FOLDER)
    assert disk.read(FOLDER, "manifest") == "newest"
