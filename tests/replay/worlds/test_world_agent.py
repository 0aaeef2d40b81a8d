"""Scripted agents and tests as processes: how they ask, how they end, and who ends them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from replay.virtual.life import Life
from replay.virtual.loop import VirtualLoop
from replay.worlds.agent import AgentFolder, AgentLaunch
from replay.worlds.processes import WorldGroup, WorldGuard
from replay.worlds.tests import ScoreFolder, ScoreLaunch
from replay.worlds.world import AgentScript, Scripts, World
from schemas.errors import TaskError
from schemas.units import TaskRef
from services.evaluator.refusal import Refusal

RUN = Path("/run")
REF = TaskRef(name="t", digest="d")
Body = Callable[[Life], Coroutine[Any, Any, None]]


class Proxy:
    """Answers after a second with what the n-th request is told: a status, or an answer that is the request's own."""

    def __init__(self, loop: VirtualLoop, world: World) -> None:
        self.bodies: list[bytes] = []
        self.agents: list[str] = []
        self.told: list[int] = []
        self.life = Life(loop, "proxy")
        self.url = ""
        self.left = 0
        self.life.begin(self._serve(world))

    async def _serve(self, world: World) -> None:
        self.url = world.network.listen("proxy", {"/v1/messages": self._messages})
        await asyncio.Event().wait()

    async def _messages(self, headers: Mapping[str, str], body: bytes) -> tuple[int, bytes]:
        assert headers["authorization"] == "Bearer token"
        self.bodies.append(body)
        self.agents.append(headers.get("x-claude-code-agent-id", ""))
        try:
            await asyncio.sleep(1)
        except asyncio.CancelledError:
            self.left += 1
            raise
        status = self.told.pop(0) if self.told else 200
        content = [{"type": "text", "text": f"w{20 + len(body) % 20}"}]
        if len(body) % 2:
            content.append({"type": "tool_use", "id": f"toolu_{len(body)}", "name": "run", "input": {}})
        return status, msgspec.json.encode({"id": f"msg_{len(body)}", "content": content})


class Stage:
    def __init__(self, loop: VirtualLoop, world: World, **script: Any) -> None:
        self.loop, self.world = loop, world
        self.script = AgentScript(**{"think_s": (10.0,), **script})
        world.agent_script = lambda execution, attempt: self.script  # type: ignore[method-assign]
        self.proxy = Proxy(loop, world)
        self.folder = AgentFolder(world, RUN, "e-000001.00", 0)

    def play(self, body: Body) -> None:
        life = Life(self.loop, "harness")
        life.begin(body(life))
        self.loop.run_until_complete(life.ended)

    def launch(self, life: Life) -> WorldGroup:
        self.folder.make(Path("/tasks"), REF)
        guard = WorldGuard(self.world.machine, life, after_s=1.0)
        environment = {
            "ANTHROPIC_BASE_URL": self.proxy.url,
            "ANTHROPIC_AUTH_TOKEN": "token",
            "HOME": str(self.folder.home),
        }
        launch = AgentLaunch(self.world)
        return launch(
            ["true"], folder=self.folder.work, environment=environment, output=self.folder.output, guard=guard
        )

    def outcomes(self) -> list[str]:
        return [asked.outcome for asked in self.world.asked]


def test_it_asks_and_reports(loop: VirtualLoop, world: World) -> None:
    stage = Stage(loop, world, calls=3)

    async def body(life: Life) -> None:
        group = stage.launch(life)
        await group.wait()
        assert await group.end(5.0) == 0

    stage.play(body)
    counters = stage.folder.counters()
    assert counters is not None and (counters.calls, counters.reconnects, counters.harness_errors) == (3, 0, 0)
    assert msgspec.json.decode(stage.folder.pack()) == {"execution": "e-000001.00", "calls": 3}
    assert stage.outcomes() == ["answered"] * 3
    assert [len(msgspec.json.decode(each)["messages"]) for each in stage.proxy.bodies] == [1, 3, 5]
    assert world.machine.groups == {}


def test_it_asks_again_with_the_same_bytes_and_gives_up_in_the_end(loop: VirtualLoop, world: World) -> None:
    stage = Stage(loop, world, calls=2)
    stage.proxy.told = [503, 200, *[500] * 12]

    async def body(life: Life) -> None:
        group = stage.launch(life)
        await group.wait()
        assert await group.end(5.0) == 1

    stage.play(body)
    counters = stage.folder.counters()
    assert counters is not None and (counters.calls, counters.reconnects, counters.harness_errors) == (2, 13, 1)
    assert len(set(stage.proxy.bodies)) == 2


