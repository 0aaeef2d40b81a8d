"""The supervisor against real processes: restarts, giving up, ending in order, leaving nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from schemas.errors import EnvironmentMissing, Fenced, GyreError
from services.mesh.processes import Process, is_alive, last_line, read_mesh
from services.mesh.supervise import Backoff, Spec, Supervisor

SCRIPT = Path(__file__).with_name("scripted_service.py")
QUICK = Backoff(first_s=0.01, most_s=0.02, limit=3, fenced_s=0.01, fenced_most_s=0.02)


class Watch:
    """Every change that the supervisor tells of, to be waited for."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, int]] = []
        self._changed = asyncio.Event()

    def __call__(self, process: Process) -> None:
        self.seen.append((process.name, process.state, process.restarts))
        self._changed.set()

    async def until(self, wanted: Callable[[list[tuple[str, str, int]]], bool]) -> None:
        async with asyncio.timeout(10):
            while not wanted(self.seen):
                self._changed.clear()
                await self._changed.wait()


class Bench:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.watch = Watch()
        self.supervisor = Supervisor(
            run="r-test", folder=folder, nats="nats://test", backoff=QUICK, on_change=self.watch
        )

    async def start(self, name: str, *words: object, rank: int = 0, lasting: bool = False) -> None:
        command = [sys.executable, "-S", "-E", str(SCRIPT), *map(str, words)]
        await self.supervisor.start(Spec(name=name, command=command, rank=rank, lasting=lasting))

    def entry(self, name: str) -> Process:
        return next(each for each in self.supervisor.services if each.name == name)

    async def lines(self, path: Path, count: int) -> list[str]:
        """What processes noted, once there are `count` lines."""
        async with asyncio.timeout(10):
            while not path.exists() or len(path.read_text().splitlines()) < count:
                await asyncio.sleep(0.01)
        return path.read_text().splitlines()


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path)
    yield made
    await made.supervisor.kill()


async def test_a_service_that_ends_well_is_not_started_again(bench: Bench) -> None:
    await bench.start("one", "exit", 0)
    await bench.watch.until(lambda seen: ("one", "done", 0) in seen)
    assert bench.entry("one").exit_code == 0
    assert not bench.supervisor.failed.done()


async def test_a_service_that_fails_is_started_again(bench: Bench, tmp_path: Path) -> None:
    await bench.start("one", "note", tmp_path / "notes", "here", "stay")
    await bench.lines(tmp_path / "notes", 1)
    first = bench.entry("one").pid
    os.kill(first, signal.SIGKILL)
    await bench.lines(tmp_path / "notes", 2)
    assert bench.entry("one").pid != first
    assert bench.entry("one").restarts == 1
    assert ("one", "waiting", 0) in bench.watch.seen


async def test_a_lasting_service_is_started_again_however_it_ended(bench: Bench, tmp_path: Path) -> None:
    await bench.start("one", "note", tmp_path / "notes", "here", "exit", 0, lasting=True)
    await bench.lines(tmp_path / "notes", 2)
    with pytest.raises(EnvironmentMissing, match="failed 3 times"):
        await asyncio.wait_for(asyncio.shield(bench.supervisor.failed), 10)
    assert not any(state == "done" for _, state, _ in bench.watch.seen)


async def test_a_service_that_keeps_failing_is_given_up_with_its_last_words(bench: Bench) -> None:
    await bench.start("one", "say", "the library is missing", "exit", 3)
    with pytest.raises(EnvironmentMissing, match="the library is missing") as caught:
        await asyncio.wait_for(asyncio.shield(bench.supervisor.failed), 10)
    assert caught.value.where == str(bench.folder / "logs" / "one.log")
    assert "failed 3 times" in caught.value.what
    assert bench.entry("one").restarts == QUICK.limit - 1
    assert bench.entry("one").state == "failed"


async def test_an_end_of_our_own_doing_is_no_failure(bench: Bench, tmp_path: Path) -> None:
    await bench.start("one", "note", tmp_path / "notes", "here", "stay")
    for kills in range(1, 2 * QUICK.limit):
        await bench.lines(tmp_path / "notes", kills)
        bench.supervisor.excuse("one")
        os.kill(bench.entry("one").pid, signal.SIGKILL)
    await bench.lines(tmp_path / "notes", 2 * QUICK.limit)
    assert not bench.supervisor.failed.done()


async def test_a_service_that_another_instance_displaced_is_never_given_up(bench: Bench, tmp_path: Path) -> None:
    await bench.start("one", "note", tmp_path / "notes", "here", "exit", Fenced.exit_code, lasting=True)
    await bench.lines(tmp_path / "notes", 2 * QUICK.limit)
    assert not bench.supervisor.failed.done()
    backoff = Backoff()
    assert [backoff.fenced_delay(times) for times in (1, 2, 3, 9)] == [10.0, 20.0, 40.0, 120.0]


