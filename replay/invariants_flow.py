"""Invariants of the scheduling plane: ledger, waterlevel, capacity, transitions, bursts, staleness."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from replay.checker import Invariant, Log, NotApplicable, Violation, violation
from schemas import events as e
from schemas.config import Config
from schemas.envelope import Event
from schemas.kinds import KINDS

STALENESS_TOLERANCE = 0.05
SETTLING_BURSTS = 4
"""Bursts after which staleness has settled (appendix A speaks of the steady state)."""


def config_of(log: Log) -> Config:
    for event in log:
        if event.kind == "run.started":
            data: e.RunStarted = event.data
            return data.config
    raise NotApplicable("the log has no run.started")


def said_once(log: Log) -> Iterator[Violation]:
    """No id occurs twice, and a write-once kind is said at most once of an entity."""
    ids: set[str] = set()
    once: set[tuple[str, str]] = set()
    for event in log:
        if event.id in ids:
            yield violation("said_once", event, f"the id {event.id} occurs twice")
        ids.add(event.id)
        known = KINDS.get(event.kind)
        if known is None or not known.once:
            continue
        if (event.kind, event.entity) in once:
            yield violation("said_once", event, f"{event.kind} was said before")
        once.add((event.kind, event.entity))


def ledger(log: Log) -> Iterator[Violation]:
    """At every event f <= p <= d: nothing starts that wasn't dispatched, nothing ends that didn't start."""
    dispatched: set[str] = set()
    started: set[str] = set()
    finished: set[str] = set()
    held_out: set[str] = set()
    for event in log:
        match event.kind:
            case "execution.dispatched":
                data: e.ExecutionDispatched = event.data
                (held_out if data.measurement else dispatched).add(event.entity)
            case _ if event.entity in held_out:
                continue
            case "execution.started":
                if event.entity not in dispatched:
                    yield violation("ledger", event, "started and was never dispatched")
                if event.entity in finished:
                    yield violation("ledger", event, "started after it had finished")
                started.add(event.entity)
            case "execution.finished":
                if event.entity not in dispatched:
                    yield violation("ledger", event, "finished and was never dispatched")
                # One that ends before it started advances p and f together.
                started.add(event.entity)
                finished.add(event.entity)
            case _:
                continue
        d, p, f = len(dispatched), len(started), len(finished)
        if not f <= p <= d:
            yield violation("ledger", event, f"f = {f}, p = {p}, d = {d}")


def waterlevel(log: Log) -> Iterator[Violation]:
    """Inside a burst w = d - f never rises, except by a group that is named a refill.

    A burst's own dispatch belongs to its opening: same cause, same moment.
    """
    opening = 0
    burst = ""
    reasons: dict[str, str] = {}
    held_out: set[str] = set()
    d = f = 0
    for event in log:
        match event.kind:
            case "burst.opened":
                burst, opening = event.entity, event.causation
            case "burst.ended":
                burst = ""
            case "group.dispatched":
                group: e.GroupDispatched = event.data
                reasons[event.entity] = group.reason
            case "execution.finished":
                f += event.entity not in held_out
            case "execution.dispatched":
                data: e.ExecutionDispatched = event.data
                if data.measurement:
                    held_out.add(event.entity)
                    continue
                d += 1
                reason = reasons.get(data.group, "")
                if burst and reason != "refill" and event.causation != opening:
                    yield violation(
                        "waterlevel", event, f"w rose to {d - f} inside {burst} by {data.group} ({reason or 'no group'})"
                    )


def capacity(log: Log) -> Iterator[Violation]:
    """No cell holds more placed and unfinished executions than its capacity, and none is placed on a cell that isn't
    in the rollout role."""
    limits: dict[str, int] = {}
    serving: dict[str, bool] = {}
    on: dict[str, str] = {}
    loads: Counter[str] = Counter()
    for event in log:
        target = ""
        match event.kind:
            case "cell.joined":
                joined: e.CellJoined = event.data
                limits[event.entity] = joined.capacity
                serving.setdefault(event.entity, True)
            case "cell.role-transition":
                move: e.CellRoleTransition = event.data
                if move.phase == "decided":
                    serving[event.entity] = False
                elif move.phase == "completed":
                    serving[event.entity] = move.target == "rollout"
            case "execution.placed":
                placed: e.ExecutionPlaced = event.data
                target = placed.cell
            case "route.moved" if event.entity in on:
                # One that ended between the scheduler's input and its decision in the log moves nowhere.
                moved: e.RouteMoved = event.data
                target = moved.target
            case "execution.finished":
                loads[on.pop(event.entity, "")] -= 1
        if not target:
            continue
        loads[on.get(event.entity, "")] -= 1
        on[event.entity] = target
        loads[target] += 1
        if not serving.get(target):
            yield violation("capacity", event, f"{target} is not in the rollout role")
        if loads[target] > limits.get(target, 0):
            yield violation("capacity", event, f"{target} holds {loads[target]} of {limits.get(target, 0)}")


def attempts(log: Log) -> Iterator[Violation]:
    """Attempts of an execution follow each other: the next is placed when the one before was lost, nothing of an old
    one counts, and what is sealed, settled and trained is the attempt that finished."""
    newest: dict[str, int] = {}
    lost: dict[str, int] = {}
    finished: dict[str, int] = {}
    for event in log:
        name = event.entity
        match event.data:
            case e.ExecutionPlaced() as data:
                before = newest.get(name, -1)
                if data.attempt != before + 1 or lost.get(name, -1) != before:
                    yield violation("attempts", event, f"attempt {data.attempt} placed after {before}, which was not lost")
                newest[name] = data.attempt
            case e.ExecutionLost() as data:
                lost[name] = max(lost.get(name, -1), data.attempt)
            case e.ExecutionStarted() | e.ExecutionFinished() as data:
                # One that the end of the run overtook may end before its next attempt is placed.
                current = max(newest.get(name, 0), lost.get(name, -1) + 1)
                verb = event.kind.partition(".")[2]
                if data.attempt != current:
                    yield violation("attempts", event, f"{verb} attempt {data.attempt}, the newest is {current}")
                if verb == "finished":
                    finished.setdefault(name, data.attempt)
            case e.ExecutionSealed() | e.ExecutionSettled() as data:
                if data.attempt != finished.get(name, data.attempt):
                    verb = event.kind.partition(".")[2]
                    what = f"{verb} attempt {data.attempt}, attempt {finished[name]} finished"
                    yield violation("attempts", event, what)
            case e.GroupMaterialized() as data:
                for row in data.rows:
                    if row.attempt != finished.get(row.execution, row.attempt):
                        ended = finished[row.execution]
                        what = f"a row of {row.execution} is of attempt {row.attempt}, attempt {ended} finished"
                        yield violation("attempts", event, what)


def transitions_serial(log: Log) -> Iterator[Violation]:
    """One cell changes its role at a time."""
    moving = ""
    for event in log:
        if event.kind != "cell.role-transition":
            continue
        data: e.CellRoleTransition = event.data
        if data.phase == "decided":
            if moving:
                yield violation("transitions_serial", event, f"decided while {moving} is in transition")
            moving = event.entity
        elif data.phase in ("completed", "failed") and event.owner == "scheduler":
            if event.entity != moving:
                yield violation("transitions_serial", event, f"{data.phase}, but {moving or 'no cell'} is in transition")
            moving = ""


def staleness(log: Log) -> Iterator[Violation]:
    """Over whole bursts after the fourth, mean staleness is within 0.05 of phi + (mu - 1)/2 (theorem A.1)."""
    values, last = settled_staleness(log)
    s = config_of(log).scheduler
    expected = s.phi + (s.mu - 1) / 2
    mean = sum(values) / len(values)
    if abs(mean - expected) > STALENESS_TOLERANCE:
        what = f"mean staleness {mean:.3f} over {len(values)} groups, expected {expected:.3f}"
        yield violation("staleness", last, what)


def settled_staleness(log: Log) -> tuple[list[int], Event]:
    """Staleness of every group consumed in a whole burst after the fourth, and the last such event."""
    s = config_of(log).scheduler
    index_of: dict[str, int] = {}
    burst_of: dict[str, str] = {}
    values: dict[str, list[int]] = defaultdict(list)
    last: dict[str, Event] = {}
    for event in log:
        match event.kind:
            case "burst.opened":
                opened: e.BurstOpened = event.data
                index_of[event.entity] = opened.index
            case "batch.opened":
                batch: e.BatchOpened = event.data
                burst_of[event.entity] = batch.burst
            case "group.consumed":
                data: e.GroupConsumed = event.data
                burst = burst_of.get(data.batch, "")
                values[burst].append(data.staleness)
                last[burst] = event
    whole = [
        burst
        for burst, found in values.items()
        if index_of.get(burst, 0) > SETTLING_BURSTS and len(found) == s.mu * s.B
    ]
    if not whole:
        raise NotApplicable(f"no whole burst after burst {SETTLING_BURSTS}")
    return [value for burst in whole for value in values[burst]], last[whole[-1]]


def staleness_said(log: Log) -> Iterator[Violation]:
    """The staleness of a group is the version trained minus the version at its dispatch, as both were said before."""
    dispatched: dict[str, int] = {}
    version: dict[str, int] = {}
    for event in log:
        match event.kind:
            case "group.dispatched":
                group: e.GroupDispatched = event.data
                dispatched[event.entity] = group.version
            case "batch.opened":
                batch: e.BatchOpened = event.data
                version[event.entity] = batch.version
            case "group.consumed":
                data: e.GroupConsumed = event.data
                right = (dispatched.get(event.entity), version.get(data.batch))
                said = (data.version_dispatched, data.version_trained)
                if said != right or data.staleness != said[1] - said[0]:
                    yield violation(
                        "staleness_said", event, f"versions {said}, staleness {data.staleness}; the log says {right}"
                    )


ALL: dict[str, Invariant] = {
    each.__name__: each
    for each in (said_once, ledger, waterlevel, capacity, attempts, transitions_serial, staleness, staleness_said)
}
