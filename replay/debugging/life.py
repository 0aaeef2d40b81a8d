"""The life of an execution, a group, a batch or a micro-step, from its events, in chapters.

    execution   dispatch, engines, calls, finish, score, trajectories, micro-steps, batch
    group       dispatch, executions, rewards, trajectories, micro-steps, batch
    batch       opening, cells, groups, micro-steps, step
    micro-step  work, batch

One pass, which ends when nothing more can come: at the publication after the step that consumed it. Memory: what is
cited, and the batches that are open.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from replay.debugging.citing import Cited, cite
from replay.debugging.moments import Point
from replay.timeline.notes import duration
from schemas.envelope import Event
from schemas.errors import ConfigError
from schemas.ids import group_of

_ENTITIES = {
    "execution": re.compile(r"e-h?\d{6,}\.\d{2,}"),
    "group": re.compile(r"g-\d{6,}"),
    "batch": re.compile(r"b-\d{6,}"),
    "micro-step": re.compile(r"m-\d{6,}\.\d{3,}"),
    "cell": re.compile(r"(?:cell|pool)-\d+"),
}


class Chapter(msgspec.Struct, frozen=True, kw_only=True):
    title: str
    told: list[str]
    """What it came to."""
    cited: list[Cited]
    """In log order."""


class Life(msgspec.Struct, frozen=True, kw_only=True):
    entity: str
    chapters: list[Chapter]
    """Those that there was something to tell of."""


def entity_kind(name: str) -> str:
    """execution, group, batch, micro-step or cell. Raises ConfigError for what has no life that could be told."""
    for kind, pattern in _ENTITIES.items():
        if pattern.fullmatch(name):
            return kind
    raise ConfigError(
        f"{name!r} is nothing that can be asked about",
        where="--why",
        remedy="name a cell (cell-2), an execution (e-000012.03), a group (g-000012), a batch (b-000003) or a micro-step "
        "(m-000003.007)",
    )


def life(events: Iterable[Event], entity: str, until: Point | None = None) -> Life:
    """Up to the point, or whole. Raises ConfigError for what the log doesn't know by then."""
    kind = entity_kind(entity)
    story = _STORIES[kind](entity)
    first, last, start_us = "", "", 0
    for event in events:
        start_us = start_us or event.time_us
        if until is not None and (event.seq > until.seq if until.seq else event.time_us > until.at_us(start_us)):
            break
        if event.kind == _BIRTHS[kind]:
            first, last = first or event.entity, event.entity
        if not isinstance(event.data, msgspec.Raw):
            story.see(event, start_us)
        if story.over:
            break
    if not story.cited:
        known = f"the log has {first} to {last}" if first else f"the log has no {kind}"
        by_then = f" by {until.text}" if until is not None else ""
        raise ConfigError(f"there is no {kind} {entity}{by_then}", where="--why", remedy=known)
    return Life(entity=entity, chapters=story.chapters())


