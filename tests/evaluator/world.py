"""A run with one task, evaluations of a preserved workspace that are asked for, and their answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from schemas import streams
from schemas.events import EvaluationRequested
from services.mesh.workspace import pack
from tests.mesh.workers import World, make_task, memory_world

EXECUTION = "e-000000.00"
EVALUATION = "v-000000.00-1"


def writes(reward: str) -> str:
    return f"printf '%s' '{reward}' > \"$VERIFIER_LOGS/reward.txt\"\n"


async def world_of(folder: Path, tests: str, *, toml: str = "", clock: Any = None, **evaluator: Any) -> World:
    make_task(folder / "tasks" / "card", tests=tests, toml=toml)
    world = memory_world(folder, {"evaluator": evaluator}, clock=clock)
    await world.begin()
    return world


async def request(world: World, *, evaluation: str = EVALUATION, data: bytes | None = None, **changes: Any) -> int:
    """Ask for an evaluation of a workspace that holds `out.txt`."""
    if data is None:
        work = world.folder / "preserved"
        work.mkdir(exist_ok=True)
        (work / "out.txt").write_text("ada\n")
        data = pack(work)
    name = streams.workspace_blob(EXECUTION, 1)
    digest = await world.bus.put_blob(name, data)
    asked: dict[str, Any] = {
        "execution": EXECUTION,
        "attempt": 1,
        "task": "card",
        "task_digest": world.tasks[0].digest,
        "workspace": name,
        "workspace_digest": digest,
    } | changes
    tries = asked.get("tries", 1)
    return await world.say(
        "trajectories", "evaluation.requested", evaluation, EvaluationRequested(**asked), id=f"q-{evaluation}-{tries}"
    )


async def answer(world: World, evaluation: str = EVALUATION) -> Any:
    """Data of the first answer to an evaluation."""
    async for stored in world.bus.read(streams.log_stream(world.bus.run), 0, subject_filter="gyre.*.evaluator.>"):
        if stored.subject.endswith((f"{evaluation}.scored", f"{evaluation}.failed")):
            return (await world.wait("evaluation." + stored.subject.rpartition(".")[2], evaluation)).data
    raise AssertionError("the log ended")