async def test_a_program_that_does_not_exist_is_refused_at_once(bench: Bench) -> None:
    with pytest.raises(EnvironmentMissing, match="no-such-program"):
        await bench.supervisor.start(Spec(name="one", command=["/no-such-program"]))


async def test_names_are_unique(bench: Bench) -> None:
    await bench.start("one", "stay")
    with pytest.raises(GyreError, match="supervised already"):
        await bench.start("one", "stay")


async def test_services_end_in_order_of_rank(bench: Bench) -> None:
    for name, rank in (("last", 2), ("first", 0), ("middle", 1)):
        await bench.start(name, "stay", rank=rank)
    assert await bench.supervisor.stop() == []
    assert [name for name, state, _ in bench.watch.seen if state == "stopped"] == ["first", "middle", "last"]
    mesh = read_mesh(bench.folder)
    assert mesh is not None
    assert mesh.ended


async def test_one_that_does_not_listen_is_killed_within_the_grace(bench: Bench, tmp_path: Path) -> None:
    await bench.start("deaf", "ignore-term", "note", tmp_path / "notes", "deaf", "stay")
    await bench.lines(tmp_path / "notes", 1)
    pid = bench.entry("deaf").pid
    assert await bench.supervisor.stop(grace_s=0.1) == ["deaf"]
    assert not psutil.pid_exists(pid)


async def test_what_a_crashed_service_started_does_not_live_beside_its_successor(bench: Bench, tmp_path: Path) -> None:
    await bench.start("parent", "child", tmp_path / "children", "stay")
    [child] = map(int, await bench.lines(tmp_path / "children", 1))
    created = psutil.Process(child).create_time()
    assert bench.supervisor.rss_bytes() > psutil.Process(child).memory_info().rss
    os.kill(bench.entry("parent").pid, signal.SIGKILL)
    await bench.lines(tmp_path / "children", 2)
    assert not is_alive(child, created)


@pytest.mark.parametrize("forced", [False, True])
async def test_nothing_is_left_after_the_stop(bench: Bench, tmp_path: Path, forced: bool) -> None:
    await bench.start("parent", "child", tmp_path / "children", "stay")
    [child] = map(int, await bench.lines(tmp_path / "children", 1))
    created = psutil.Process(child).create_time()
    await (bench.supervisor.kill() if forced else bench.supervisor.stop())
    async with asyncio.timeout(10):
        while is_alive(child, created):
            await asyncio.sleep(0.01)


async def test_mesh_json_names_the_processes(bench: Bench) -> None:
    await bench.start("one", "stay")
    mesh = read_mesh(bench.folder)
    assert mesh is not None
    assert mesh.supervisor == os.getpid()
    assert [(each.name, each.pid, each.state) for each in mesh.services] == [("one", bench.entry("one").pid, "running")]
    assert is_alive(mesh.services[0].pid, mesh.services[0].created)
    assert not is_alive(mesh.services[0].pid, mesh.services[0].created - 60)


SUPERVISE = """
import asyncio, sys
from pathlib import Path
from services.mesh.supervise import Spec, Supervisor

async def main():
    supervisor = Supervisor(run="r-test", folder=Path(sys.argv[1]), nats="")
    await supervisor.start(Spec(name="one", command=sys.argv[2:]))
    print(supervisor.services[0].pid, flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


async def test_services_end_with_a_killed_supervisor(tmp_path: Path) -> None:
    service = [sys.executable, "-S", "-E", str(SCRIPT), "note", str(tmp_path / "notes"), "up", "stay"]
    with subprocess.Popen(  # noqa: ASYNC220  it starts at once
        [sys.executable, "-c", SUPERVISE, str(tmp_path), *service], stdout=subprocess.PIPE
    ) as supervisor:
        assert supervisor.stdout is not None
        pid = int(await asyncio.to_thread(supervisor.stdout.readline))
        created = psutil.Process(pid).create_time()
        supervisor.kill()
    async with asyncio.timeout(10):
        while is_alive(pid, created):
            await asyncio.sleep(0.01)


def test_backoff_doubles_up_to_its_bound() -> None:
    backoff = Backoff(first_s=0.5, factor=2.0, most_s=3.0)
    assert [backoff.delay(failures) for failures in (1, 2, 3, 4, 9)] == [0.5, 1.0, 2.0, 3.0, 3.0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("one\ntwo\n\n", "two"),
        ('{"level": "error", "event": "failed", "what": "no port\\n  -> free it"}\n', "no port"),
        ('{"level": "error", "event": "crashed", "exception": "Traceback\\nKeyError: 3"}\n', "KeyError: 3"),
        ('Traceback\nImportError: no x\n{"level": "info", "event": "bye"}\n', "ImportError: no x"),
    ],
)
def test_the_last_line_that_says_something(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "log").write_text(text)
    assert last_line(tmp_path / "log") == said
    assert last_line(tmp_path / "absent") == ""
