"""The harness service on a memory bus, with real processes."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import subprocess
from pathlib import Path

import pytest

from schemas.errors import LogBroken
from schemas.events import ExecutionDispatched, ExecutionPlaced, RunFinished
from schemas.ids import execution_id, held_out_id, measurement_id
from schemas.units import Counters
from services.harness.folder import ExecutionFolder
from services.harness.service import serve
from services.mesh.memory_bus import MemoryBus
from services.mesh.tokens import make_token
from services.mesh.workspace import unpack
from tests.harness.agents import BASH, GOOD, HANG, PYTHON, alive, file_of, workspace
from tests.harness.world import E0, finish_of, place, proxy_joins, world_of
from tests.mesh.workers import SECRET, make_task, serving


async def test_a_completed_execution(tmp_path: Path) -> None:
    world = await world_of(tmp_path, GOOD, env={"EXTRA": "x"})
    async with serving(serve, world.context("harness")):
        await proxy_joins(world)
        await place(world)
        finished = await finish_of(world)
    assert (finished.reason, finished.exit_code, finished.detail) == ("completed", 0, "")
    assert finished.counters == Counters(calls=3, reconnects=1)
    assert finished.seconds > 0
    unpack(await world.bus.get_blob(finished.workspace), tmp_path / "out")
    assert {path.name: path.read_text() for path in (tmp_path / "out").iterdir()} == {
        "in.txt": "ada\n",
        "out.txt": "ada\n",
    }
    folder = tmp_path / "workspaces" / f"{E0}.0"
    assert (folder / "output.log").read_text() == "Copy in.txt to out.txt.\n"
    kinds = [event.kind for event in await world.events("execution.started", "execution.finished")]
    assert kinds == ["execution.started", "execution.finished"]
    started, ended = await world.events("execution.started", "execution.finished")
    assert (started.id, ended.id) == (f"d-{E0}.started.0", f"d-{E0}.finished.0")
    assert started.causation == (await world.events("execution.placed"))[0].seq


async def test_the_environment_is_small_and_holds_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAKED", "secret")
    script = "import os, json, sys; json.dump([dict(os.environ), os.getcwd(), os.listdir('/proc/self/fd')], open('out.json', 'w'))"
    world = await world_of(tmp_path, [*PYTHON, script], env={"EXTRA": "{x}", "HOME": "/root"}, model="tiny")
    async with serving(serve, world.context("harness")):
        await proxy_joins(world, "http://127.0.0.1:7")
        await place(world)
        assert (await finish_of(world)).reason == "completed"
    environment, cwd, descriptors = json.loads((workspace(tmp_path, E0) / "out.json").read_text())
    assert cwd == str(workspace(tmp_path, E0))
    assert environment.pop("PATH")
    environment.pop("LC_CTYPE", None)
    assert environment == {
        "HOME": str(tmp_path / "workspaces" / f"{E0}.0" / "home"),
        "LANG": "C.UTF-8",
        "EXTRA": "{x}",
        "ANTHROPIC_BASE_URL": "http://127.0.0.1:7",
        "ANTHROPIC_AUTH_TOKEN": make_token(SECRET, E0, 0),
        "ANTHROPIC_MODEL": "tiny",
        "OPENAI_BASE_URL": "http://127.0.0.1:7/v1",
        "OPENAI_API_KEY": make_token(SECRET, E0, 0),
        "OPENAI_MODEL": "tiny",
        "GYRE_AGENT_SEED": E0,
    }
    assert len(descriptors) <= 5


async def test_failure_keeps_the_workspace_and_counts_an_error_without_report(tmp_path: Path) -> None:
    world = await world_of(tmp_path, [*BASH, "echo half > out.txt; exit 3"])
    async with serving(serve, world.context("harness")):
        await proxy_joins(world)
        await place(world)
        finished = await finish_of(world)
    assert (finished.reason, finished.exit_code, finished.detail) == ("failed", 3, "exit code 3")
    assert finished.counters == Counters(harness_errors=1)
    unpack(await world.bus.get_blob(finished.workspace), tmp_path / "out")
    assert (tmp_path / "out" / "out.txt").read_text() == "half\n"


@pytest.mark.parametrize(
    ("report", "exit_code", "counters"),
    [
        ('{"calls": 2, "harness_errors": 1}', 1, Counters(calls=2, harness_errors=1)),
        ("{", 0, Counters()),
        ("{", 1, Counters(harness_errors=1)),
        ('{"calls": -1}', 1, Counters(harness_errors=1)),
        ('{"calls": "many"}', 1, Counters(harness_errors=1)),
        ("[1]", 0, Counters()),
    ],
)
async def test_reports(tmp_path: Path, report: str, exit_code: int, counters: Counters) -> None:
    world = await world_of(tmp_path, [*BASH, f"echo '{report}' > \"$0\"; exit {exit_code}", "{report}"])
    async with serving(serve, world.context("harness")):
        await proxy_joins(world)
        await place(world)
        assert (await finish_of(world)).counters == counters


@pytest.mark.parametrize("trap", ["ln -s /etc/passwd", "mkfifo", "mkdir"])
def test_a_report_that_is_no_file_is_no_report(tmp_path: Path, trap: str) -> None:
    folder = ExecutionFolder(tmp_path, E0, 0)
    folder.path.mkdir(parents=True)
    subprocess.run([*trap.split(), str(folder.report)], check=True)
    assert folder.counters() is None


async def test_a_missing_program_is_a_total_failure_once(tmp_path: Path) -> None:
    world = await world_of(tmp_path, ["no-such-harness"])
    async with serving(serve, world.context("harness")):
        await proxy_joins(world)
        await place(world)
        finished = await finish_of(world)
        assert finished.reason == "total_failure"
        assert finished.detail == "cannot start no-such-harness: No such file or directory"
        assert finished.workspace == "" and finished.exit_code is None
    async with serving(serve, world.context("harness")):
        await place(world, execution_id(0, 1))
        await finish_of(world, execution_id(0, 1))
    assert len(await world.events("execution.finished")) == 2
    assert await world.events("execution.started") == []


async def test_a_disk_that_is_full_once_the_process_runs_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: list[int] = []

    def full(folder: ExecutionFolder, pid: int, start: int) -> None:
        known.append(pid)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ExecutionFolder, "record", full)
    world = await world_of(tmp_path, HANG)
    async with serving(serve, world.context("harness")):
        await proxy_joins(world)
        await place(world)
        finished = await finish_of(world)
    assert (finished.reason, finished.detail) == ("total_failure", "no workspace: No space left on device")
    assert not alive(known[0])
    assert await world.events("execution.started") == []


async def test_a_task_that_changed_or_went_is_a_total_failure(tmp_path: Path) -> None:
    world = await world_of(tmp_path, GOOD)
    (tmp_path / "tasks" / "card" / "environment" / "in.txt").write_text("ben\n")
    e1 = execution_id(0, 1)
    async with serving(serve, world.context("harness")):
        await proxy_joins(world)
        await place(world, E0)
        changed = await finish_of(world)
        await place(world, e1, task="gone")
        missing = await finish_of(world, e1)
    assert changed.detail == "task card is not the one that the run began with"
    assert missing.detail == "there is no such task folder"
    assert changed.reason == missing.reason == "total_failure"


async def test_a_workspace_beyond_the_limit_is_finished_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.mesh.workspace.pack.__kwdefaults__", {"max_bytes": 4096, "max_files": 9})
    world = await world_of(tmp_path, [*BASH, "head -c 9000 /dev/zero > big"])
    async with serving(serve, world.context("harness")):
        await proxy_joins(world)
        await place(world)
        finished = await finish_of(world)
    assert (finished.reason, finished.workspace) == ("completed", "")
    assert "above 4096 bytes" in finished.detail and str(tmp_path) not in finished.detail


async def test_output_is_capped_and_never_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.mesh.process_group.OUTPUT_BYTES", 1000)
    world = await world_of(tmp_path, [*BASH, "head -c 3000000 /dev/zero; head -c 3000000 /dev/zero >&2"])
    async with serving(serve, world.context("harness")):
        await proxy_joins(world)
        await place(world)
        assert (await finish_of(world)).reason == "completed"
    assert (tmp_path / "workspaces" / f"{E0}.0" / "output.log").stat().st_size == 1000


async def test_waits_for_the_proxy_and_takes_the_newest(tmp_path: Path) -> None:
    world = await world_of(tmp_path, [*BASH, 'echo "$ANTHROPIC_BASE_URL" > out.txt'])
    async with serving(serve, world.context("harness")):
        await place(world)
        assert await world.events("execution.started") == []
        await proxy_joins(world, "http://127.0.0.1:1", pid=1)
        await finish_of(world)
        await proxy_joins(world, "http://127.0.0.1:2", pid=2)
        await place(world, execution_id(0, 1))
        await finish_of(world, execution_id(0, 1))
    said = [(workspace(tmp_path, execution_id(0, member)) / "out.txt").read_text() for member in (0, 1)]
    assert said == ["http://127.0.0.1:1\n", "http://127.0.0.1:2\n"]


async def test_the_end_of_the_run_stops_everything(tmp_path: Path) -> None:
    world = await world_of(tmp_path, HANG)
    e1 = execution_id(0, 1)
    async with serving(serve, world.context("harness")):
        await proxy_joins(world)
        await place(world)
        pid = int(await file_of(workspace(tmp_path, E0) / "up"))
        await world.say("operator", "run.finished", "r-1", RunFinished(steps=1, reason="stopped"))
        stopped = await finish_of(world)
        await place(world, e1)
        never = await finish_of(world, e1)
    assert not alive(pid)
    assert (stopped.reason, stopped.workspace) == ("cancelled", "")
    assert (never.reason, never.exit_code) == ("cancelled", None)


async def test_forty_at_once(tmp_path: Path) -> None:
    # Each waits for a gate that opens when all forty are up: a service that ran one after the other would never end.
    os.mkfifo(tmp_path / "gate")
    world = await world_of(tmp_path, [*BASH, 'echo > "$HOME/up"; : < "$0"; cp in.txt out.txt', "{here}/gate"])
    executions = [execution_id(group, member) for group in range(5) for member in range(8)]
    async with serving(serve, world.context("harness")):
        await proxy_joins(world)
        await place(world, *executions)
        for execution in executions:
            await file_of(tmp_path / "workspaces" / f"{execution}.0" / "home" / "up")
        gate = os.open(tmp_path / "gate", os.O_RDWR)
        finished = [await finish_of(world, execution) for execution in executions]
        os.close(gate)
    assert {one.reason for one in finished} == {"completed"}
    assert len({one.workspace_digest for one in finished}) == 1


async def test_a_damaged_log_ends_the_service_and_its_children(tmp_path: Path) -> None:
    world = await world_of(tmp_path, HANG)
    assert isinstance(world.bus, MemoryBus)
    context = world.context("harness")
    task = asyncio.ensure_future(serve(context))
    await proxy_joins(world)
    await place(world)
    pid = int(await file_of(workspace(tmp_path, E0) / "up"))
    await world.wait("execution.started")
    world.bus.broker.stream("LOG_r-1").truncate(1)
    with pytest.raises(LogBroken):
        await task
    await context.health.stop()
    assert not alive(pid)


async def test_a_held_out_execution_works_on_its_own_set(tmp_path: Path) -> None:
    """Both sets may use the same names: the workspace is that of the set that the execution is of."""
    held_out = make_task(tmp_path / "held-out" / "card")
    (held_out / "environment" / "in.txt").write_text("zoe\n")
    world = await world_of(tmp_path, GOOD)
    name = held_out_id(4, 0)
    async with serving(serve, world.context("harness")):
        await proxy_joins(world)
        await place(world)
        dispatched = ExecutionDispatched(
            group="", member=0, task="card", measurement=measurement_id(4), task_digest=world.held_out[0].digest
        )
        await world.say("scheduler", "execution.dispatched", name, dispatched)
        placed = ExecutionPlaced(cell="cell-1", epoch=0, attempt=0)
        await world.say("scheduler", "execution.placed", name, placed, id=f"d-{name}")
        reasons = [(await finish_of(world, each)).reason for each in (E0, name)]
    assert reasons == ["completed", "completed"]
    assert [(workspace(tmp_path, each) / "out.txt").read_text() for each in (E0, name)] == ["ada\n", "zoe\n"]
