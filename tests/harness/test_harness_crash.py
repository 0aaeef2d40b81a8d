"""The harness service as a process of its own on a real server, ended by force in the middle."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from schemas.events import ExecutionDispatched, ExecutionPlaced, ServiceJoined
from schemas.ids import execution_id
from services.harness.service import serve
from services.mesh.nats_bus import connect
from services.mesh.server import NatsServer
from tests.harness.agents import BASH, alive, file_of, gone, workspace
from tests.mesh.workers import World, make_task, serving

ROOT = Path(__file__).parents[2]
SERVICE = """
import asyncio, sys
from pathlib import Path
from services.mesh.service import open_context, run_service
from services.harness.service import serve

async def main():
    folder = Path(sys.argv[3])
    context = await open_context(
        url=sys.argv[1], run=sys.argv[2], service="harness", folder=folder, cache=folder, here=folder
    )
    return await run_service(serve, context)

sys.exit(asyncio.run(main()))
"""
# A harness that ignores SIGTERM, with a child in a session of its own; the second execution ends when the gate opens.
SCRIPT = """
trap '' TERM
case $GYRE_AGENT_SEED in
*00) setsid sleep 600 & echo $! > child; echo partial > out.txt; echo $$ > up; wait ;;
*) echo whole > out.txt ;;
esac
"""


async def start(server: NatsServer, run: str, folder: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        SERVICE,
        server.url,
        run,
        str(folder),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_nothing_is_lost_or_doubled(tmp_path: Path, nats_server: NatsServer, how: signal.Signals) -> None:
    run = f"r-crash-{how.name.lower()}"
    make_task(tmp_path / "tasks" / "card")
    async with await connect(nats_server.url, run, name="test") as bus:
        world = World(bus, tmp_path, {"harness": {"command": [*BASH, SCRIPT]}})
        await world.begin()
        first = await start(nats_server, run, tmp_path)
        await world.say("proxy", "service.joined", "proxy", ServiceJoined(url="http://127.0.0.1:1", pid=1))
        hung, later = execution_id(0, 0), execution_id(0, 1)
        await place(world, hung)
        work = workspace(tmp_path, hung)
        pids = [int(await file_of(work / name)) for name in ("up", "child")]
        await world.wait("execution.started", hung)
        first.send_signal(how)
        code = await first.wait()
        assert code == (-how if how is signal.SIGKILL else 0)
        for pid in pids:
            await gone(pid)
        await place(world, later)
        async with serving(serve, world.context("harness")):
            lost = (await world.wait("execution.lost", hung)).data
            assert (lost.attempt, lost.reason) == (0, "harness service restarted")
            await world.say("scheduler", "execution.placed", hung, ExecutionPlaced(cell="cell-1", epoch=0, attempt=1))
            pids.append(int(await file_of(workspace(tmp_path, hung, 1) / "up")))
            done = (await world.wait("execution.finished", later)).data
        assert done.reason == "completed"
        said = await world.events("execution.started", "execution.lost", "execution.finished")
        assert [(event.kind, event.data.attempt) for event in said if event.entity == hung] == [
            ("execution.started", 0),
            ("execution.lost", 0),
            ("execution.started", 1),
        ]
        assert [event.kind for event in said if event.entity == later] == ["execution.started", "execution.finished"]
        await gone(int((workspace(tmp_path, hung, 1) / "child").read_text()))
        assert not any(alive(pid) for pid in pids)


async def place(world: World, execution: str) -> None:
    dispatched = ExecutionDispatched(group="g-000000", member=0, task="card")
    await world.say("scheduler", "execution.dispatched", execution, dispatched)
    placed = ExecutionPlaced(cell="cell-1", epoch=0, attempt=0)
    await world.say("scheduler", "execution.placed", execution, placed)
