"""Invariants of held-out measurements: they end, and training never sees them."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator

from replay.checker import Invariant, Log, NotApplicable, Violation, violation
from schemas import events as e
from schemas.envelope import Event

TOLERANCE = 1e-9


def held_out_measured(log: Log) -> Iterator[Violation]:
    """Each measurement dispatches the executions that it names, on held-out tasks, and closes once when all of them are
    settled, with their counts and their mean; only one that the end of a stopped run overtook stays open."""
    opened = _opened(log)
    tasks: dict[str, str] = {}
    trained: set[str] = set()
    settled: dict[str, e.ExecutionSettled] = {}
    dispatched: dict[str, list[str]] = defaultdict(list)
    left = {event.entity: event for event in opened}
    for event in log:
        match event.data:
            case e.RunStarted() as data:
                tasks = {task.name: task.digest for task in data.held_out}
                trained = {task.digest for task in data.tasks}
            case e.ExecutionDispatched() as data if data.measurement:
                dispatched[data.measurement].append(event.entity)
                if tasks.get(data.task) != data.task_digest or data.task_digest in trained:
                    yield violation("held_out_measured", event, f"{data.task} is not a held-out task")
            case e.ExecutionSettled() as data:
                settled[event.entity] = data
            case e.MeasurementClosed() as data:
                first = left.pop(event.entity, None)
                if first is None:
                    yield violation("held_out_measured", event, "closed and not open")
                else:
                    yield from _result(event, data, first.data, settled)
            case e.RunFinished() as data if data.reason == "steps_done":
                for name, open_ in left.items():
                    yield violation("held_out_measured", open_, f"{name} was open when the run was finished")
    for event in opened:
        if dispatched[event.entity] != event.data.executions:
            yield violation("held_out_measured", event, "its executions are not those that were dispatched for it")


def held_out_apart(log: Log) -> Iterator[Violation]:
    """Held-out executions are in no group, row or micro-step, and not in the waterlevel on which a cell left."""
    held_out = {execution for event in _opened(log) for execution in event.data.executions}
    d = 0
    ended: dict[str, int] = {}
    for event in log:
        used: list[str] = []
        match event.data:
            case e.ExecutionDispatched() as data:
                d += not data.measurement
                if (event.entity in held_out) != bool(data.measurement) or (data.measurement and data.group):
                    yield violation("held_out_apart", event, f"of group {data.group!r}, measurement {data.measurement!r}")
            case e.ExecutionFinished() if event.entity not in held_out:
                ended.setdefault(event.entity, event.seq)
            case e.GroupDispatched() as data:
                used = data.executions
            case e.GroupReady() as data:
                used = [reward.execution for reward in data.rewards]
            case e.GroupMaterialized() as data:
                used = [row.execution for row in data.rows]
            case e.MicroStepEnqueued() as data:
                used = [row.execution for row in data.rows]
            case e.CellRoleTransition() as data if data.phase == "decided":
                # The decision answers the log up to its cause, and what the scheduler decided since.
                w = d - bisect_right(list(ended.values()), event.causation)
                for each in data.reason:
                    if each.rule == "waterlevel (2)" and each.left != w:
                        yield violation("held_out_apart", event, f"w = {each.left:g} was said, the log says {w}")
        for execution in held_out.intersection(used):
            yield violation("held_out_apart", event, f"holds {execution}, which is held out")


def _opened(log: Log) -> list[Event]:
    found = [event for event in log if event.kind == "measurement.opened"]
    if not found:
        raise NotApplicable("nothing was measured on held-out tasks")
    return found


def _result(
    event: Event, said: e.MeasurementClosed, opened: e.MeasurementOpened, settled: dict[str, e.ExecutionSettled]
) -> Iterator[Violation]:
    known = [settled[name] for name in opened.executions if name in settled]
    if len(known) < len(opened.executions):
        yield violation("held_out_measured", event, f"{len(opened.executions) - len(known)} executions are not settled")
    counts = Counter[str](each.outcome for each in known)
    if (said.valid, said.placeholder, said.excluded) != (counts["valid"], counts["placeholder"], counts["excluded"]):
        yield violation("held_out_measured", event, f"its counts are not those of its executions, {dict(counts)}")
    rewards = [each.reward for each in known if each.outcome != "excluded"]
    mean = math.fsum(rewards) / len(rewards) if rewards else None
    if (mean is None) != (said.mean is None) or abs((mean or 0.0) - (said.mean or 0.0)) > TOLERANCE:
        yield violation("held_out_measured", event, f"mean {said.mean}, its executions give {mean}")


ALL: dict[str, Invariant] = {each.__name__: each for each in (held_out_measured, held_out_apart)}
