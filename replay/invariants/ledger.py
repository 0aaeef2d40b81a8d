"""Invariants of the ledger: counters, dispatch, waterlevel, staleness. All in the scheduler's order but the first."""

from __future__ import annotations

from replay.invariants.base import Invariant, on
from schemas import events as e
from schemas.envelope import Event


class Ledger(Invariant):
    """At every event f <= p <= d: nothing starts that wasn't dispatched, nothing ends that didn't start; d - p executions
    are queued or placed, p - f run, and d grows by whole groups.

    Source: section 'Boundary dispatch and waterlevel control'; DESIGN section 4
    """

    name = "ledger"

    def begin(self) -> None:
        self._status: dict[str, str] = {}
        self._counts = {"queued": 0, "placed": 0, "running": 0, "finished": 0}
        self._d = self._p = self._f = 0

    @on("execution.dispatched")
    def dispatched(self, event: Event) -> None:
        data: e.ExecutionDispatched = event.data
        if not data.group:
            return
        if event.entity in self._status:
            self.violated(event, "dispatched twice")
            return
        group = self.scene.groups.get(data.group)
        if group is not None and event.entity not in group.executions:
            self.violated(event, f"is none of the executions of {data.group}")
        self._move(event, "queued")
        self._d += 1

    @on("execution.placed")
    def placed(self, event: Event) -> None:
        if self._status.get(event.entity) == "queued":
            self._move(event, "placed")

    @on("execution.started")
    def started(self, event: Event) -> None:
        status = self._of(event, "started")
        execution = self.scene.executions.get(event.entity)
        # The harness had not read that it is cancelled.
        if status == "finished" and not (execution is not None and execution.cancelled):
            self.violated(event, "started after it had finished")
        elif status in ("queued", "placed"):
            self._p += 1
            self._move(event, "running")
            self._balance(event)

    @on("execution.finished", "execution.cancelled")
    def finished(self, event: Event) -> None:
        """Whichever comes first: a cancelled execution holds nothing any more."""
        status = self._of(event, event.kind.partition(".")[2])
        if status in ("queued", "placed", "running"):
            # One that ends before it started advances p and f together.
            self._p += status != "running"
            self._f += 1
            self._move(event, "finished")
            self._balance(event)

    def _of(self, event: Event, verb: str) -> str:
        """Its status; empty for one that the ledger doesn't count."""
        status = self._status.get(event.entity, "")
        execution = self.scene.executions.get(event.entity)
        if not status and (execution is None or not execution.held_out):
            self.violated(event, f"{verb} and was never dispatched")
        return status

    def _move(self, event: Event, to: str) -> None:
        before = self._status.get(event.entity)
        if before is not None:
            self._counts[before] -= 1
        self._status[event.entity] = to
        self._counts[to] += 1

    def _balance(self, event: Event) -> None:
        d, p, f, counts = self._d, self._p, self._f, self._counts
        if not f <= p <= d:
            self.violated(event, f"f = {f}, p = {p}, d = {d}")
        elif (d - p, p - f) != (counts["queued"] + counts["placed"], counts["running"]):
            self.violated(event, f"d - p = {d - p}, p - f = {p - f}, yet {counts}")


class Waterlevel(Invariant):
    """Inside a burst w = d - f never rises, except by a group that is named a refill.

    A burst's own dispatch belongs to its opening: same cause, same moment.

    Source: section 'Boundary dispatch and waterlevel control'; DESIGN section 4
    """

    name = "waterlevel"
    order = "scheduler"

    def begin(self) -> None:
        self._opening = 0

    @on("burst.opened")
    def opened(self, event: Event) -> None:
        self._opening = event.causation

    @on("execution.dispatched")
    def dispatched(self, event: Event) -> None:
        data: e.ExecutionDispatched = event.data
        group = self.scene.groups.get(data.group)
        reason = group.reason if group else ""
        burst = self.scene.burst_id
        if data.group and burst and reason != "refill" and event.causation != self._opening:
            w = self.scene.d + 1 - self.scene.f
            self.violated(event, f"w rose to {w} inside {burst} by {data.group} ({reason or 'no group'})")


class BoundaryDispatch(Invariant):
    """The first burst dispatches (phi + mu) B groups, each later one mu B and a replacement for every discarded group;
    inside a burst a group goes out only where the burst can't finish without it, and then at once. Each has N executions,
    and `oversample` beside them.

    Source: section 'Boundary dispatch and waterlevel control'; DESIGN section 4
    """

    name = "boundary_dispatch"
    order = "scheduler"

    def begin(self) -> None:
        self._wanted: dict[str, int] = {}
        self._opened: Event | None = None
        self._members = 0
        self._look = False

    @on("burst.opened")
    def opened(self, event: Event) -> None:
        scene, s = self.scene, self.scene.rules.scheduler
        self._opened = event
        if scene.bursts == 0:
            self._wanted = {"initial": round((s.phi + s.mu) * s.B)}
        else:
            self._wanted = {"boundary": s.mu * s.B, "replacement": scene.owed}

    @on("group.dispatched")
    def group(self, event: Event) -> None:
        scene, data = self.scene, event.data
        size = scene.rules.scheduler.group_size
        if len(data.executions) != size or len(set(data.executions)) != size:
            self.violated(event, f"{len(set(data.executions))} executions, not {size}")
        if data.version != scene.published:
            self.violated(event, f"dispatched at version {data.version}, published is {scene.published}")
        if data.reason == "refill":
            if scene.owed < 1:
                self.violated(event, "refills a group that was not discarded")
            if scene.alive >= self._needed():
                self.violated(event, f"{scene.alive} groups are there for {self._needed()} that the burst needs")
        elif self._opened is None or event.causation != self._opened.causation:
            self.violated(event, f"{data.reason} outside of a burst's opening")
        else:
            self._wanted[data.reason] = self._wanted.get(data.reason, 0) - 1
        self._look = True

    @on("group.discarded", "group.consumed", "batch.stepped")
    def touched(self, event: Event) -> None:
        self._look = True

    @on("execution.dispatched")
    def execution(self, event: Event) -> None:
        self._members += bool(event.data.group)

    def decided(self, event: Event) -> None:
        scene = self.scene
        if self._opened is not None and self._opened.causation == event.seq:
            for reason, left in self._wanted.items():
                if left:
                    most = "too few" if left > 0 else "too many"
                    self.violated(self._opened, f"{most} {reason} groups: {abs(left)}")
            self._wanted = {}
        if not self._look:
            return
        self._look = False
        if scene.burst is not None and not scene.finished and scene.owed > 0 and scene.alive < self._needed():
            self.violated(event, f"no refill: {scene.alive} groups are there for {self._needed()} that the burst needs")
        expected = len(scene.groups) * scene.rules.scheduler.group_size
        if self._members != expected:
            self.violated(event, f"{self._members} executions of {len(scene.groups)} groups were dispatched")

    def _needed(self) -> int:
        scene = self.scene
        steps = scene.burst.steps - scene.burst_done if scene.burst else 0
        return steps * scene.rules.scheduler.B


