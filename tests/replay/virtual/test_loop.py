"""The virtual loop: asyncio as it is known, in no time, in the same order each time."""

from __future__ import annotations

import asyncio
import contextvars
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from replay.virtual.loop import Livelock, Standstill, Unhandled, VirtualLoop

ROOT = Path(__file__).parents[3]


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    with VirtualLoop() as loop:
        yield loop


def test_time_jumps_to_the_next_timer(loop: VirtualLoop) -> None:
    async def main() -> list[tuple[str, float]]:
        seen: list[tuple[str, float]] = []

        async def sleeper(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            seen.append((name, loop.time()))

        await asyncio.gather(sleeper("day", 86_400), sleeper("a", 1.5), sleeper("b", 1.5), sleeper("now", 0))
        return seen

    assert loop.run_until_complete(main()) == [("now", 0.0), ("a", 1.5), ("b", 1.5), ("day", 86_400.0)]


def test_what_asyncio_offers_works(loop: VirtualLoop) -> None:
    async def main() -> list[object]:
        said: list[object] = []
        queue: asyncio.Queue[int] = asyncio.Queue(maxsize=1)
        condition, event = asyncio.Condition(), asyncio.Event()

        async def producer() -> None:
            for i in range(3):
                await queue.put(i)
            async with condition:
                condition.notify_all()

        async def consumer() -> None:
            async with condition:
                await condition.wait()
            said.append("notified")

        async with asyncio.TaskGroup() as group:
            group.create_task(consumer())
            group.create_task(producer())
            said.extend([await queue.get() for _ in range(3)])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await event.wait()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(event.wait(), 5)
        said.append(loop.time())
        tasks = [asyncio.ensure_future(asyncio.sleep(seconds, seconds)) for seconds in (3, 1, 2)]
        done, pending = await asyncio.wait(tasks, timeout=1.5)
        said += [len(done), len(pending), [task.result() for task in done]]
        said.append([await each for each in asyncio.as_completed(tasks)])
        return said

    assert loop.run_until_complete(main()) == [0, 1, 2, "notified", 10.0, 1, 2, [1], [1, 2, 3]]


def test_a_group_that_fails_cancels_the_others(loop: VirtualLoop) -> None:
    ended: list[int] = []

    async def sleeper(number: int) -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            ended.append(number)

    async def failing() -> None:
        await asyncio.sleep(1)
        raise ValueError

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(20):
                group.create_task(sleeper(number))
            group.create_task(failing())

    with pytest.raises(ExceptionGroup):
        loop.run_until_complete(main())
    assert ended == list(range(20)), "sets of tasks are walked in the order in which the tasks were made"
    assert loop.time() == 1.0


def test_a_thread_runs_inline_at_its_turn(loop: VirtualLoop) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")

    async def main() -> list[object]:
        variable.set("known")
        seen: list[object] = []
        work = asyncio.ensure_future(asyncio.to_thread(lambda: seen.append(variable.get())))
        seen.append("before")
        await work
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)
        return seen

    assert loop.run_until_complete(main()) == ["before", "known"]


def test_a_cancelled_timer_holds_no_time_up(loop: VirtualLoop) -> None:
    async def main() -> None:
        loop.call_later(1000, print).cancel()
        await asyncio.sleep(1)

    loop.run_until_complete(main())
    loop.run_forever()
    assert loop.time() == 1.0


def test_an_exception_in_a_callback_ends_the_run(loop: VirtualLoop) -> None:
    async def main() -> None:
        loop.call_soon(lambda: 1 // 0)
        await asyncio.sleep(1)

    with pytest.raises(Unhandled, match="ZeroDivisionError") as failed:
        loop.run_until_complete(main())
    assert isinstance(failed.value.__cause__, ZeroDivisionError)


def test_an_exception_that_nobody_looked_at_ends_the_run(loop: VirtualLoop) -> None:
    async def failing() -> None:
        raise ValueError("lost")

    async def main() -> None:
        task = asyncio.ensure_future(failing())
        await asyncio.sleep(1)
        del task
        await asyncio.sleep(1)

    with pytest.raises(Unhandled, match=r"never retrieved.*lost"):
        loop.run_until_complete(main())


def test_who_waits_for_nothing_is_told_so(loop: VirtualLoop) -> None:
    with pytest.raises(Standstill, match="nothing is left to run"):
        loop.run_until_complete(asyncio.Event().wait())


def test_who_spins_is_named() -> None:
    async def spinner() -> None:
        while True:
            await asyncio.sleep(0)

    with VirtualLoop(still_limit=5_000) as loop, pytest.raises(Livelock, match="spinner"):
        loop.run_until_complete(spinner())


def test_there_are_no_sockets(loop: VirtualLoop) -> None:
    with pytest.raises(NotImplementedError):
        loop.run_until_complete(asyncio.open_connection("127.0.0.1", 1))


PROGRAM = """
import asyncio
from replay.virtual.loop import VirtualLoop

async def worker(name, others, said):
    while True:
        await asyncio.sleep(1)
        said.append(name)

async def main():
    said = []
    names = {f"w-{i}" for i in range(50)}
    tasks = {asyncio.create_task(worker(name, names, said)) for name in sorted(names)}
    await asyncio.sleep(3.5)
    for task in tasks:
        task.cancel()
        said.append(task.get_name())
    await asyncio.wait(tasks)
    return said

with VirtualLoop() as loop:
    print(loop.run_until_complete(main()))
"""


def test_processes_with_other_hash_seeds_do_the_same() -> None:
    def run(seed: str) -> bytes:
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        return subprocess.run(
            [sys.executable, "-c", PROGRAM], check=True, capture_output=True, cwd=ROOT, env=environment
        ).stdout

    assert run("1") == run("2") != b""


def test_a_pause_is_a_sleep_of_one_step(loop: VirtualLoop) -> None:
    async def main() -> list[tuple[str, float]]:
        seen: list[tuple[str, float]] = []

        async def pausing(name: str, seconds: float) -> None:
            await loop.pause(seconds)
            seen.append((name, loop.time()))
            asyncio.get_running_loop().call_soon(seen.append, (f"after {name}", loop.time()))

        await asyncio.gather(pausing("b", 2.0), pausing("a", 1.0), pausing("now", 0.0))
        return seen

    seen = loop.run_until_complete(main())
    assert seen == [("now", 0.0), ("after now", 0.0), ("a", 1.0), ("after a", 1.0), ("b", 2.0), ("after b", 2.0)]


def test_who_is_cancelled_in_a_pause_hears_of_it_when_it_is_over(loop: VirtualLoop) -> None:
    async def main() -> float:
        pausing = asyncio.ensure_future(loop.pause(1.0))
        await asyncio.sleep(0.25)
        pausing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pausing
        return loop.time()

    assert loop.run_until_complete(main()) == 1.0
