"""A service that starts again: what it lost is said, starts again within its budget, and nothing of it is left or doubled."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from schemas.envelope import Event
from schemas.events import ExecutionLost, ExecutionStarted, RunFinished
from schemas.ids import execution_id
from services.harness.book import Book
from services.harness.folder import ExecutionFolder
from services.harness.service import serve
from services.mesh.process_table import homes, start_of
from services.mesh.workspace import unpack
from tests.harness.agents import BASH, GOOD, HANG, alive, file_of, workspace
from tests.harness.world import E0, again, finish_of, place, proxy_joins, world_of
from tests.mesh.virtual_clock import VirtualClock
from tests.mesh.workers import serving


async def test_stopping_the_service_ends_its_children_and_they_start_again(tmp_path: Path) -> None:
    script = 'if [ -e "$0/once" ]; then cp in.txt out.txt; exit; fi; echo > "$0/once"; ' + HANG[-1]
    world = await world_of(tmp_path, [*BASH, script, str(tmp_path)])
    async with serving(serve, world.context("harness")):
        await proxy_joins(world)
        await place(world)
        pid = int(await file_of(workspace(tmp_path, E0) / "up"))
        await world.wait("execution.started")
    assert not alive(pid)
    assert await world.events("execution.finished") == []
    async with serving(serve, world.context("harness")):
        lost = (await world.wait("execution.lost", E0)).data
        assert (lost.attempt, lost.reason) == (0, "harness service restarted")
        await again(world, 1)
        finished = await finish_of(world)
    assert (finished.attempt, finished.reason) == (1, "completed")
    unpack(await world.bus.get_blob(finished.workspace), tmp_path / "out")
    assert (tmp_path / "out" / "out.txt").read_text() == "ada\n"
    assert [event.data.attempt for event in await world.events("execution.started")] == [0, 1]


async def test_what_is_lost_when_its_budget_is_spent_ends(tmp_path: Path) -> None:
    clock = VirtualClock(1_000_000)
    world = await world_of(tmp_path, HANG, clock=clock, timeout_s=5, overall_timeout_s=20)
    e1 = execution_id(0, 1)
    async with serving(serve, world.context("harness")):
        await proxy_joins(world)
        await place(world, E0, e1)
        for execution in (E0, e1):
            await world.wait("execution.started", execution)
    async with serving(serve, world.context("harness")):
        await world.wait("execution.lost", E0)
        await world.wait("execution.lost", e1)
        await again(world, 1, e1)
        await world.wait("execution.started", e1, attempt=1)
    clock.advance(20_000_000)
    async with serving(serve, world.context("harness")):
        spent = await finish_of(world, e1)
        await again(world, 1)
        before = await finish_of(world)
    assert (spent.attempt, spent.reason, spent.workspace) == (1, "overall_timeout", "")
    assert (before.attempt, before.reason, before.exit_code) == (1, "overall_timeout", None)
    assert not (tmp_path / "workspaces" / f"{E0}.1").exists()


async def test_the_end_of_the_run_finds_a_lost_execution_that_nobody_placed_again(tmp_path: Path) -> None:
    world = await world_of(tmp_path, HANG)
    async with serving(serve, world.context("harness")):
        await proxy_joins(world)
        await place(world)
        await world.wait("execution.started")
    async with serving(serve, world.context("harness")):
        await world.wait("execution.lost")
        await world.say("scheduler", "run.finished", "r-1", RunFinished(steps=1, reason="steps_done"))
        finished = await finish_of(world)
    assert (finished.attempt, finished.reason) == (1, "cancelled")


@pytest.mark.parametrize("known", [True, False], ids=["it has read of it", "it has not"])
async def test_nothing_of_an_attempt_follows_its_loss(
    tmp_path: Path, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process of the service that was replaced and lives on is not heard."""
    apply = Book.apply
    heard = asyncio.Event()

    def listen(book: Book, event: Event) -> None:
        if event.kind == "execution.lost":
            heard.set()
            if not known:
                return
        apply(book, event)

    monkeypatch.setattr(Book, "apply", listen)
    os.mkfifo(tmp_path / "gate")
    world = await world_of(tmp_path, [*BASH, 'echo > up; : < "$0"', "{here}/gate"])
    context = world.context("harness")
    refused = asyncio.Event()

    class Log:
        def warning(self, event: str, **fields: Any) -> None:
            assert (event, fields["execution"]) == ("ended before", E0)
            refused.set()

    context.log = Log()
    async with serving(serve, context):
        await proxy_joins(world)
        await place(world)
        await file_of(workspace(tmp_path, E0) / "up")
        await world.wait("execution.started")
        await world.say("harness", "execution.lost", E0, ExecutionLost(attempt=0, reason="test"))
        await heard.wait()
        gate = os.open(tmp_path / "gate", os.O_RDWR)
        await refused.wait()
        os.close(gate)
    assert await world.events("execution.finished") == []


