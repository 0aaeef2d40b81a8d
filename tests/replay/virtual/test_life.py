"""Lives end at any await, and nothing of them happens afterwards."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import pytest

from replay.virtual.callbacks import LIFE
from replay.virtual.life import Killed, Life
from replay.virtual.loop import VirtualLoop


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    with VirtualLoop() as loop:
        yield loop


def test_what_is_spawned_inside_belongs_to_the_life_and_dies_with_it(loop: VirtualLoop) -> None:
    world: list[str] = []

    async def child() -> None:
        try:
            await asyncio.sleep(10)
            world.append("child went on")
        except BaseException:
            world.append("child noticed")
            raise
        finally:
            world.append("child cleaned up")

    async def ticks() -> AsyncIterator[int]:
        try:
            for i in range(100):
                await asyncio.sleep(1)
                yield i
        finally:
            await asyncio.sleep(1)
            world.append("generator cleaned up")

    async def program() -> None:
        loop.call_later(10, world.append, "timer went off")
        asyncio.create_task(child()).add_done_callback(lambda _: world.append("callback ran"))
        with contextlib.suppress(Exception):
            async for i in ticks():
                world.append(f"tick {i}")  # noqa: PERF401  each when it comes

    async def main() -> None:
        life = Life(loop, "victim")
        life.begin(program())
        await asyncio.sleep(3.5)
        assert LIFE.get() is None
        life.kill()
        life.kill()
        await asyncio.sleep(100)
        with pytest.raises(Killed):
            await life.ended

    loop.run_until_complete(main())
    assert world == ["tick 0", "tick 1", "tick 2"]
    assert loop.time() == 103.5


def test_timers_of_the_dead_hold_no_time_up(loop: VirtualLoop) -> None:
    async def main() -> None:
        life = Life(loop, "victim")
        life.begin(asyncio.sleep(1000))
        await asyncio.sleep(1)
        life.kill()

    loop.run_until_complete(main())
    loop.run_forever()
    assert loop.time() == 1.0


def test_a_life_that_is_held_does_nothing_and_then_all_that_it_missed(loop: VirtualLoop) -> None:
    world: list[tuple[float, str]] = []

    async def program() -> None:
        loop.call_later(2, lambda: world.append((loop.time(), "missed")))
        loop.call_later(60, lambda: world.append((loop.time(), "in time")))
        try:
            async with asyncio.timeout(5):
                await asyncio.sleep(100)
        except TimeoutError:
            world.append((loop.time(), "timed out"))
        await asyncio.sleep(100)

    async def main() -> None:
        life = Life(loop, "sleeper")
        life.begin(program())
        await asyncio.sleep(1)
        assert life.hold() and not life.hold()
        await asyncio.sleep(20)
        assert not world and not life.dead
        life.go_on()
        life.go_on()
        await life.ended

    loop.run_until_complete(main())
    assert world == [(21.0, "missed"), (21.0, "timed out"), (60.0, "in time")]
    assert loop.time() == 121.0


def test_a_life_that_is_held_can_be_killed(loop: VirtualLoop) -> None:
    world: list[str] = []

    async def program() -> None:
        await asyncio.sleep(2)
        world.append("went on")

    async def main() -> None:
        life = Life(loop, "sleeper")
        life.begin(program())
        await asyncio.sleep(1)
        life.hold()
        await asyncio.sleep(5)
        life.kill()
        life.go_on()
        await asyncio.sleep(5)
        with pytest.raises(Killed):
            await life.ended

    loop.run_until_complete(main())
    assert not world


def test_when_the_program_ends_the_rest_is_gone(loop: VirtualLoop) -> None:
    world: list[str] = []

    async def forever() -> None:
        while True:
            await asyncio.sleep(1)
            world.append("tick")

    async def program(error: Exception | None) -> None:
        background = asyncio.create_task(forever())
        await asyncio.sleep(2.5)
        assert not background.done()
        if error:
            raise error

    async def main() -> None:
        first, second = Life(loop, "first"), Life(loop, "second")
        first.begin(program(None))
        second.begin(program(ValueError("broken")))
        ends: list[str] = []
        first.at_end(lambda: ends.append("first"))
        await first.ended
        with pytest.raises(ValueError, match="broken"):
            await second.ended
        await asyncio.sleep(10)
        assert ends == ["first"]

    loop.run_until_complete(main())
    assert world == ["tick"] * 4


def test_a_life_is_killed_at_each_of_its_steps_and_at_the_same_place_again(loop: VirtualLoop) -> None:
    """Between any two awaits; what the step before did stands, what the step after would do never happens."""

    async def program(said: list[int]) -> None:
        async def part(start: int) -> None:
            for i in range(3):
                said.append(start + i)
                await asyncio.sleep(1)

        await asyncio.gather(part(0), part(10), part(20))

    async def killed_at(step: int) -> tuple[list[int], int]:
        said: list[int] = []
        life = Life(loop, "victim")
        life.strike_at, life.strike = step, life.kill
        life.begin(program(said))
        await asyncio.wait([life.ended])
        return said, life.steps

    async def main() -> None:
        whole, steps = await killed_at(10**6)
        assert whole == [0, 10, 20, 1, 11, 21, 2, 12, 22]
        reached = [await killed_at(step) for step in range(1, steps + 1)]
        assert reached == [await killed_at(step) for step in range(1, steps + 1)]
        assert [len(said) for said, _ in reached] == sorted(len(said) for said, _ in reached)
        assert {len(said) for said, _ in reached} == set(range(10))
        assert all(whole[: len(said)] == said for said, _ in reached)

    loop.run_until_complete(main())


def test_a_life_cannot_kill_itself_in_mid_step(loop: VirtualLoop) -> None:
    async def main() -> None:
        life = Life(loop, "suicidal")

        async def program() -> None:
            life.kill()

        life.begin(program())
        with pytest.raises(RuntimeError, match="cannot kill itself"):
            await life.ended

    loop.run_until_complete(main())


def test_coroutines_of_the_dead_are_closed_without_noise(recwarn: pytest.WarningsRecorder) -> None:
    closed: list[str] = []

    async def stubborn() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            closed.append("stubborn")
            await asyncio.sleep(1)

    async def main() -> None:
        life = Life(loop, "victim")
        life.begin(stubborn())
        never = Life(loop, "never begun")
        never.begin(stubborn())
        never.kill()
        await asyncio.sleep(1)
        life.kill()
        assert not closed

    with VirtualLoop() as loop:
        loop.run_until_complete(main())
    assert closed == ["stubborn"]
    assert not recwarn.list
