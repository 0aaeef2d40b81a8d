"""Groups of foreign processes: how they are found, ended and guarded."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.errors import EnvironmentMissing
from services.mesh.guard import Guard
from services.mesh.process_group import ProcessGroup, clean_environment, launch
from services.mesh.process_table import entry_of, homes, kill, members, start_of
from tests.harness.agents import alive, file_of, gone


@pytest.fixture
def guard() -> Iterator[Guard]:
    with Guard() as guard:
        yield guard


def bash(folder: Path, script: str, guard: Guard) -> ProcessGroup:
    return launch(
        ["bash", "-c", script],
        folder=folder,
        environment=clean_environment(folder / "home", {}),
        output=folder / "output.log",
        guard=guard,
    )


async def test_exit_code_and_output(tmp_path: Path, guard: Guard) -> None:
    group = bash(tmp_path, "echo out; echo err >&2; exit 4", guard)
    await group.wait()
    assert await group.end(1.0) == 4
    assert await group.end(1.0) == 4
    assert (tmp_path / "output.log").read_text() == "out\nerr\n"
    assert repr(group) == f"<ProcessGroup {group.pid} [gone]>" and repr(guard) == "<Guard [0 groups]>"


async def test_a_quiet_program_leaves_no_file(tmp_path: Path, guard: Guard) -> None:
    group = bash(tmp_path, ":", guard)
    await group.wait()
    assert await group.end(1.0) == 0
    assert os.listdir(tmp_path) == []


async def test_sigterm_is_enough_for_who_listens(tmp_path: Path, guard: Guard) -> None:
    script = "trap 'echo bye; exit 9' TERM; echo > up; while :; do read -t 600 < pipe; done"
    os.mkfifo(tmp_path / "pipe")
    group = bash(tmp_path, f"exec 3<> pipe; {script}", guard)
    await file_of(tmp_path / "up")
    assert await group.end(30.0) == 9
    assert (tmp_path / "output.log").read_text() == "bye\n"


async def test_abandoning_ends_at_once(tmp_path: Path, guard: Guard) -> None:
    group = bash(tmp_path, "trap '' TERM; sleep 600 & echo $! > child; wait", guard)
    child = int(await file_of(tmp_path / "child"))
    group.abandon()
    group.abandon()
    assert not alive(child) and not alive(group.pid)


async def test_members_are_found_by_group_session_parent_and_home(tmp_path: Path, guard: Guard) -> None:
    script = """
sleep 600 & echo $! > group
setsid sleep 600 & echo $! > parent
(setsid bash -c 'echo $$ > home; exec sleep 600' &)
setsid env -i bash -c 'echo $$ > bare; exec sleep 600' &
wait
"""
    group = bash(tmp_path, script, guard)
    pids = {int(await file_of(tmp_path / name)) for name in ("group", "parent", "home", "bare")}
    home = str(tmp_path / "home")
    assert {entry.pid for entry in members(group.pid, group.start, home)} == {group.pid, *pids}
    assert homes(str(tmp_path)) == {home}
    assert await group.end(0.0) == -15
    assert not any(alive(pid) for pid in pids) and homes(str(tmp_path)) == set()


def test_the_dead_are_nobodys_members() -> None:
    process = subprocess.Popen(["true"], start_new_session=True)
    start = start_of(process.pid)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert entry_of(process.pid) is None and start_of(process.pid) == start
    process.wait()
    assert start_of(process.pid) is None
    assert kill(process.pid, start or 0, "/none") == []


def test_a_pid_that_means_another_is_left_alone() -> None:
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    start = start_of(process.pid) or 0
    assert kill(process.pid, start - 1, "/none") == []
    assert alive(process.pid)
    assert kill(process.pid, start, "/none") == []
    assert process.wait() == -signal.SIGKILL


async def test_a_missing_program_says_so(tmp_path: Path, guard: Guard) -> None:
    with pytest.raises(EnvironmentMissing, match="cannot start no-such: No such file"):
        launch(["no-such"], folder=tmp_path, environment={"HOME": "/none"}, output=tmp_path / "log", guard=guard)


async def test_another_guard_takes_over_from_a_dead_one(tmp_path: Path, guard: Guard) -> None:
    group = bash(tmp_path, "sleep 600", guard)
    first = guard.pid
    os.kill(first, signal.SIGKILL)
    await gone(first)
    other = bash(tmp_path, ":", guard)
    await other.wait()
    await other.end(0.0)
    assert guard.pid != first and alive(guard.pid) and repr(guard) == "<Guard [1 groups]>"
    await group.end(0.0)


async def test_the_guard_ends_what_a_killed_process_started(tmp_path: Path) -> None:
    code = f"""
import asyncio, os, pathlib, signal, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from services.mesh.guard import Guard
from services.mesh.process_group import clean_environment, launch
async def main():
    folder = pathlib.Path({str(tmp_path)!r})
    with Guard() as guard:
        launch(["bash", "-c", "trap '' TERM; setsid sleep 600 & echo $! > child; echo $$ > up; wait"], folder=folder,
               environment=clean_environment(folder / "home", {{}}), output=folder / "log", guard=guard)
        while not (folder / "up").exists():
            await asyncio.sleep(0.002)
        os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    pids = [int(await file_of(tmp_path / name)) for name in ("up", "child")]
    assert await process.wait() == -signal.SIGKILL
    for pid in pids:
        await gone(pid)
