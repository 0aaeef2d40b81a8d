"""A harness process that follows a script: a client of the Messages API with a client's manners, good and bad.

    think ── ask ── answer, its tool calls carried out ── think ── ask ... ── report ── exit | hang

It asks again after refusals and broken connections, waiting longer each time, as real clients do; a request that it gave up
or asks twice is the same request, byte for byte. Every request goes into the world's journal. `AgentLaunch` starts it in
place of the configured command, `AgentFolder` is where it works.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from replay.worlds.faces import Life
from replay.worlds.health import split
from replay.worlds.processes import WorldGroup
from replay.worlds.world import AgentScript, Asked, World
from schemas.errors import EnvironmentMissing, TaskError
from schemas.units import Counters, TaskRef
from services.harness.folder import Recorded
from services.mesh.guard import Keeper
from services.mesh.workspace import WorkspaceError

TRIES = 12
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 32.0
PATIENCE_S = 1800.0
"""How long it waits for one answer before it breaks the connection and asks again."""
MAX_TOKENS = 8
SYSTEM = "You are a test."
TOOLS = [{"name": "run", "description": "does", "input_schema": {"type": "object"}}]


class Failed(Exception):
    """The agent gives up: its calls failed too often."""


class Agent:
    """One attempt's process. `base` and `token` are where and as whom it asks."""

    def __init__(self, world: World, script: AgentScript, *, name: str, attempt: int, base: str, token: str) -> None:
        self._world, self._script = world, script
        self._name, self._attempt = name, attempt
        self._address, self._path = split(f"{base}/v1/messages")
        self._headers = {"authorization": f"Bearer {token}"}
        self.calls = self.reconnects = self.errors = 0

    async def main(self, folder: Path) -> int:
        """The exit code."""
        script, disk = self._script, self._world.disks[""]
        code = 1 if script.ending == "failed" else 0
        try:
            await self._work()
        except Failed:
            self.errors += 1
            code = 1
        try:
            disk.write(folder, "work", {"execution": self._name, "calls": self.calls})
            if not script.silent:
                counters = Counters(calls=self.calls, reconnects=self.reconnects, harness_errors=self.errors)
                disk.write(folder, "report", counters)
        except OSError:
            code = 1
        if script.ending == "hangs":
            await asyncio.get_running_loop().create_future()
        return code

    async def late(self) -> None:
        """One more request, from a child that the agent forgot."""
        await self._once([{"role": "user", "content": "still there"}], self._headers)

    async def _work(self) -> None:
        script = self._script
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"do {self._name}"}]
        for index in range(script.calls):
            await asyncio.sleep(script.think_s[index % len(script.think_s)])
            if index == script.sub_agent:
                asked = [{"role": "user", "content": f"help {index}"}]
                await self._ask(asked, {**self._headers, "x-claude-code-agent-id": f"a{index}"})
            if index == script.branch and len(messages) > 2:
                messages = [*messages[:-2], {"role": "user", "content": f"rather {index}"}]
            answer = await self._ask(messages, self._headers, index)
            messages = [*messages, {"role": "assistant", "content": answer["content"]}, _reply(answer, index)]

    async def _ask(self, messages: list[dict[str, Any]], headers: dict[str, str], index: int = -1) -> dict[str, Any]:
        """The answer to a request, whatever it takes. Raises Failed."""
        script, world = self._script, self._world
        self.calls += 1
        manner = world.next_requests.popleft() if world.next_requests else ""
        if manner == "leave" or (index >= 0 and index == script.leave):
            await self._leave(messages, headers)
        twin = None
        if manner == "twice" or (index >= 0 and index == script.twin):
            twin = asyncio.ensure_future(self._once(messages, headers))
        pause = FIRST_PAUSE_S
        for _ in range(TRIES):
            answer = await self._once(messages, headers)
            if answer is not None:
                break
            self.reconnects += 1
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
        else:
            raise Failed
        if twin is not None:
            other = await twin
            if other is not None and other["id"] == answer["id"] and other != answer:
                world.violations.append(f"{self._name}.{self._attempt}: one request, two answers: {answer} {other}")
        if index >= 0 and index == script.again:
            other = await self._once(messages, headers)
            if other is not None and other != answer:
                world.violations.append(f"{self._name}.{self._attempt}: asked again, answered {other}, before {answer}")
        return answer

    async def _leave(self, messages: list[dict[str, Any]], headers: dict[str, str]) -> None:
        left = asyncio.ensure_future(self._once(messages, headers))
        await asyncio.wait({left}, timeout=self._script.leave_s)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)

    async def _once(self, messages: list[dict[str, Any]], headers: dict[str, str]) -> dict[str, Any] | None:
        """One request; None when there is no answer and it may be asked again. Raises Failed for a refusal for good."""
        body = msgspec.json.encode(
            {"model": "policy", "max_tokens": MAX_TOKENS, "system": SYSTEM, "tools": TOOLS, "messages": messages}
        )
        asked = Asked(execution=self._name, attempt=self._attempt, outcome="gone")
        self._world.asked.append(asked)
        try:
            async with asyncio.timeout(PATIENCE_S * max(self._world.scripts.pace, 1e-3)):
                address = self._world.balance(self._address)
                status, answer = await self._world.network.ask(address, self._path, headers, body)
        except (ConnectionError, TimeoutError):
            asked.outcome = "left"
            return None
        except asyncio.CancelledError:
            asked.outcome = "left"
            raise
        asked.status = status
        if status == 200:
            told: dict[str, Any] = msgspec.json.decode(answer)
            asked.outcome, asked.message = "answered", told["id"]
            asked.answer = hashlib.blake2b(answer, digest_size=8).hexdigest()
            asked.records = self._world.records_end()
            return told
        asked.outcome = "refused"
        if status not in (401, 429, 500, 503):
            raise Failed
        return None


