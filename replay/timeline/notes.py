"""An event's data in a few words, for people; and the checks that it carries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from schemas.envelope import Event
from schemas.units import Check


def note(event: Event) -> str:
    """Empty where the kind and the entity say it all."""
    if isinstance(event.data, msgspec.Raw):
        return "of a schema that this version does not know"
    words = _WORDS.get(event.kind)
    return words(event.data) if words is not None else ""


def reasons(event: Event) -> list[Check]:
    """As the decider gave them; empty for events that carry none."""
    given = [getattr(event.data, name, None) for name in ("reason", "checks")]
    return [check for each in given if isinstance(each, list) for check in each]


def duration(seconds: float) -> str:
    """Two units at most: 45 s, 3 min 20 s, 51 h 05 min, 5 d 2 h."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    if hours >= 100:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {whole % 60:02d} s"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _attempt(data: Any) -> str:
    return f"attempt {data.attempt}" if data.attempt else ""


def _ready(data: Any) -> str:
    surplus = f", {len(data.surplus)} surplus" if data.surplus else ""
    return f"mean reward {data.mean:.3g}, spread {data.std:.3g}{surplus}"


def _tree(data: Any) -> str:
    return f"{_count(len(data.tokens), 'node')}, {_count(sum(data.tokens), 'token')}, {sum(data.trainable)} trainable"


def _placed(data: Any) -> str:
    return ", ".join(filter(None, [f"on {data.cell}", f"epoch {data.epoch}", _attempt(data)]))


def _moved(data: Any) -> str:
    return f"{data.source} {_AWAY[data.reason]}to {data.target}, prefix {data.kv}"


def _finished(data: Any) -> str:
    return " ".join(filter(None, [data.reason, f"after {duration(data.seconds)}", data.detail]))


def _transition(data: Any) -> str:
    version = f", version {data.version}" if data.version >= 0 else ""
    took = f", after {duration(data.seconds)}" if data.seconds else ""
    return f"{data.phase} to {data.target}, epoch {data.epoch}{version}{took}"


def _held(data: Any) -> str:
    return "; ".join(f"{each.rule}: {each.left:g} {each.op} {each.right:g} does not hold" for each in data.reason if not each.holds)


def _stepped(data: Any) -> str:
    return f"step {data.step}, loss {data.loss:.4g}, reward {data.reward:.3g}, members {', '.join(data.members)}"


def _ended(data: Any) -> str:
    return f"version {data.version}, " + (f"{', '.join(data.stays)} stays" if data.stays else "all return")


def _closed(data: Any) -> str:
    mean = "none" if data.mean is None else f"{data.mean:.3g}"
    return f"version {data.version}, mean reward {mean}"


_AWAY = {"": "", "transition": "leaves for training: ", "withdrawn": "is withdrawn: ", "lost": "is lost: "}
"""Why a route left its engine."""

_WORDS: dict[str, Callable[[Any], str]] = {
    "run.started": lambda d: f"seed {d.seed}, code {d.code}",
    "run.continued": lambda d: f"code {d.code}",
    "run.finished": lambda d: f"{d.reason}, {_count(d.steps, 'step')}",
    "group.dispatched": lambda d: f"{d.task}, {d.reason}, version {d.version}",
    "group.ready": _ready,
    "group.materialized": lambda d: _count(len(d.rows), "row"),
    "group.claimed": lambda d: f"for {d.batch}",
    "group.consumed": lambda d: f"by {d.batch}, staleness {d.staleness}",
    "group.discarded": lambda d: f"{d.reason}, {_count(d.valid, 'reward')}",
    "execution.dispatched": lambda d: d.measurement,
    "execution.placed": _placed,
    "execution.started": _attempt,
    "execution.cancelled": lambda d: d.reason,
    "execution.lost": lambda d: d.reason,
    "execution.finished": _finished,
    "execution.sealed": lambda d: _count(d.records, "record"),
    "execution.tree-frozen": _tree,
    "execution.settled": lambda d: f"{d.outcome}, reward {d.reward:.3g}",
    "measurement.opened": lambda d: f"version {d.version}, {_count(len(d.executions), 'execution')}",
    "measurement.closed": _closed,
    "route.moved": _moved,
    "evaluation.requested": lambda d: f"try {d.tries}" if d.tries > 1 else "",
    "evaluation.scored": lambda d: f"score {d.score:.3g}" + ("" if d.valid else ", not valid"),
    "evaluation.failed": lambda d: d.reason,
    "cell.joined": lambda d: f"takes {d.capacity}, version {d.version}",
    "cell.role-transition": _transition,
    "cell.held": _held,
    "cell.lost": lambda d: f"{d.service}: {d.reason}",
    "batch.opened": lambda d: f"step {d.step}, {_count(d.groups, 'group')}" + (", the burst's last" if d.final else ""),
    "batch.stream-closed": lambda d: _count(d.micro_steps, "micro-step"),
    "batch.join-closed": lambda d: ", ".join(d.members),
    "batch.stepped": _stepped,
    "batch.failed": lambda d: d.reason,
    "micro-step.enqueued": lambda d: f"{_count(len(d.rows), 'row')}, {_count(d.tokens, 'token')}",
    "micro-step.claimed": lambda d: f"by {d.cell}",
    "micro-step.done": lambda d: f"by {d.cell}, {duration(d.seconds)}",
    "micro-step.released": lambda d: d.reason,
    "weights.exposed": lambda d: f"version {d.version}, to {d.purpose}",
    "weights.published": lambda d: f"version {d.version}, {duration(d.seconds)}",
    "burst.opened": lambda d: f"steps {d.first_step} to {d.first_step + d.steps - 1}",
    "burst.ended": _ended,
    "timer.set": lambda d: d.purpose,
    "timer.fired": lambda d: d.purpose,
    "checkpoint.saved": lambda d: f"version {d.version}",
    "checkpoint.restored": lambda d: f"version {d.version}",
    "service.left": lambda d: d.reason,
}
