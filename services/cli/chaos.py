"""`gyre run FILE --chaos SEED`: every process of the mesh is killed once, with SIGKILL, while the run goes on.

    all ready --> its moment comes --> SIGKILL --> dead --> all ready again --> the next one

Moments are drawn over the progress of the run, not over time. Where kills fall behind, because processes take long to
come back, the run is held back: chaos says `run.paused`, and `run.resumed` once the kill it waits for is done. No burst
ends in a paused run, so the last one ends when nothing is outstanding. Only who is killed while the run is held at its
last burst finds the mesh with little to do.

Invariants
- never two at once: the next is killed only when every process answers `/readyz` with 200 and the event bus answers;
- the run ends after the last process that was killed is ready again;
- what chaos held back it lets go, however it ends itself; a pause that somebody else asked for stays;
- a kill of ours is none of the failures after which the supervisor gives a service up;
- who did not come back within `READY_S` ends the chaos, not the run: the summary says what is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
import psutil

from schemas import streams
from schemas.config import Config
from schemas.envelope import Event
from schemas.errors import BusError
from schemas.events import BatchStepped, ServiceJoined
from services.cli.background import READY, probe
from services.cli.chaos_hold import CHAOS, Hold
from services.cli.chaos_plan import EVENTS_AN_EXECUTION, Kill, Killed, in_turn, plan, position
from services.mesh.bus import Bus
from services.mesh.clock import SystemClock
from services.mesh.processes import Process, is_alive
from services.mesh.publisher import Publisher
from services.mesh.server import NatsServer
from services.mesh.supervise import Supervisor

BUS = "nats-server"
ROLLOUT, ENGINE = "rollout-", "engine-"
READY_S = 180.0
STEADY_S = 1.0
"""Ready is who is ready for so long: one that joins and ends at once is not."""
RELEASE_S = 5.0
POLL_S = 0.1
ANSWER_S = 2.0


def processes(services: Sequence[str], *, own_bus: bool) -> list[str]:
    """What can be killed: every service, the engine beside each rollout cell's service, the event bus if it is ours."""
    engines = [ENGINE + name.removeprefix(ROLLOUT) for name in services if name.startswith(ROLLOUT)]
    return [*services, *engines, *([BUS] if own_bus else [])]