class AgentFolder:
    """Implements `services.harness.folder.Folder` on a disk in memory."""

    def __init__(self, world: World, run_folder: Path, execution: str, attempt: int) -> None:
        self.path = run_folder / f"workspaces/{execution}.{attempt}"
        self._world, self._disk = world, world.disks[""]
        self._script = world.agent_script(execution, attempt)

    @property
    def work(self) -> Path:
        return self.path / "work"

    @property
    def home(self) -> Path:
        return self.path / "home"

    @property
    def instruction(self) -> Path:
        return self.path / "instruction.md"

    @property
    def report(self) -> Path:
        return self.path / "report.json"

    @property
    def output(self) -> Path:
        return self.path / "output.log"

    def make(self, tasks: Path, ref: TaskRef) -> None:
        if self._script.unstartable:
            raise TaskError("the task is damaged", where=str(tasks / ref.name))
        self._disk.make(self.path)
        self._disk.write(self.path, "work", {})

    def record(self, pid: int, start: int) -> None:
        self._disk.write(self.path, "process", Recorded(pid=pid, start=start))

    def recorded(self) -> Recorded | None:
        found = self._disk.read(self.path, "process")
        return found if isinstance(found, Recorded) else None

    def end_orphans(self) -> list[int]:
        known = self.recorded() or Recorded(pid=0, start=0)
        return self._world.machine.kill(known.pid, known.start, str(self.home))

    def counters(self) -> Counters | None:
        found = self._disk.read(self.path, "report")
        return found if isinstance(found, Counters) else None

    def pack(self) -> bytes:
        if self._script.unpackable:
            raise WorkspaceError("the workspace is too large", where=str(self.work))
        return msgspec.json.encode(self._disk.read(self.path, "work"), order="deterministic")


class AgentLaunch:
    """Implements `services.mesh.process_group.Launch` for the harness's life."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __call__(
        self,
        command: Sequence[str],
        *,
        folder: Path,
        environment: Mapping[str, str],
        output: Path,
        guard: Keeper,
    ) -> WorldGroup:
        world = self._world
        name, _, number = folder.parent.name.rpartition(".")
        attempt = int(number)
        base = environment["ANTHROPIC_BASE_URL"]
        if not base:
            raise EnvironmentMissing("there is no proxy", where=name)
        script = world.agent_script(name, attempt)
        agent = Agent(world, script, name=name, attempt=attempt, base=base, token=environment["ANTHROPIC_AUTH_TOKEN"])
        life = world.life(f"agent-{name}.{attempt}")
        group = WorldGroup(world.machine, life, environment["HOME"], stubborn=script.stubborn)
        life.at_end(lambda: self._ended(agent, script, f"child-{name}.{attempt}"))
        guard.add(group.pid, group.start, group.home)
        group.begin(agent.main(folder.parent))
        return group

    def _ended(self, agent: Agent, script: AgentScript, name: str) -> None:
        world = self._world
        late = world.next_ends.popleft() if world.next_ends else ""
        if script.late or late:
            child: Life = world.life(name)
            child.begin(_quietly(agent))


async def _quietly(agent: Agent) -> None:
    try:
        await agent.late()
    except Failed:
        return


def _reply(answer: dict[str, Any], index: int) -> dict[str, Any]:
    """What the agent says next: the results of the calls, or a word of its own."""
    calls = [block for block in answer["content"] if block["type"] == "tool_use"]
    if not calls:
        return {"role": "user", "content": f"go on {index}"}
    results = [{"type": "tool_result", "tool_use_id": call["id"], "content": f"done {index}"} for call in calls]
    return {"role": "user", "content": results}
