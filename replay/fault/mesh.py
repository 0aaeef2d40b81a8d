"""The mesh in one process: a life for each service, a broker between them, and somebody who starts the dead again.

    member ── begins a life ── it dies: killed by a fault, or its service ended ── a pause ── begins the next life ── ...

Every life runs the production service on a bus, a clock, a network and worlds of its own. The run is over when LOG holds
`run.finished` and nothing has been said for a while; it is stuck when nothing is said for longer than anything may take.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from replay.fault import setting as s
from replay.fault.operator import Operator
from replay.fault.setting import Setting
from replay.invariants import Violation
from replay.virtual.clock import WallClock
from replay.virtual.life import NEVER, Killed, Life
from replay.virtual.loop import VirtualLoop
from replay.virtual.network import Network
from replay.worlds import scenario, wiring
from replay.worlds.health import WorldHealth
from replay.worlds.rows import WorldRows
from replay.worlds.world import World
from schemas import streams
from schemas.envelope import Event
from schemas.errors import GyreError
from schemas.ids import proxy_ids
from services.mesh.bus import Stored
from services.mesh.codec import decode
from services.mesh.health import HealthFace
from services.mesh.memory_broker import MemoryBroker
from services.mesh.memory_bus import Line, MemoryBus
from services.mesh.memory_reader import by_timer
from services.mesh.service import SNAPSHOT_EVERY, Context, serve_until

QUIET_S = 900.0
"""Virtual seconds without an event, with everybody there, after which a finished run has nothing more to say."""
LOOK_AGAIN_S = 30.0
"""Where it was quiet for so long and somebody is missing, whether he is there is looked at so often."""
MOST_EVENTS = 8_000
"""A run that says more than this goes in circles: some service fails and starts again for ever."""
STUCK_BUDGETS = 1.25
"""Overall budgets of an execution without an event after which a run is stuck."""
SHORT_S = 0.1
LAGGING = 0.25
"""Share of runs with a service that lags."""
_COMING_AND_GOING = (
    "service.joined",
    "service.left",
    "cell.joined",
    "cell.lost",
    "checkpoint.restored",
    "weights.exposed",
)
"""Kinds that a service says whenever it starts: one that starts again and again gets nowhere."""
CONNECT_S = 10.0
"""How long a service that starts waits for the event bus."""
FIRST_PAUSE_S = 0.2
"""Pause before a service that failed starts again: doubled each time, forgotten after a longer life."""
_QUICK_S = 20.0
_QUICK_LIMIT, GIVEN_UP_S = 5, 60.0
"""After so many quick failures in a row a supervisor gives a service up, and a person starts it so much later."""
GRACE_S = 10.0
"""How long a service that was told to stop may take; then it is killed."""


class Mesh:
    """
    >>> mesh = Mesh(loop, setting_of(7))
    >>> loop.run_until_complete(mesh.run(lambda: None))
    >>> mesh.violations
    []
    """

    def __init__(self, loop: VirtualLoop, setting: Setting) -> None:
        rng = random.Random(f"{setting.seed}:line")
        self.loop, self.setting = loop, setting
        self.clock = WallClock(loop, start_us=s.START_US)
        """Of the machine that the event bus runs on."""
        self.broker = MemoryBroker(self.clock)
        self.operator = Operator(self.broker, self.clock)
        self.network = Network(loop, latency=lambda: rng.uniform(0.000_2, 0.002))
        self.world = World(
            setting.seed, network=self.network, life=self._world_life, scripts=scenario.scripts(setting.seed)
        )
        self.members = {name: Member(self, name, self._line(name)) for name in setting.instances()}
        self._proxies = [self.members[name] for name in proxy_ids(setting.config.proxy.count)]
        self._asks = random.Random(f"{setting.seed}:balance")
        self.world.balance = self._balance
        self.violations: list[Violation] = []
        self.rows = WorldRows()
        self.watchers: list[Callable[[Event], None]] = []
        """Called for each event as it is stored, in order, outside of all lives."""
        self.held_up_s = 0.0
        """By how much clocks were set back, and the operator held up the run or a cell: so much longer may things take."""
        self._finished = asyncio.Event()
        self._said_at = self._stirred_at = 0.0

    def __repr__(self) -> str:
        return f"<Mesh {self.setting.seed} [{len(self.members)} members, {self.broker!r}]>"

    def _line(self, name: str) -> Line:
        rng = random.Random(f"{self.setting.seed}:line:{name}")
        return Line(
            way_s=rng.uniform(0.000_1, 0.001),
            delivery_s=rng.choice([0.001, 0.005, 0.02, 0.05]) * rng.uniform(0.5, 1.5) + self._lag_s(name),
            heartbeat_s=5.0,
            sits_out=True,
            carry=self._carry,
            pause=self.loop.pause,
        )

    def _lag_s(self, name: str) -> float:
        """In some runs one reads everything late, mostly the proxy: what it does on old routes must do no harm."""
        draw = random.Random(f"{self.setting.seed}:lag")
        proxy = proxy_ids(self.setting.config.proxy.count)[-1]
        lags, who, seconds = draw.random() < LAGGING, draw.choice(self.setting.instances()), draw.uniform(1.0, 120.0)
        return seconds if lags and name == (proxy if draw.random() < 0.7 else who) else 0.0

    async def run(self, begin: Callable[[], None]) -> None:
        """To its end, or until it is stuck. `begin` is called once the run has started."""
        await self.operator.open_run()
        self.broker.stream(streams.log_stream(s.RUN)).on_store = self._stored
        log, records = (self.broker.stream(name(s.RUN)) for name in (streams.log_stream, streams.records_stream))
        self.world.log_end = lambda: len(log.messages)
        self.world.records_end = lambda: len(records.messages)
        await self.operator.start(self.setting.started)
        begin()
        keepers = [asyncio.ensure_future(member.keep()) for member in self.members.values()]
        try:
            await self._until_over()
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)
            await self.operator.leave()
        for member in self.members.values():
            if member.life is not None:
                member.life.kill()

    def _balance(self, address: str) -> str:
        """Mostly the proxy that the execution belongs to; else any that is there, as a balancer before them would."""
        others = [member.health.url for member in self._proxies if member.there and member.health]
        return self._asks.choice(others) if len(self._proxies) > 1 and others and self._asks.random() < 0.3 else address

    def lose_host(self, host: str, *, down_s: float) -> bool:
        """A cell's host, or the one of the harness: its processes die and its disk is empty when they come back.
        Checkpoints lie on storage that outlives hosts."""
        names = [host] if host in self.members else [f"rollout-{host}", f"trainer-{host}"]
        lost = [self.members[name].kill(down_s=down_s, silent=True) for name in names if name in self.members]
        if host == "harness":
            self.world.machine.wipe()
        self.world.disks["" if host == "harness" else host].wipe()
        return any(lost)

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        """Outside of all lives, so many virtual seconds from now."""
        self.loop.call_later(seconds, act, context=self.broker.context)

    def stir(self) -> None:
        """Somebody is there again who was not: something may follow from that."""
        self._stirred_at = self.loop.time()

    async def _until_over(self) -> None:
        log = self.broker.stream(streams.log_stream(s.RUN))
        while True:
            now = self.loop.time()
            limit_s = STUCK_BUDGETS * self.setting.config.harness.overall_timeout_s + self.held_up_s
            if len(log.messages) > MOST_EVENTS:
                self.report("endless", f"more than {MOST_EVENTS} events; {self._waiting()}")
                return
            if now - self._said_at >= limit_s:
                self.report("stuck", f"nothing has gone on for {limit_s / 3600:.1f} h; {self._waiting()}")
                return
            if self._finished.is_set():
                quiet_s = now - max(self._said_at, self._stirred_at)
                if quiet_s >= QUIET_S and self.broker.up and all(member.there for member in self.members.values()):
                    return
                await asyncio.sleep(max(LOOK_AGAIN_S, QUIET_S - quiet_s))
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(limit_s - (now - self._said_at) + 1.0):
                        await self._finished.wait()

    def stored(self, stream: str) -> list[Stored]:
        """Every message of a stream."""
        return [stored for stored in self.broker.stream(stream).messages if stored is not None]

    def _carry(self, seconds: float, future: asyncio.Future[Any], result: Any) -> None:
        # Who waits is late, yet a time-out of his own must not be: only short ways are taken like this.
        if seconds > SHORT_S:
            by_timer(seconds, future, result)
        else:
            self.loop.resolve_later(seconds, future, result)

    def report(self, invariant: str, what: str, *, entity: str = s.RUN) -> None:
        """A violation that no log shows."""
        log = self.broker.stream(streams.log_stream(s.RUN))
        self.violations.append(Violation(invariant=invariant, seq=len(log.messages), entity=entity, what=what))

    def _world_life(self, name: str) -> Life:
        """A process that isn't a service. One that ends with an error has one of ours, which is no fault of the mesh's."""
        life = Life(self.loop, name)
        life.ended.add_done_callback(lambda ended: self._world_ended(name, ended), context=self.broker.context)
        return life

    def _world_ended(self, name: str, ended: asyncio.Future[None]) -> None:
        error = None if ended.cancelled() else ended.exception()
        if error is not None and not isinstance(error, Killed | asyncio.CancelledError):
            self.report("world-crashed", f"{error!r} in {_place(error)}", entity=name)

    def _stored(self, stored: Stored) -> None:
        event = decode(stored)
        if event.kind not in _COMING_AND_GOING:
            self._said_at = self.loop.time()
        if event.kind == "run.finished" or stored.seq > MOST_EVENTS:
            self._finished.set()
        for watcher in self.watchers:
            watcher(event)

    def _waiting(self) -> str:
        """What every service waits for, as far as it says."""
        said = []
        for member in self.members.values():
            ready = member.health.ready() if member.health is not None and member.health.url else "not started"
            said.append(f"{member.name}: {ready or 'ready'} (life {member.lives})")
        return "; ".join(said)


class Member:
    """One service of the mesh, through all of its lives."""

    def __init__(self, mesh: Mesh, name: str, line: Line) -> None:
        self._mesh, self.name, self.line = mesh, name, line
        self.service, _, self.cell = name.partition("-")
        self.clock = WallClock(mesh.loop, start_us=s.START_US)
        self.life: Life | None = None
        self.bus: MemoryBus | None = None
        self.health: WorldHealth | None = None
        self.lives = 0
        self.snapshot_every = SNAPSHOT_EVERY
        self.down_s: float | None = None
        """How long it stays away after the kill or the stop that is being made."""
        self.on_connect: list[Callable[[MemoryBus], None]] = []
        """Called with the bus of each life before it begins."""
        self._stop = asyncio.Event()
        """SIGTERM of the life that runs."""
        self._strikes: list[tuple[int, Callable[[], None]]] = []
        self._before = 0
        """Steps of the lives before this one."""

    @property
    def there(self) -> bool:
        """Whether it lives, works and is connected."""
        return self.life is not None and not self.life.halted and self.bus is not None and self.bus.up

    def __repr__(self) -> str:
        return f"<Member {self.name} [life {self.lives}: {self.life!r}]>"

    async def keep(self) -> None:
        """Starts it, and again whenever it has ended."""
        failures = 0
        while True:
            life = self._begin()
            began = self._mesh.loop.time()
            try:
                await asyncio.wait([life.ended])
                life.ended.result()
            except Killed:
                pass
            except GyreError:
                # An error that the service knows ends its process; what it means is seen in what follows.
                pass
            except Exception as error:
                self._mesh.report("service-crashed", f"{error!r} in {_place(error)}", entity=self.name)
            if self.down_s is not None:
                pause_s, self.down_s, failures = self.down_s, None, 0
            else:
                failures = failures + 1 if self._mesh.loop.time() - began < _QUICK_S else 1
                pause_s = FIRST_PAUSE_S * 2.0 ** (failures - 1) if failures < _QUICK_LIMIT else GIVEN_UP_S
            await asyncio.sleep(pause_s)

    def kill(self, *, down_s: float, silent: bool = False) -> bool:
        """kill -9, or with `silent` the end of its host, and `down_s` until it starts again. False when it is down already."""
        if self.life is None or self.life.dead:
            return False
        self.down_s = down_s
        self.life.kill(silent=silent)
        return True

    def stop(self, *, down_s: float) -> bool:
        """SIGTERM, and kill -9 where it doesn't end in time. False when it is down already."""
        if self.life is None or self.life.dead:
            return False
        life, self.down_s = self.life, down_s
        self._stop.set()
        self._mesh.later(GRACE_S, lambda: self._stopped(life))
        return True

    def _stopped(self, life: Life) -> None:
        """Its time is over."""
        if life.dead:
            return
        if not life.held:
            self._mesh.report("stubborn", f"told to stop, and lives on {GRACE_S:g} s later", entity=self.name)
        life.kill()

    def hang(self, seconds: float, *, killed: bool) -> bool:
        """It does nothing for so long. False when it is down or hangs already."""
        life = self.life
        if life is None or not life.hold():
            return False

        def over() -> None:
            if killed:
                life.kill()
            else:
                self._mesh.stir()
                life.go_on()

        self._mesh.later(seconds, over)
        return True

    def strike(self, steps: int, action: Callable[[], None]) -> None:
        """Call `action` before the step after so many steps of this member, in this life or the next."""
        done = self._before + (self.life.steps if self.life is not None else 0)
        self._strikes.append((done + steps + 1, action))
        self._arm()

    def _arm(self) -> None:
        if self.life is not None and not self.life.dead:
            self.life.strike_at = min((at for at, _ in self._strikes), default=NEVER) - self._before
            self.life.strike = self._struck

    def _struck(self) -> None:
        assert self.life is not None
        done = self._before + self.life.steps
        due = [action for at, action in self._strikes if at <= done]
        self._strikes = [strike for strike in self._strikes if strike[0] > done]
        for action in due:
            action()
        self._arm()

    def _begin(self) -> Life:
        mesh = self._mesh
        mesh.stir()
        self._before += self.life.steps if self.life is not None else 0
        self.life = life = Life(mesh.loop, self.name, number=self.lives)
        self.lives += 1
        self.bus = bus = MemoryBus(mesh.broker, s.RUN, name=self.name, line=self.line)
        self.health = health = WorldHealth(mesh.network, self.name)
        self._stop = stop = asyncio.Event()
        life.at_end(bus.drop)
        for connected in self.on_connect:
            connected(bus)
        context = Context(
            bus=bus,
            clock=self.clock,
            started=mesh.setting.started,
            run=s.RUN,
            service=self.service,
            instance=self.name,
            folder=Path("/simulated/run"),
            cache=Path("/simulated/cache"),
            here=Path("/simulated/here"),
            secret=s.SECRET,
            cell=self.cell,
            health=cast(HealthFace, health),
            pid=1000 + self.lives,
            snapshot_every=self.snapshot_every,
        )
        life.begin(self._main(context, life, stop))
        self._arm()
        return life

    async def _main(self, context: Context, life: Life, stop: asyncio.Event) -> None:
        assert self.bus is not None
        await self.bus.connected(CONNECT_S)
        mesh = self._mesh

        async def serve(context: Context) -> None:
            await wiring.serve(mesh.world, context, life, number=life.number, rows=mesh.rows)

        await serve_until(serve, context, stop)


def _place(error: BaseException) -> str:
    """Where in our code an error arose."""
    place, trace = "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        place = f"{Path(code.co_filename).name}:{trace.tb_lineno} {code.co_name}"
        trace = trace.tb_next
    return place