class Chaos:
    """Lives as long as the run: told of its events by `observe`, killing in `run`.

    >>> chaos = Chaos(seed=1, config=config, services=["scheduler", "rollout-cell-0"], own_bus=True)
    >>> await chaos.run(supervisor, server, bus, tell=print)     # beside a reader that calls chaos.observe(event)
    >>> chaos.killed
    """

    def __init__(self, *, seed: int, config: Config, services: Sequence[str], own_bus: bool) -> None:
        rules = config.scheduler
        names = processes(services, own_bus=own_bus)
        self.plan: list[Kill] = plan(names, seed=seed, steps=config.steps, mu=rules.mu)
        self.killed: list[Killed] = []
        self._expected = rules.B * rules.group_size * EVENTS_AN_EXECUTION
        self._awaited: Kill | None = None
        self._hold = Hold()
        self._ends: list[int] = []
        self._sequence = 0
        self._joined: dict[str, ServiceJoined] = {}
        self._over = asyncio.Event()
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Chaos {len(self.killed)} of {len(self.plan)} killed, at {self._position:.2f} steps>"

    @property
    def _position(self) -> float:
        return position(self._ends, self._sequence, expected=self._expected)

    def observe(self, event: Event) -> None:
        """Every event of the log, in order."""
        self._sequence = event.seq
        self._hold.observe(event)
        if isinstance(event.data, BatchStepped) and event.data.step > len(self._ends):
            self._ends.append(event.seq)
        elif isinstance(event.data, ServiceJoined):
            self._joined[event.entity] = event.data
        elif event.kind == "run.finished":
            self._over.set()
        self._changed.set()

    async def run(
        self, supervisor: Supervisor, server: NatsServer | None, bus: Bus, tell: Callable[[str], None]
    ) -> None:
        """Kills until all are killed or the mesh doesn't become ready; returns when the run is over.

        Says to `tell` what it does."""
        mesh = MeshUnderTest(supervisor, server, bus, self._joined)
        operator = Publisher(bus=bus, clock=SystemClock(), run=supervisor.run, owner="operator", instance=CHAOS)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pace(operator, tell))
                missing = await self._kill_all(mesh, tell)
                self._await(None)
        except ExceptionGroup as failures:
            # The first failure ended the others; it is what a person has to read.
            raise failures.exceptions[0] from failures
        finally:
            # A bus that is gone cannot be told; whoever goes on with the run lets it go then.
            with contextlib.suppress(BusError, TimeoutError):
                async with asyncio.timeout(RELEASE_S):
                    await self._hold.release(operator)
        tell(f"chaos: killed {len(self.killed)} of {len(self.plan)} processes{f'; {missing}' if missing else ''}")
        await self._over.wait()

    async def _kill_all(self, mesh: MeshUnderTest, tell: Callable[[str], None]) -> str:
        """One after the other; an empty text, or why not all."""
        end = self.plan[-1].hold if self.plan else 0.0
        for planned in self.plan:
            kill = in_turn(planned, now=self._position, end=end)
            self._await(kill)
            if not await self._reach(kill.at):
                return "the run was over before the others' turn"
            missing, _ = await self._wait_ready(mesh, steady_s=0.0)
            if missing:
                return missing
            step, sequence, began = len(self._ends), self._sequence, time.monotonic()
            if not await mesh.kill(kill.process):
                return f"{kill.process} had ended by itself"
            done = Killed(process=kill.process, at_step=step, at_sequence=sequence)
            self.killed.append(done)
            tell(f"chaos: killed {kill.process} after step {step}, event {sequence}")
            missing, since = await self._wait_ready(mesh, steady_s=STEADY_S)
            if missing:
                return missing
            took = round(since - began, 2)
            self.killed[-1] = msgspec.structs.replace(done, ready_after_s=took)
            tell(f"chaos: all are ready {took:.1f} s after the end of {kill.process}")
        return ""

    def _await(self, kill: Kill | None) -> None:
        """From now on the run is held back for this one; for nobody when all are done."""
        self._awaited = kill
        self._changed.set()

    async def _pace(self, operator: Publisher, tell: Callable[[str], None]) -> None:
        """Holds the run back while it is further than the kill in hand allows, until there is none."""
        while not self._over.is_set():
            awaited = self._awaited
            if awaited is None:
                return
            if self._position < awaited.hold:
                await self._hold.release(operator)
            elif await self._hold.take(operator):
                tell(f"chaos: the run waits for {awaited.process}")
            if awaited is self._awaited:
                self._changed.clear()
                await self._changed.wait()

    async def _reach(self, at: float) -> bool:
        """Wait for a moment of the run; whether it came before the run was over."""
        while not self._over.is_set() and self._position < at:
            self._changed.clear()
            await self._changed.wait()
        return not self._over.is_set()

    async def _wait_ready(self, mesh: MeshUnderTest, *, steady_s: float) -> tuple[str, float]:
        """Until every process has been ready for so long: an empty text, and since when (monotonic).

        After `READY_S`, or when the run is over before: why it is not."""
        deadline, since = time.monotonic() + READY_S, 0.0
        while True:
            missing = await mesh.missing()
            now = time.monotonic()
            since = 0.0 if missing else since or now
            if since and now >= since + steady_s:
                return "", since
            if missing and self._over.is_set():
                return f"the run was over while {missing}", 0.0
            if missing and now > deadline:
                return f"after {READY_S:.0f} s {missing}", 0.0
            await asyncio.sleep(POLL_S)


class MeshUnderTest:
    """Processes of a run that can be killed one by one and asked whether they are ready."""

    def __init__(
        self, supervisor: Supervisor, server: NatsServer | None, bus: Bus, joined: Mapping[str, ServiceJoined]
    ) -> None:
        """`joined`: what each service said last about itself."""
        self._supervisor, self._server, self._bus, self._joined = supervisor, server, bus, joined

    async def kill(self, process: str) -> bool:
        """SIGKILL to that process alone; true once it is dead, false when it was dead before."""
        if process == BUS:
            assert self._server is not None
            self._server.kill()
            return True
        service = ROLLOUT + process.removeprefix(ENGINE) if process.startswith(ENGINE) else process
        entry = next(each for each in self._supervisor.services if each.name == service)
        pid, created = self._engine(entry) if service != process else (entry.pid, entry.created)
        if not is_alive(pid, created):
            return False
        self._supervisor.excuse(service)
        os.kill(pid, signal.SIGKILL)
        while is_alive(pid, created):
            await asyncio.sleep(POLL_S)
        return True

    async def missing(self) -> str:
        """Empty when all are ready, else one that is not, and why."""
        if self._server is not None and not self._server.running:
            return f"{BUS} is down"
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._bus.last_seq(streams.log_stream(self._supervisor.run))
        except (BusError, TimeoutError):
            return f"{BUS} does not answer"
        for entry in self._supervisor.services:
            said = self._joined.get(entry.name)
            if entry.state != "running" or not is_alive(entry.pid, entry.created):
                return f"{entry.name} is down"
            if said is None or said.pid != entry.pid:
                return f"{entry.name} is starting"
            answer = await asyncio.to_thread(probe, said.url)
            if answer != READY:
                return f"{entry.name} is not ready: {answer}"
            if entry.name.startswith(ROLLOUT) and not self._engine(entry)[0]:
                return f"the engine of {entry.name} is down"
        return ""

    def _engine(self, entry: Process) -> tuple[int, float]:
        """Pid and start of the one process that a rollout cell's service has started; zeros when there is none."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(entry.pid).children():
                if is_alive(child.pid, child.create_time()):
                    return child.pid, child.create_time()
        return 0, 0.0