def test_its_oddities(loop: VirtualLoop, world: World) -> None:
    stage = Stage(loop, world, calls=4, leave=0, leave_s=0.5, twin=1, again=2, branch=3, sub_agent=3, late=True)

    async def body(life: Life) -> None:
        await stage.launch(life).wait()
        await asyncio.sleep(10)

    stage.play(body)
    assert stage.proxy.left == 1
    assert stage.outcomes() == ["left", *["answered"] * 8]
    bodies = stage.proxy.bodies
    assert bodies[0] == bodies[1] and bodies[2] == bodies[3] and bodies[4] == bodies[5]
    assert [index for index, agent in enumerate(stage.proxy.agents) if agent] == [6]
    asked = [message["content"] for message in msgspec.json.decode(bodies[7])["messages"]]
    assert asked[-1] == "rather 3" and len(asked) == 6
    assert "still there" in bodies[8].decode()
    assert world.violations == []


def test_requests_are_spoilt_on_demand(loop: VirtualLoop, world: World) -> None:
    stage = Stage(loop, world, calls=2, leave_s=0.5)
    world.next_requests += ["twice", "leave"]
    world.next_ends.append("late")

    async def body(life: Life) -> None:
        await stage.launch(life).wait()
        await asyncio.sleep(10)

    stage.play(body)
    assert stage.outcomes() == ["answered", "answered", "left", "answered", "answered"]


@pytest.mark.parametrize(("stubborn", "code", "after"), [(False, -signal.SIGTERM, 0), (True, -signal.SIGKILL, 5)])
def test_one_that_hangs_is_ended(loop: VirtualLoop, world: World, stubborn: bool, code: int, after: float) -> None:
    stage = Stage(loop, world, calls=1, ending="hangs", stubborn=stubborn)

    async def body(life: Life) -> None:
        group = stage.launch(life)
        waiting = asyncio.ensure_future(group.wait())
        await asyncio.sleep(1000)
        assert not waiting.done() and world.machine.homes("/run/workspaces") == {str(stage.folder.home)}
        began = loop.time()
        assert await group.end(5.0) == code
        assert loop.time() - began == after
        await waiting

    stage.play(body)


def test_the_guard_ends_what_a_dead_service_leaves_and_the_table_knows_it_until_then(
    loop: VirtualLoop, world: World
) -> None:
    stage = Stage(loop, world, calls=1, ending="hangs")
    harness = Life(loop, "harness")

    async def body(_: Life) -> None:
        async def serve() -> None:
            stage.launch(harness)
            await asyncio.Event().wait()

        harness.begin(serve())
        await asyncio.sleep(5)
        harness.kill()
        await asyncio.sleep(0.5)
        assert len(world.machine.groups) == 1
        await asyncio.sleep(1)
        assert world.machine.groups == {}
        assert stage.outcomes() == []

    stage.play(body)


def test_orphans_are_found_by_the_next_life(loop: VirtualLoop, world: World) -> None:
    stage = Stage(loop, world, calls=1, ending="hangs")

    async def body(life: Life) -> None:
        group = stage.launch(life)
        stage.folder.record(group.pid, group.start)
        assert AgentFolder(world, RUN, "e-000001.00", 0).end_orphans() == []
        assert group.code == -signal.SIGKILL
        await group.wait()
        world.disks[""].wipe()
        assert stage.folder.recorded() is None and stage.folder.counters() is None

    stage.play(body)


def test_a_workspace_may_not_come_to_be(loop: VirtualLoop, world: World) -> None:
    with pytest.raises(TaskError):
        Stage(loop, world, unstartable=True).folder.make(Path("/tasks"), REF)
    world.disks[""].full = True
    with pytest.raises(OSError, match="No space left"):
        Stage(loop, world).folder.make(Path("/tasks"), REF)


@pytest.mark.parametrize("result", ["score", "crash", "hang", "garbage"])
def test_tests_end_as_their_script_says(loop: VirtualLoop, world: World, result: Any) -> None:
    world.scripts = Scripts(tests_fail=0.0)
    world.next_tests.append(result)
    folder = ScoreFolder(world, Path("/run/evaluations/evaluator"), "v-000001.00-0.1")
    script = world._random("score", "v-000001.00-0").choice((0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0))

    async def body(life: Life) -> None:
        folder.prepare(Path("/tasks/t"), "d", b"{}")
        guard = WorldGuard(world.machine, life, after_s=1.0)
        environment = {"HOME": str(folder.home)}
        launch = ScoreLaunch(world)
        group = launch(["bash"], folder=folder.work, environment=environment, output=folder.output, guard=guard)
        await asyncio.wait({asyncio.ensure_future(group.wait())}, timeout=600)
        await group.end(0.0)
        if result == "score":
            assert folder.reward() == script
        else:
            with pytest.raises(Refusal):
                folder.reward()
        folder.clear()
        with pytest.raises(Refusal, match="workspace_refused"):
            folder.prepare(Path("/tasks/t"), "d", b"no JSON")

    life = Life(loop, "evaluator")
    life.begin(body(life))
    loop.run_until_complete(life.ended)
