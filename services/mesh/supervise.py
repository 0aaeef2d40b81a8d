"""Child processes of a run: started in a session of their own, restarted with back-off, ended in order.

    start --> running --exit 0, not lasting--> done
                 |  ^
     other exit  v  | after the back-off
                waiting --too many quick failures--> `failed` holds the error

Invariants
- no service outlives its supervisor: the kernel tells each child when its parent dies, and `end_with_parent` ends a
  child that does not listen;
- a service is never started twice at a time, and what a crashed one had started is ended before its successor starts
  (as far as `rss_bytes` has seen it: call that every few seconds);
- `mesh.json` names the processes that run now; it is replaced atomically at every change.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil

from schemas.errors import EnvironmentMissing, Fenced, GyreError
from services.mesh.processes import (
    Mesh,
    Process,
    State,
    die_with,
    is_alive,
    kill_group,
    last_line,
)


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """One service to keep running."""

    name: str
    """Instance, for example `rollout-cell-1`: unique in the run."""
    command: list[str]
    env: dict[str, str] = {}
    """Added to the supervisor's own environment."""
    rank: int = 0
    """Services end in rising order of rank; those of one rank end together."""
    lasting: bool = False
    """It serves until it is told to: one that ends with 0 before that is started again as well."""


class Backoff(msgspec.Struct, frozen=True, kw_only=True):
    """When a failing service starts again, and when it is given up."""

    first_s: float = 0.2
    factor: float = 2.0
    most_s: float = 10.0
    quick_s: float = 20.0
    """A process that lived shorter failed quickly; a longer life forgets the failures before."""
    limit: int = 5
    """Quick failures in a row after which the service is given up."""
    fenced_s: float = 10.0
    """First pause of a service that another instance of it displaced: it is not needed, unless that one ends."""
    fenced_most_s: float = 120.0

    def delay(self, failures: int) -> float:
        """Seconds to wait after this many quick failures in a row."""
        return float(min(self.most_s, self.first_s * self.factor ** max(0, failures - 1)))

    def fenced_delay(self, times: int) -> float:
        """Seconds to wait after it was displaced this many times in a row."""
        return float(min(self.fenced_most_s, self.fenced_s * self.factor ** max(0, times - 1)))


OnChange = Callable[[Process], None]


