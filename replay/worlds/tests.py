"""A task's tests that follow a script: they write a reward, write garbage, crash or hang.

`ScoreLaunch` starts them in place of `bash test.sh`, `ScoreFolder` is where they work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from replay.worlds.processes import WorldGroup
from replay.worlds.world import ScoreScript, World
from services.evaluator.refusal import Refusal
from services.evaluator.reward import reward_of
from services.mesh.guard import Keeper


class ScoreFolder:
    """Implements `services.evaluator.folder.Folder` on a disk in memory."""

    def __init__(self, world: World, folder: Path, name: str) -> None:
        self.path = folder / name
        self.work = self.path / "work"
        self.tests = self.path / "tests"
        self.logs = self.path / "logs"
        self.home = self.path / "home"
        self.output = folder / f"{name}.log"
        self._disk = world.disks[""]

    def prepare(self, task: Path, digest: str, workspace: bytes) -> None:
        try:
            msgspec.json.decode(workspace)
        except msgspec.DecodeError as error:
            raise Refusal("workspace_refused") from error
        try:
            self._disk.make(self.path)
        except OSError as error:
            raise Refusal("local_failure") from error

    def reward(self) -> float:
        written = self._disk.read(self.path, "reward.txt")
        return reward_of(written if isinstance(written, bytes) else None, None)

    def clear(self) -> None:
        self._disk.remove(self.path)


class ScoreLaunch:
    """Implements `services.mesh.process_group.Launch` for the evaluator's life."""

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
        world, name = self._world, folder.parent.name
        group = WorldGroup(world.machine, world.life(f"tests-{name}"), environment["HOME"])
        guard.add(group.pid, group.start, group.home)
        group.begin(self._main(folder.parent, world.score_script(name)))
        return group

    async def _main(self, folder: Path, script: ScoreScript) -> int:
        await asyncio.sleep(script.seconds)
        if script.result == "hang":
            await asyncio.get_running_loop().create_future()
        if script.result == "crash":
            return 139
        written = str(script.score) if script.result == "score" else script.garbage
        try:
            self._world.disks[""].write(folder, "reward.txt", written.encode())
        except OSError:
            return 1
        return 0