class QueueDepth(Invariant):
    """After every boundary dispatch Q_b = (phi + mu) B groups hold a slot, from dispatch to consumption.

    Source: section 'Scheduling staleness and boundary dispatch' (Q_b), appendix A
    """

    name = "queue_depth"
    order = "scheduler"

    def begin(self) -> None:
        self._opened: Event | None = None

    @on("burst.opened")
    def opened(self, event: Event) -> None:
        self._opened = event

    def decided(self, event: Event) -> None:
        opened = self._opened
        if opened is None or opened.causation != event.seq:
            return
        self._opened = None
        s = self.scene.rules.scheduler
        depth = round((s.phi + s.mu) * s.B)
        if self.scene.alive != depth:
            self.violated(opened, f"{self.scene.alive} groups hold a slot, (phi + mu) B = {depth}")


class Staleness(Invariant):
    """E[d] = phi + (mu - 1)/2: over whole bursts the staleness that was said adds up to exactly that, once the two ends of
    the queue and the groups that were discarded are counted.

    With O_n the groups that hold a slot when burst n ends and L_n the sum of their ages in versions then, the groups that
    n bursts consume have, in sum, n mu B (mu - 1)/2 + mu (|O_1| + ... + |O_n|) - L_n, less the ages of discarded ones
    at their burst's start; |O| is phi B but for groups still to be replaced.

    Source: theorem A.1; DESIGN section 4
    """

    name = "staleness"
    order = "scheduler"

    def begin(self) -> None:
        self._sum = self._count = 0
        self._expected = 0.0
        self._discarded = 0
        self._age = 0
        """Sum of the dispatch versions of the groups that hold a slot."""
        self._said: dict[str, tuple[int, int]] = {}
        """Group to what was said when it was consumed last: the version trained and its staleness."""

    @on("group.dispatched")
    def dispatched(self, event: Event) -> None:
        self._age += event.data.version

    @on("group.consumed")
    def consumed(self, event: Event) -> None:
        group = self.scene.groups.get(event.entity)
        self._sum += event.data.staleness
        self._count += 1
        self._age -= group.version if group else 0
        self._said[event.entity] = (event.data.version_trained, event.data.staleness)

    @on("checkpoint.restored")
    def restored(self, event: Event) -> None:
        """Groups of batches that are undone were not consumed."""
        scene, version = self.scene, event.data.version
        if version >= scene.version or scene.burst is None:
            return
        for group, (trained, staleness) in list(self._said.items()):
            if trained >= version:
                del self._said[group]
                self._sum -= staleness
                self._count -= 1
                self._age += scene.groups[group].version

    @on("group.discarded")
    def discarded(self, event: Event) -> None:
        scene = self.scene
        group = scene.groups.get(event.entity)
        if group is not None and group.status not in ("consumed", "discarded"):
            self._age -= group.version
            self._discarded += (scene.burst.version if scene.burst else scene.published) - group.version

    @on("burst.ended")
    def ended(self, event: Event) -> None:
        scene, s = self.scene, self.scene.rules.scheduler
        slots = round(s.phi * s.B) - scene.owed
        self._expected += s.mu * s.B * (s.mu - 1) / 2 + s.mu * slots
        ages = scene.alive * event.data.version - self._age
        expected = self._expected - ages - self._discarded
        self._said.clear()
        if self._count and self._sum != expected:
            mean, right = self._sum / self._count, expected / self._count
            self.violated(event, f"mean staleness {mean:.3f} over {self._count} groups, expected {right:.3f}")

    def end(self) -> None:
        if not self._count:
            self.skip("no group was consumed")


class StalenessSaid(Invariant):
    """The staleness of a group is d = v_t - v_d: the version trained minus the version published last at its dispatch.

    Source: section 'Scheduling staleness and boundary dispatch'
    """

    name = "staleness_said"
    order = "scheduler"

    @on("group.consumed")
    def consumed(self, event: Event) -> None:
        data: e.GroupConsumed = event.data
        group, batch = self.scene.groups.get(event.entity), self.scene.batches.get(data.batch)
        right = (group.version if group else None, batch.opened.version if batch else None)
        said = (data.version_dispatched, data.version_trained)
        if said != right or data.staleness != said[1] - said[0]:
            self.violated(event, f"versions {said}, staleness {data.staleness}; the log says {right}")