class Supervisor:
    """Keeps the services of one run alive.

    >>> supervisor = Supervisor(run=run, folder=folder, nats=url)
    >>> await supervisor.start(Spec(name="scheduler", command=[...]))
    >>> await supervisor.failed     # raises when a service is given up
    >>> await supervisor.stop()
    """

    def __init__(
        self,
        *,
        run: str,
        folder: Path,
        nats: str,
        nats_pid: int = 0,
        backoff: Backoff | None = None,
        on_change: OnChange | None = None,
        peak_rss_bytes: int = 0,
    ) -> None:
        """`folder` is the run's; `on_change` is called after every change of a service's state; `peak_rss_bytes` is
        what an earlier mesh of the run needed."""
        self.backoff = backoff or Backoff()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Never done while all is well; then it holds the GyreError of the service that was given up."""
        self._folder = folder
        self._on_change = on_change
        self._mesh = Mesh(
            run=run,
            supervisor=os.getpid(),
            supervisor_created=psutil.Process().create_time(),
            nats=nats,
            nats_pid=nats_pid,
            peak_rss_bytes=peak_rss_bytes,
        )
        self._specs: dict[str, Spec] = {}
        self._entries: dict[str, Process] = {}
        self._children: dict[str, asyncio.subprocess.Process] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._spawned: dict[str, asyncio.Event] = {}
        self._descendants: dict[str, dict[int, float]] = {}
        self._stopping: set[str] = set()
        self._excused: set[str] = set()
        self.crashes = 0
        """Ends of services that nobody asked for."""
        (folder / "logs").mkdir(parents=True, exist_ok=True)

    def __repr__(self) -> str:
        states = " ".join(f"{name}:{entry.state}" for name, entry in self._entries.items())
        return f"<Supervisor {self._mesh.run} [{states}]>"

    @property
    def run(self) -> str:
        return self._mesh.run

    @property
    def services(self) -> list[Process]:
        """In the order in which they were started."""
        return list(self._entries.values())

    async def start(self, spec: Spec) -> None:
        """Begin to keep a service; returns once its first process exists. Raises EnvironmentMissing when it cannot."""
        if spec.name in self._specs:
            raise GyreError(f"{spec.name} is supervised already", remedy="give each service a name of its own")
        self._specs[spec.name] = spec
        self._entries[spec.name] = Process(name=spec.name, log=str(self._log_path(spec.name)))
        self._spawned[spec.name] = asyncio.Event()
        keeper = asyncio.create_task(self._keep(spec), name=f"keep {spec.name}")
        self._keepers[spec.name] = keeper
        spawned = asyncio.create_task(self._spawned[spec.name].wait())
        await asyncio.wait({keeper, spawned}, return_when=asyncio.FIRST_COMPLETED)
        spawned.cancel()
        if keeper.done() and not spawned.done():
            keeper.result()

    async def stop(self, *, grace_s: float = 10.0) -> list[str]:
        """End all services, rank by rank: SIGTERM, at most `grace_s` for each rank, then SIGKILL to the whole group.

        Returns the names of those that had to be killed.
        """
        killed: list[str] = []
        for rank in sorted({spec.rank for spec in self._specs.values()}):
            names = [name for name, spec in self._specs.items() if spec.rank == rank]
            killed += await self._end(names, grace_s)
        self._mesh.ended = True
        self._write()
        if not self.failed.done():
            self.failed.cancel()
        return killed

    def bus_is(self, pid: int) -> None:
        """The event bus runs as this process from now on: others find it in `mesh.json`."""
        self._mesh.nats_pid = pid
        self._write()

    def excuse(self, name: str) -> None:
        """The next end of that service is our own doing: it starts again, and no failure is counted."""
        self._excused.add(name)

    async def kill(self) -> None:
        """End all services at once, by force."""
        self._stopping.update(self._specs)
        # Before: nobody finds the children of one that is gone.
        self._see_descendants()
        for name in self._specs:
            self._signal(name, signal.SIGKILL)
        await self.stop(grace_s=0.5)

    def rss_bytes(self) -> int:
        """Resident memory of this process and all its descendants, shared pages counted in each."""
        total = 0
        me = psutil.Process()
        self._see_descendants()
        for process in [me, *me.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                total += process.memory_info().rss
        if total > self._mesh.peak_rss_bytes:
            self._mesh.peak_rss_bytes = total
            self._write()
        return total

    @property
    def peak_rss_bytes(self) -> int:
        """Largest answer of `rss_bytes` so far."""
        return self._mesh.peak_rss_bytes

    async def _keep(self, spec: Spec) -> None:
        entry, failures, fenced = self._entries[spec.name], 0, 0
        try:
            while True:
                began = time.monotonic()
                child = await self._spawn(spec)
                code = await child.wait()
                entry.exit_code = code
                if spec.name in self._stopping:
                    return
                self._end_descendants(spec.name)
                if code == 0 and not spec.lasting:
                    self._set(entry, "done")
                    return
                if code == Fenced.exit_code:
                    # Starting at once would displace the other instance in turn, and so on for ever.
                    fenced += 1
                elif spec.name in self._excused:
                    self._excused.discard(spec.name)
                else:
                    self.crashes += 1
                    failures = failures + 1 if time.monotonic() - began < self.backoff.quick_s else 1
                if failures >= self.backoff.limit:
                    self._give_up(entry, failures)
                    return
                if code != Fenced.exit_code:
                    fenced = 0
                self._set(entry, "waiting")
                await asyncio.sleep(self.backoff.fenced_delay(fenced) if fenced else self.backoff.delay(failures))
                if spec.name in self._stopping:
                    return
                entry.restarts += 1
        except EnvironmentMissing as error:
            self._set(entry, "failed")
            if not self._spawned[spec.name].is_set():
                raise
            if not self.failed.done():
                self.failed.set_exception(error)
        finally:
            if spec.name in self._stopping:
                self._set(entry, "stopped")

    async def _spawn(self, spec: Spec) -> asyncio.subprocess.Process:
        entry = self._entries[spec.name]
        parent = os.getpid()
        with self._log_path(spec.name).open("ab") as log:
            try:
                child = await asyncio.create_subprocess_exec(
                    *spec.command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **spec.env},
                    start_new_session=True,
                    preexec_fn=lambda: die_with(parent),
                )
            except OSError as error:
                raise EnvironmentMissing(
                    f"cannot start {spec.command[0]}: {error.strerror}",
                    where=spec.name,
                    remedy="see that the program exists and may be executed",
                ) from error
        self._children[spec.name] = child
        entry.pid, entry.exit_code = child.pid, None
        with contextlib.suppress(psutil.NoSuchProcess):
            entry.created = psutil.Process(child.pid).create_time()
        self._set(entry, "running")
        self._spawned[spec.name].set()
        return child

    async def _end(self, names: list[str], grace_s: float) -> list[str]:
        self._stopping.update(names)
        self._see_descendants()
        for name in names:
            if self._entries[name].state == "waiting":
                self._keepers[name].cancel()
            self._signal(name, signal.SIGTERM)
        keepers = {self._keepers[name]: name for name in names}
        _, late = await asyncio.wait(keepers, timeout=grace_s) if keepers else (set(), set())
        for keeper in late:
            self._signal(keepers[keeper], signal.SIGKILL)
        if late:
            await asyncio.wait(late)
        for name in names:
            self._end_descendants(name)
        return [keepers[keeper] for keeper in late]

    def _see_descendants(self) -> None:
        for name, child in self._children.items():
            seen = self._descendants.setdefault(name, {})
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in psutil.Process(child.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        seen[process.pid] = process.create_time()
            for pid in [pid for pid, created in seen.items() if not is_alive(pid, created)]:
                del seen[pid]

    def _end_descendants(self, name: str) -> None:
        if name in self._children:
            kill_group(self._children[name].pid)
        for pid, created in self._descendants.pop(name, {}).items():
            if is_alive(pid, created):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _signal(self, name: str, signum: signal.Signals) -> None:
        child = self._children.get(name)
        if child is not None and child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                if signum == signal.SIGKILL:
                    os.killpg(child.pid, signum)
                else:
                    child.send_signal(signum)

    def _give_up(self, entry: Process, failures: int) -> None:
        self._set(entry, "failed")
        if not self.failed.done():
            last = last_line(Path(entry.log)) or f"exit code {entry.exit_code}"
            self.failed.set_exception(
                EnvironmentMissing(
                    f"{entry.name} failed {failures} times in a row; last it said: {last}",
                    where=entry.log,
                    remedy="read that log, correct the cause and start again",
                )
            )

    def _set(self, entry: Process, state: State) -> None:
        entry.state = state
        self._write()
        if self._on_change:
            self._on_change(entry)

    def _write(self) -> None:
        self._mesh.services = self.services
        path = self._folder / "mesh.json"
        new = path.with_suffix(".json.new")
        new.write_bytes(msgspec.json.format(msgspec.json.encode(self._mesh)))
        new.replace(path)

    def _log_path(self, name: str) -> Path:
        return self._folder / "logs" / f"{name}.log"
