"""The faults of a seed: which, how many, and when.

Pins are drawn over the kinds of events that a run of this size has, so that faults are spread over all of its phases and
not over its idle hours. A pin that never comes strikes nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from replay.fault import plan as p
from replay.fault.setting import Setting
from replay.replayer import DECIDERS
from schemas.kinds import KINDS
from services.trainer.batch_view import CORE

FAULTS = (16, 26)
"""Least and most faults of a plan."""

SNAPSHOT_EVERY = (3, 10, 40, 500)
"""Inputs between two snapshots of one that decides."""

_LONGEST_S = 4 * 3600.0
_HANGS_S = 2 * 3600.0
"""Longer than a cell may be silent before it is lost."""
_AFTER_SAVING = ("checkpoint.saved", "batch.stepped", "weights.exposed")
_IN_HAND = (
    ("timer.set", "scheduler"),
    ("execution.lost", "scheduler"),
    ("evaluation.claimed", "evaluator"),
    ("execution.finished", "proxy"),
    ("execution.sealed", "trajectories"),
    ("group.materialized", "packer"),
    ("micro-step.claimed", "trainer"),
    ("batch.join-closed", "trainer"),
    ("weights.exposed", "rollout"),
)
"""What happens, and the service that has something in hand then."""
_SAYING = (
    *_IN_HAND,
    ("execution.started", "harness"),
    ("batch.join-closed", f"trainer-{CORE}"),
    *[("checkpoint.saved", f"trainer-{CORE}")] * 3,
)
"""What happens, and the service that says something soon after it."""
_HOLDING_UP = ("execution.lost", "group.ready", "batch.stepped", "weights.exposed", "weights.published", "burst.ended")
"""What a scheduler acts on that would go on, were the run not paused."""
_AWAITED = (
    ("micro-step.claimed", "trainer"),
    ("batch.stream-closed", "trainer"),
    ("execution.started", "rollout"),
)
"""What happens, and the service that others wait for then."""


def draw(seed: int, setting: Setting) -> p.Plan:
    """The plan of a seed for the run that the seed draws."""
    rng = random.Random(f"{seed}:faults")
    moments = _moments(setting)
    makers, weights = zip(*_makers(setting, moments), strict=True)
    chosen = rng.choices(makers, weights, k=rng.randint(*FAULTS))
    return p.Plan(
        seed=seed,
        faults=[make(rng, _pin(rng, moments)) for make in chosen],
        snapshot_every=_snapshots(random.Random(f"{seed}:snapshots")),
    )


def _snapshots(rng: random.Random) -> dict[str, int]:
    """A run is short: as often as in production nobody would ever recover from one."""
    return {service: rng.choice(SNAPSHOT_EVERY) for service in DECIDERS}


Make = Callable[[random.Random, p.Pin], p.AnyFault]


def _moments(setting: Setting) -> list[tuple[str, int]]:
    """Kinds of events and about how many of each a run has."""
    executions, steps = setting.executions, setting.config.steps
    groups, bursts = executions // setting.config.scheduler.group_size, steps // setting.config.scheduler.mu
    cells = setting.config.cells.trainable
    surplus = groups * setting.config.scheduler.oversample
    return [
        ("", 1),
        ("service.joined", setting.config.cells.count * 2 + 6),
        ("cell.joined", setting.config.cells.count),
        ("group.dispatched", groups),
        ("execution.placed", executions),
        ("execution.started", executions),
        ("execution.finished", executions),
        ("execution.sealed", executions),
        ("execution.tree-frozen", executions),
        ("evaluation.requested", executions),
        ("evaluation.claimed", executions),
        ("evaluation.scored", executions),
        ("execution.settled", executions),
        ("group.ready", groups),
        ("group.materialized", groups),
        ("group.claimed", groups),
        ("micro-step.enqueued", 2 * groups),
        ("micro-step.claimed", 2 * groups),
        ("micro-step.done", 2 * groups),
        ("batch.opened", steps),
        ("batch.stream-closed", steps),
        ("batch.join-closed", steps),
        ("checkpoint.saved", steps),
        ("batch.stepped", steps),
        ("group.consumed", groups),
        ("weights.exposed", steps + bursts),
        ("weights.published", bursts * setting.config.cells.count),
        ("burst.opened", bursts),
        ("burst.ended", bursts),
        ("cell.role-transition", 10 * bursts * cells),
        ("timer.set", 2 * bursts),
        ("timer.fired", 2 * bursts),
        ("route.moved", 4 * bursts * cells),
        ("run.finished", 1),
        *([("execution.cancelled", surplus)] if surplus else []),
    ]


def _pin(rng: random.Random, moments: list[tuple[str, int]]) -> p.Pin:
    kind, count = rng.choice(moments)
    after_s = rng.choice([0.0, 0.0, _seconds(rng, 0.001, 60.0), _seconds(rng, 1.0, 3600.0)])
    return p.Pin(kind=kind, nth=rng.randint(1, max(1, count)), after_s=after_s)


def _seconds(rng: random.Random, low: float, high: float) -> float:
    """Between low and high, each magnitude as likely as any other; three digits are enough to repeat it."""
    return float(f"{low * (high / low) ** rng.random():.3g}")


def _makers(setting: Setting, moments: list[tuple[str, int]]) -> list[tuple[Make, float]]:
    services = setting.instances()
    cells = [name.partition("-")[2] for name in services if name.startswith("rollout-")]
    satellites = [cell for cell in cells if cell != CORE]

    def crash(rng: random.Random, pin: p.Pin) -> p.AnyFault:
        down_s = _seconds(rng, 0.05, rng.choice([10.0, 10.0, 600.0]))
        return p.Crash(pin=pin, service=rng.choice(services), steps=rng.randrange(40), down_s=down_s)

    def in_hand(rng: random.Random, pin: p.Pin) -> p.AnyFault:
        """A crash of a service that has just begun something, before or after it is done."""
        kind, service = rng.choice(_IN_HAND)
        count = next((count for known, count in moments if known == kind), 1)
        at = p.Pin(kind=kind, nth=rng.randint(1, max(1, count)), after_s=_seconds(rng, 0.001, 60.0))
        name = rng.choice([name for name in services if name.partition("-")[0] == service])
        return p.Crash(pin=at, service=name, steps=rng.randrange(10), down_s=_seconds(rng, 0.05, 10.0))

    def deciding(rng: random.Random, pin: p.Pin) -> p.AnyFault:
        """A crash of one that decides as soon as something has happened: between deciding, saying so, and a snapshot."""
        kind, count = rng.choice(moments)
        at = p.Pin(kind=kind, nth=rng.randint(1, max(1, count)))
        service, steps = rng.choice(list(DECIDERS)), rng.randrange(8)
        return p.Crash(pin=at, service=service, steps=steps, down_s=_seconds(rng, 0.05, 10.0))

    def stop(rng: random.Random, pin: p.Pin) -> p.AnyFault:
        return p.Stop(pin=pin, service=rng.choice(services), steps=rng.randrange(40), down_s=_seconds(rng, 0.05, 600.0))

    def hung(rng: random.Random, pin: p.Pin) -> p.AnyFault:
        return p.Hung(
            pin=pin,
            service=rng.choice(services),
            steps=rng.randrange(40),
            seconds=_seconds(rng, 1.0, _HANGS_S),
            killed=rng.random() < 0.5,
        )

    def awaited(rng: random.Random, pin: p.Pin) -> p.AnyFault:
        """A process of a cell hangs while others wait for it, for so long that it may be taken for lost."""
        kind, service = rng.choice(_AWAITED)
        count = next(count for known, count in moments if known == kind)
        at = p.Pin(kind=kind, nth=rng.randint(1, max(1, count)), after_s=_seconds(rng, 0.001, 60.0))
        return p.Hung(
            pin=at,
            service=rng.choice([name for name in services if name.partition("-")[0] == service]),
            steps=rng.randrange(10),
            seconds=_seconds(rng, _HANGS_S / 8, _HANGS_S),
            killed=rng.random() < 0.25,
        )

    def damaged_checkpoint(rng: random.Random, pin: p.Pin) -> p.AnyFault:
        """Soon after one was saved, when it is the newest and may not be the published one yet."""
        kind, count = rng.choice([each for each in moments if each[0] in _AFTER_SAVING])
        at = p.Pin(kind=kind, nth=rng.randint(1, max(1, count)), after_s=_seconds(rng, 0.001, 60.0))
        return p.DamagedCheckpoint(
            pin=at,
            behind=rng.choice([0, 0, 0, 1]),
            how=rng.choice(["garbled", "gone", "swapped"]),
            seconds=_seconds(rng, 1.0, 3600.0),
            down_s=_seconds(rng, 0.05, 10.0),
        )

    def damaged_snapshot(rng: random.Random, pin: p.Pin) -> p.AnyFault:
        how = rng.choice(["garbled", "gone", "unreadable", "old", "old"])
        return p.DamagedSnapshot(
            pin=pin,
            service=rng.choice(list(DECIDERS)),
            how=how,  # type: ignore[arg-type]
            seconds=_seconds(rng, 1.0, _LONGEST_S),
            down_s=_seconds(rng, 0.05, 60.0),
        )

    def host_disk_full(rng: random.Random, pin: p.Pin) -> p.AnyFault:
        if rng.random() < 0.5:
            return p.HostDiskFull(pin=pin, where="harness", seconds=_seconds(rng, 1.0, 1800.0))
        # Shortly before one is saved.
        count = next(count for known, count in moments if known == "batch.join-closed")
        at = p.Pin(kind="batch.join-closed", nth=rng.randint(1, count), after_s=_seconds(rng, 0.001, 10.0))
        return p.HostDiskFull(pin=at, where="checkpoints", seconds=_seconds(rng, 30.0, 1800.0))

    def host_lost(rng: random.Random, pin: p.Pin) -> p.AnyFault:
        return p.HostLost(pin=pin, host=rng.choice([*cells, "harness"]), down_s=_seconds(rng, 1.0, 3600.0))

    def doubt(rng: random.Random, pin: p.Pin) -> p.AnyFault:
        return p.Doubt(
            pin=pin,
            service=rng.choice(services),
            nth=rng.randint(1, 4),
            times=rng.choice([1, 1, 1, 2, 8]),
            fate=rng.choice(["ack lost", "lost", "late"]),
            late_s=_seconds(rng, 0.01, 60.0),
        )

    def last_words(rng: random.Random, pin: p.Pin) -> p.AnyFault:
        """Half of them of a service that has just begun something, which is what it speaks of."""
        name, nth, down_s = rng.choice(services), rng.randint(1, 4), _seconds(rng, 0.05, 10.0)
        if rng.random() < 0.5:
            kind, service = rng.choice(_SAYING)
            count = next((count for known, count in moments if known == kind), 1)
            pin = p.Pin(kind=kind, nth=rng.randint(1, max(1, count)))
            name = rng.choice([name for name in services if service in (name, name.partition("-")[0])])
            nth = rng.choice([1, 1, 1, 2, 3])
        late_s = _seconds(rng, rng.choice([0.05, down_s, down_s]), rng.choice([60.0, 600.0]))
        return p.LastWords(pin=pin, service=name, nth=nth, late_s=late_s, down_s=down_s)

    def delivery(rng: random.Random, pin: p.Pin) -> p.AnyFault:
        return p.Delivery(
            pin=pin,
            service=rng.choice(services),
            nth=rng.randint(1, 10),
            times=rng.choice([1, 1, 3]),
            fate=rng.choice(["twice", "lost"]),
        )

    def disconnected(rng: random.Random, pin: p.Pin) -> p.AnyFault:
        if pin.kind and rng.random() < 0.3:
            # For less than both ways of what was just said.
            owners = KINDS[pin.kind].owners
            speakers = [name for name in services if name.partition("-")[0] in owners] or services
            at = p.Pin(kind=pin.kind, nth=pin.nth)
            return p.Disconnected(pin=at, service=rng.choice(speakers), seconds=_seconds(rng, 0.000_02, 0.002))
        return p.Disconnected(pin=pin, service=rng.choice(services), seconds=_seconds(rng, 0.01, 120.0))

    def slow_reader(rng: random.Random, pin: p.Pin) -> p.AnyFault:
        lag_s = _seconds(rng, 0.05, 30.0)
        return p.SlowReader(pin=pin, service=rng.choice(services), seconds=_seconds(rng, 1.0, 3600.0), lag_s=lag_s)

    def server_restart(rng: random.Random, pin: p.Pin) -> p.AnyFault:
        return p.ServerRestart(pin=pin, down_s=_seconds(rng, 0.05, 60.0))

    def disk_full(rng: random.Random, pin: p.Pin) -> p.AnyFault:
        return p.DiskFull(pin=pin, seconds=_seconds(rng, 0.05, 120.0))

    def clock_jump(rng: random.Random, pin: p.Pin) -> p.AnyFault:
        by_s = _seconds(rng, 0.1, _LONGEST_S) * rng.choice([1, 1, -1])
        return p.ClockJump(pin=pin, who=rng.choice(["server", "server", *services]), by_s=by_s)

    def request(rng: random.Random, pin: p.Pin) -> p.AnyFault:
        path = rng.choice(["/v1/messages", "/v1/messages", "/generate", "/generate", "/abort_request"])
        nth, how = rng.randint(1, 6), rng.choice(["slow", "late", "twice", "cut"])
        seconds = _seconds(rng, 0.1, 300.0)
        return p.Request(
            pin=pin,
            path=path,  # type: ignore[arg-type]  # drawn from its values
            nth=nth,
            slow_s=seconds if how == "slow" else 0.0,
            late_s=seconds if how == "late" else 0.0,
            twice=how == "twice",
            cut=how == "cut",
        )

    def engine(rng: random.Random, pin: p.Pin) -> p.AnyFault:
        how = rng.choice(["dies", "hangs", "slow", "aborts"])
        seconds = _seconds(rng, 0.5, 600.0)
        return p.EngineFault(pin=pin, cell=rng.choice(cells), how=how, seconds=seconds)  # type: ignore[arg-type]

    def evaluator(rng: random.Random, pin: p.Pin) -> p.AnyFault:
        how = rng.choice(["crash", "hang", "garbage"])
        return p.EvaluatorFault(pin=pin, how=how, times=rng.choice([1, 1, 2, 4]))  # type: ignore[arg-type]

    def agent(rng: random.Random, pin: p.Pin) -> p.AnyFault:
        return p.AgentFault(pin=pin, how=rng.choice(["twice", "leave", "late"]))

    def paused(rng: random.Random, pin: p.Pin) -> p.AnyFault:
        """Half of them when a scheduler has something to do, before or after it is done."""
        kind = rng.choice(_HOLDING_UP)
        count = next((count for known, count in moments if known == kind), 1)
        after_s = rng.choice([0.0, _seconds(rng, 0.001, 60.0)])
        at = p.Pin(kind=kind, nth=rng.randint(1, max(1, count)), after_s=after_s)
        return p.Paused(pin=rng.choice([pin, at]), seconds=_seconds(rng, 0.1, 3600.0))

    def withdrawn(rng: random.Random, pin: p.Pin) -> p.AnyFault:
        return p.Withdrawn(pin=pin, cell=rng.choice(satellites), seconds=_seconds(rng, 1.0, _LONGEST_S))

    return [
        (crash, 4.0),
        (in_hand, 2.5),
        (deciding, 2.0),
        (stop, 1.5),
        (hung, 1.0),
        (awaited, 0.7),
        (host_lost, 0.7),
        (damaged_checkpoint, 0.8),
        (damaged_snapshot, 0.8),
        (host_disk_full, 0.5),
        (doubt, 2.2),
        (last_words, 1.8),
        (delivery, 2.0),
        (disconnected, 1.0),
        (slow_reader, 1.0),
        (server_restart, 1.0),
        (disk_full, 0.4),
        (clock_jump, 1.0),
        (request, 2.0),
        (engine, 2.0),
        (evaluator, 1.5),
        (agent, 1.0),
        (paused, 0.7),
        (withdrawn, 0.8),
    ]