async def test_a_start_that_was_said_late_does_not_hide_the_loss(tmp_path: Path) -> None:
    world = await world_of(tmp_path, GOOD)
    await proxy_joins(world)
    await place(world)
    (tmp_path / "workspaces" / f"{E0}.0" / "work").mkdir(parents=True)
    ExecutionFolder(tmp_path, E0, 0).record(1, 1)
    context = world.context("harness")
    history = context.history

    async def before(**about: Any) -> Any:
        past = await history(**about)
        await world.say("harness", "execution.started", E0, ExecutionStarted(attempt=0), id=f"d-{E0}.started.0")
        return past

    context.history = before  # type: ignore[method-assign]
    async with serving(serve, context):
        await world.wait("execution.lost", E0)
    assert [event.kind for event in await world.events("execution.started", "execution.lost")] == [
        "execution.started",
        "execution.lost",
    ]


async def orphan(folder: ExecutionFolder) -> asyncio.subprocess.Process:
    """What a service that was killed leaves behind."""
    folder.work.mkdir(parents=True)
    folder.home.mkdir()
    environment = {"HOME": str(folder.home), "PATH": "/usr/bin:/bin"}
    process = await asyncio.create_subprocess_exec(
        "sleep", "600", cwd=folder.work, env=environment, start_new_session=True
    )
    # The kernel shows a new program's environment a moment after its start has succeeded.
    while str(folder.home) not in homes(str(folder.home.parent)):
        await asyncio.sleep(0.002)
    return process


@pytest.mark.parametrize("known", ["record and log", "record", "neither"])
async def test_after_a_crash_orphans_end_and_nothing_starts_twice(tmp_path: Path, known: str) -> None:
    world = await world_of(tmp_path, GOOD)
    await proxy_joins(world)
    await place(world, E0, execution_id(0, 1))
    folder = ExecutionFolder(tmp_path, E0, 0)
    process = await orphan(folder)
    if known != "neither":
        folder.record(process.pid, start_of(process.pid) or 0)
    if known == "record and log":
        await world.say("harness", "execution.started", E0, ExecutionStarted(attempt=0), id=f"d-{E0}.started.0")
    async with serving(serve, world.context("harness")):
        lost, other = (await world.wait("execution.lost", E0)).data, await finish_of(world, execution_id(0, 1))
        await process.wait()
        assert lost.attempt == 0
        await again(world, 1)
        assert ((await finish_of(world)).reason, other.reason) == ("completed", "completed")
    assert len(await world.events("execution.started")) == (3 if known == "record and log" else 2)


async def test_a_reused_pid_is_not_killed(tmp_path: Path) -> None:
    world = await world_of(tmp_path, GOOD)
    await proxy_joins(world)
    await place(world)
    await world.say("harness", "execution.started", E0, ExecutionStarted(attempt=0), id=f"d-{E0}.started.0")
    folder = ExecutionFolder(tmp_path, E0, 0)
    stranger = await asyncio.create_subprocess_exec("sleep", "600", start_new_session=True)
    folder.work.mkdir(parents=True)
    folder.record(stranger.pid, (start_of(stranger.pid) or 0) - 1)
    async with serving(serve, world.context("harness")):
        assert (await world.wait("execution.lost")).data.reason == "harness service restarted"
    assert alive(stranger.pid)
    stranger.kill()
    await stranger.wait()


async def test_a_restart_after_everything_finished_says_nothing(tmp_path: Path) -> None:
    world = await world_of(tmp_path, GOOD)
    async with serving(serve, world.context("harness")):
        await proxy_joins(world)
        await place(world)
        await finish_of(world)
    before = len(await world.events("execution.started", "execution.finished"))
    async with serving(serve, world.context("harness")):
        await place(world, execution_id(0, 1))
        await finish_of(world, execution_id(0, 1))
    assert len(await world.events("execution.started", "execution.finished")) == before + 2
