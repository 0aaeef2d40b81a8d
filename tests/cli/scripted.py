"""A mesh of scripted services for the command line's tests: no models, one short run.

    python scripted.py ROLE RUN URL FILE

`scheduler` opens the run's few events and ends it when told; any other joins and stays, one called `rollout-...` with
an engine beside it, a process without which it ends. FILE is a FIFO: the scheduler ends the run once somebody has
written to it (`go`); a worker told `crash` as ROLE ends at once with words.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from schemas import events as e
from schemas.units import Counters, GapStats
from services.mesh.clock import SystemClock
from services.mesh.health import Health
from services.mesh.nats_bus import NatsBus, connect
from services.mesh.publisher import Publisher


class Voice:
    """Says events of any owner, with ids in order."""

    def __init__(self, bus: NatsBus, run: str) -> None:
        self.bus, self.run, self.count = bus, run, 0
        self.speakers: dict[str, Publisher] = {}

    async def say(self, owner: str, kind: str, entity: str, data: object) -> None:
        self.count += 1
        speaker = self.speakers.setdefault(
            owner, Publisher(bus=self.bus, clock=SystemClock(), run=self.run, owner=owner, instance=owner)
        )
        await speaker.say(kind, entity, data, id=f"{self.run}.{owner}.script.{self.count}")  # type: ignore[arg-type]


async def script(voice: Voice, go: Path) -> None:
    say = voice.say
    joined = e.CellJoined(index=0, capacity=4, url="", engine="scripted", version=0, capabilities=[])
    await say("rollout", "cell.joined", "cell-0", joined)
    execution = e.ExecutionDispatched(group="g-000000", member=0, task="t")
    await say("scheduler", "execution.dispatched", "e-000000.00", execution)
    await say("harness", "execution.started", "e-000000.00", e.ExecutionStarted(attempt=0))
    for step in (1, 2):
        stepped = e.BatchStepped(
            step=step,
            version=step,
            members=["cell-0"],
            loss=0.5,
            grad_norm=1.0,
            lr=1e-6,
            micro_steps=1,
            tokens=10,
            targets=5,
            executions=2,
            masked=0,
            reward=0.25 * step,
            gap=GapStats(sum_abs=1e-6, max_abs=1e-6, count=1),
            seconds=0.1,
        )
        await say("trainer", "batch.stepped", f"b-{step:06d}", stepped)
    await asyncio.to_thread(go.read_text)
    finished = e.ExecutionFinished(
        attempt=0,
        reason="completed",
        exit_code=0,
        seconds=1.0,
        workspace="",
        workspace_digest="",
        counters=Counters(calls=3, reconnects=1),
    )
    await say("harness", "execution.finished", "e-000000.00", finished)
    await say("scheduler", "run.finished", voice.run, e.RunFinished(steps=2, reason="steps_done"))


async def join(voice: Voice, role: str) -> None:
    health = Health(service=role, instance=role)
    health.ready = lambda: ""
    speaker = Publisher(bus=voice.bus, clock=SystemClock(), run=voice.run, owner="scheduler", instance=role)
    joined = e.ServiceJoined(url=await health.start(), pid=os.getpid())
    await speaker.say("service.joined", role, joined, id=f"{voice.run}.{role}.joined.{os.getpid()}")


async def main(role: str, run: str, url: str, go: str) -> None:
    if role == "crash":
        sys.exit("ImportError: libabsent.so.9: cannot open shared object file")
    bus = await connect(url, run, name=role)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    voice = Voice(bus, run)
    engine = await asyncio.create_subprocess_exec("sleep", "600") if role.startswith("rollout-") else None
    await join(voice, role)
    if role == "scheduler":
        telling = asyncio.create_task(script(voice, Path(go)))
        done, _ = await asyncio.wait([telling, asyncio.create_task(stop.wait())], return_when=asyncio.FIRST_COMPLETED)
        if telling not in done:
            os._exit(0)
        telling.result()
    if engine is not None:
        died = asyncio.create_task(engine.wait())
        await asyncio.wait([died, asyncio.create_task(stop.wait())], return_when=asyncio.FIRST_COMPLETED)
        if died.done():
            sys.exit("the engine died")
        engine.terminate()
        await died
    await stop.wait()
    await bus.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
