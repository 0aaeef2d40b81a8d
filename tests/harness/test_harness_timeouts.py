"""Executions whose time is over, and processes that they leave: they end, and what there is is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from schemas.units import Counters
from services.harness.service import serve
from services.mesh.workspace import unpack
from tests.harness.agents import BASH, HANG, alive, file_of, workspace
from tests.harness.world import E0, finish_of, place, proxy_joins, world_of
from tests.mesh.virtual_clock import VirtualClock
from tests.mesh.workers import serving


async def test_harness_timeout_is_the_tasks_own_and_keeps_what_there_is(tmp_path: Path) -> None:
    clock = VirtualClock(1_000_000)
    world = await world_of(tmp_path, HANG, toml="[agent]\ntimeout_sec = 30\n", clock=clock)
    async with serving(serve, world.context("harness")):
        await proxy_joins(world)
        await place(world)
        await file_of(workspace(tmp_path, E0) / "up")
        await world.wait("execution.started")
        clock.advance(29_999_999)
        clock.advance(1)
        finished = await finish_of(world)
    assert (finished.reason, finished.exit_code, finished.seconds) == ("harness_timeout", -15, 30.0)
    assert finished.detail == "stopped after 30.0 s"
    assert finished.counters == Counters()
    unpack(await world.bus.get_blob(finished.workspace), tmp_path / "out")
    assert (tmp_path / "out" / "out.txt").read_text() == "partial\n"


async def test_the_overall_timeout_comes_first_where_the_tasks_own_is_longer(tmp_path: Path) -> None:
    clock = VirtualClock()
    toml = "[agent]\ntimeout_sec = 50\n"
    world = await world_of(tmp_path, HANG, toml=toml, clock=clock, timeout_s=5, overall_timeout_s=20)
    async with serving(serve, world.context("harness")):
        await proxy_joins(world)
        await place(world)
        await file_of(workspace(tmp_path, E0) / "up")
        await world.wait("execution.started")
        clock.advance(20_000_000)
        finished = await finish_of(world)
    assert (finished.reason, finished.workspace, finished.workspace_digest) == ("overall_timeout", "", "")


async def test_a_timeout_takes_grandchildren_and_other_sessions_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.harness.execution.GRACE_S", 0.05)
    script = """
trap '' TERM
sleep 600 & echo $! > plain
setsid sleep 600 & echo $! > session
(setsid bash -c 'trap "" TERM; echo $$ > double; sleep 600' &) ; :
while [ ! -s double ]; do :; done
echo $$ > up
wait
"""
    clock = VirtualClock()
    world = await world_of(tmp_path, [*BASH, script], clock=clock, timeout_s=10)
    work = workspace(tmp_path, E0)
    async with serving(serve, world.context("harness")):
        await proxy_joins(world)
        await place(world)
        await file_of(work / "up")
        pids = [int(await file_of(work / name)) for name in ("up", "plain", "session", "double")]
        assert all(alive(pid) for pid in pids)
        await world.wait("execution.started")
        clock.advance(10_000_000)
        finished = await finish_of(world)
    assert (finished.reason, finished.exit_code) == ("harness_timeout", -9)
    assert not any(alive(pid) for pid in pids)


async def test_what_a_completed_harness_leaves_running_is_ended(tmp_path: Path) -> None:
    world = await world_of(tmp_path, [*BASH, "setsid sleep 600 >/dev/null 2>&1 & echo $! > left"])
    async with serving(serve, world.context("harness")):
        await proxy_joins(world)
        await place(world)
        assert (await finish_of(world)).reason == "completed"
        assert not alive(int((workspace(tmp_path, E0) / "left").read_text()))