class _Story:
    titles: tuple[str, ...] = ()
    passed_over: tuple[str, ...] = ()
    """Kinds of its micro-steps that would only fill the page."""

    def __init__(self, entity: str) -> None:
        self.entity = entity
        self.cited: dict[str, list[Cited]] = {}
        self.told: dict[str, list[str]] = {}
        self.over = False
        self.batch = ""
        self._stepped = False
        self._opened: dict[str, Event] = {}
        self._micro_steps: set[str] = set()
        """Those that train it."""
        self._start_us = 0

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.entity} [{sum(map(len, self.cited.values()))} cited]>"

    def see(self, event: Event, start_us: int) -> None:
        self._start_us = start_us
        entity = event.kind.partition(".")[0]
        if event.kind == "batch.opened":
            # One is open at a time; its groups are claimed while it is.
            self._opened = {event.entity: event}
        self.follow(event, entity)
        if entity == "micro-step":
            self._work(event)
        elif event.kind == "batch.stepped" and event.entity == self.batch:
            self.cite("batch", event)
            self._stepped = True
        elif event.kind == "checkpoint.restored" and self._stepped:
            self.cite("batch", event)
        elif event.kind == "burst.ended" and self._stepped:
            self.cite("batch", event)
            self.over = True

    def follow(self, event: Event, entity: str) -> None:
        """What only this kind of entity looks at."""

    def trains(self, event: Event) -> bool:
        """Whether an enqueued micro-step holds rows of it."""
        return False

    def cite(self, title: str, event: Event, words: str = "") -> None:
        found = cite(event, self._start_us)
        self.cited.setdefault(title, []).append(msgspec.structs.replace(found, note=words) if words else found)

    def tell(self, title: str, text: str) -> None:
        self.told.setdefault(title, []).append(text)

    def chapters(self) -> list[Chapter]:
        return [
            Chapter(title=title, told=self.told.get(title, []), cited=self.cited.get(title, []))
            for title in self.titles
            if title in self.cited or title in self.told
        ]

    def group(self, event: Event, name: str, rows: Iterable[str] | None) -> None:
        """An event of its group; `rows` are the executions whose rows are told of, None for all."""
        if event.entity != name:
            return
        data, wanted = event.data, None if rows is None else set(rows)
        if event.kind == "group.dispatched":
            self.cite("dispatch", event)
        elif event.kind == "group.ready":
            self.cite("rewards" if wanted is None else "score", event)
            for each in data.rewards:
                if wanted is None or each.execution in wanted:
                    text = f"{each.execution}: {each.outcome}, reward {each.reward:.3g}, advantage {each.advantage:.3g}"
                    self.tell("rewards" if wanted is None else "score", text)
        elif event.kind == "group.materialized":
            mine = [each for each in data.rows if wanted is None or each.execution in wanted]
            self.cite("trajectories", event, f"{len(data.rows)} rows of the group, {len(mine)} of {self.entity}")
            for each in mine:
                text = (
                    f"{each.execution} draw {each.draw}: leaf {each.leaf}, {each.tokens} tokens, {each.targets} targets"
                )
                self.tell("trajectories", text)
        else:
            if event.kind == "group.claimed":
                self.batch, self._stepped = data.batch, False
                if data.batch in self._opened:
                    self.cite("batch", self._opened[data.batch])
            self.cite("batch", event)
            self.over = event.kind == "group.discarded"

    def _work(self, event: Event) -> None:
        if event.kind == "micro-step.enqueued" and self.trains(event):
            self._micro_steps.add(event.entity)
        if event.entity in self._micro_steps and event.kind not in self.passed_over:
            self.cite("micro-steps", event)


class _Execution(_Story):
    titles = ("dispatch", "engines", "calls", "finish", "score", "trajectories", "micro-steps", "batch")

    def __init__(self, entity: str) -> None:
        super().__init__(entity)
        self._group = group_of(entity)
        self._evaluation = f"v-{entity[2:]}-"
        self._since: dict[str, int] = {}
        self._moving: dict[str, Event] = {}
        """Cell to the decision that it leaves."""

    def trains(self, event: Event) -> bool:
        return any(row.execution == self.entity for row in event.data.rows)

    def follow(self, event: Event, entity: str) -> None:
        if entity == "evaluation":
            if event.entity.startswith(self._evaluation):
                self.cite("score", event)
        elif entity == "group":
            self.group(event, self._group, [self.entity])
        elif event.kind == "cell.role-transition" and event.data.phase == "decided":
            self._moving[event.entity] = event
        elif event.entity == self.entity:
            self._mine(event)
        elif event.kind == "measurement.closed" and self._group.startswith("g-h") and "dispatch" in self.cited:
            if event.entity == f"h-{self._group[3:]}":
                self.cite("score", event)
                self.over = True

    def _mine(self, event: Event) -> None:
        verb, data = event.kind.partition(".")[2], event.data
        title = _TITLES.get(event.kind, "engines")
        if event.kind == "route.moved" and (left := self._moving.get(data.source)) is not None:
            self.cite("engines", left, f"{data.source} leaves for training")
        self.cite(title, event)
        self._since[verb] = event.time_us
        if verb == "started":
            waited = duration((event.time_us - self._since.get("dispatched", event.time_us)) / 1e6)
            self.tell("engines", f"attempt {data.attempt} started {waited} after the dispatch")
        elif verb == "finished":
            self._finished(data)
        elif verb == "sealed":
            text = f"attempt {data.attempt}: {data.records} in RECORDS, the last at sequence {data.last_record} there"
            self.tell("calls", text)
        elif verb == "tree-frozen":
            self.tell("trajectories", f"leaves by class of (4): {_counted(data.classes)}")

    def _finished(self, data: Any) -> None:
        counters = data.counters
        text = f"{counters.calls} calls, {counters.reconnects} reconnects, {counters.harness_errors} harness errors"
        self.tell("calls", f"as the harness says: {text}")
        code = "none" if data.exit_code is None else str(data.exit_code)
        self.tell("finish", f"{data.reason} after {duration(data.seconds)}, exit code {code}")


class _Group(_Story):
    titles = ("dispatch", "executions", "rewards", "trajectories", "micro-steps", "batch")

    def trains(self, event: Event) -> bool:
        return any(group_of(row.execution) == self.entity for row in event.data.rows)

    def follow(self, event: Event, entity: str) -> None:
        if entity == "group":
            self.group(event, self.entity, None)
        elif event.kind in _ENDS and group_of(event.entity) == self.entity:
            self.cite("executions", event)


class _Batch(_Story):
    titles = ("opening", "cells", "groups", "micro-steps", "batch")
    passed_over = ("micro-step.enqueued", "micro-step.claimed")

    def __init__(self, entity: str) -> None:
        super().__init__(entity)
        self.batch = entity
        self._staleness: list[int] = []
        self._done: dict[str, list[float]] = {}

    def trains(self, event: Event) -> bool:
        return bool(event.data.batch == self.entity)

    def follow(self, event: Event, entity: str) -> None:
        if event.kind == "batch.opened" and event.entity == self.entity:
            self.cite("opening", event)
        elif entity == "batch" and event.entity == self.entity and event.kind != "batch.stepped":
            self.cite("batch", event)
        elif entity == "group" and getattr(event.data, "batch", "") == self.entity:
            if event.kind == "group.claimed":
                self.cite("groups", event)
            else:
                self._staleness.append(event.data.staleness)
        elif event.kind == "cell.role-transition" and self.cited and not self._stepped and event.data.target == "train":
            if event.data.phase in ("decided", "completed", "failed"):
                self.cite("cells", event)
        elif event.kind == "micro-step.done" and event.data.batch == self.entity:
            self._done.setdefault(event.data.cell, []).append(event.data.seconds)

    def chapters(self) -> list[Chapter]:
        for cell, seconds in sorted(self._done.items()):
            self.tell("micro-steps", f"{cell} did {len(seconds)} in {duration(sum(seconds))}")
        if self._staleness:
            mean = sum(self._staleness) / len(self._staleness)
            self.tell("groups", f"{len(self._staleness)} consumed, mean staleness {mean:.3g}")
        return super().chapters()


class _MicroStep(_Story):
    titles = ("micro-steps", "batch")

    def trains(self, event: Event) -> bool:
        if event.entity != self.entity:
            return False
        self.batch = event.data.batch
        if self.batch in self._opened:
            self.cite("batch", self._opened[self.batch])
        for row in event.data.rows:
            self.tell("micro-steps", f"{row.execution} draw {row.draw}: {row.tokens} tokens, {row.targets} targets")
        return True


def _counted(classes: list[int]) -> str:
    return ", ".join(f"{classes.count(each)} {_CLASSES[each]}" for each in sorted(set(classes))) or "none"


_CLASSES = ("main", "main-summary", "sub-agent", "sub-agent-summary")
_TITLES = {
    "execution.dispatched": "dispatch",
    "execution.finished": "finish",
    "execution.cancelled": "finish",
    "execution.sealed": "calls",
    "execution.settled": "score",
    "execution.tree-frozen": "trajectories",
}
_ENDS = ("execution.finished", "execution.settled", "execution.cancelled", "execution.lost")
_STORIES = {"execution": _Execution, "group": _Group, "batch": _Batch, "micro-step": _MicroStep}
_BIRTHS = {
    "execution": "execution.dispatched",
    "group": "group.dispatched",
    "batch": "batch.opened",
    "micro-step": "micro-step.enqueued",
}
