"""Invariants of batches and micro-steps: order, bursts, membership, claims."""

from __future__ import annotations

from replay.invariants.base import Invariant, names, on
from schemas import events as e
from schemas.envelope import Event


class BatchOrder(Invariant):
    """Batches open one at a time while the core trains, steps and versions without a gap: step n is made on version n - 1
    and makes version n, after a restored version once more; the last of a burst is final.

    Source: section 'Group-relative RL pipeline and bursts'; DESIGN section 9
    """

    name = "batch_order"
    order = "scheduler"

    def begin(self) -> None:
        self._step = 0

    @on("batch.opened")
    def opened(self, event: Event) -> None:
        scene, data = self.scene, event.data
        if scene.batch:
            self.violated(event, f"opened while {scene.batch} is open")
        if (data.step, data.version) != (self._step + 1, scene.version):
            self.violated(event, f"step {data.step} on version {data.version} follows step {self._step}")
        burst = scene.burst
        if burst is None or data.burst != scene.burst_id:
            self.violated(event, f"is of {data.burst}, open is {scene.burst_id or 'no burst'}")
        elif data.final != (scene.burst_done + 1 == burst.steps):
            self.violated(
                event, f"is {'' if data.final else 'not '}final as step {scene.burst_done + 1} of {burst.steps}"
            )
        if data.groups != scene.rules.scheduler.B:
            self.violated(event, f"wants {data.groups} groups, B is {scene.rules.scheduler.B}")
        if not scene.training() or data.members[:1] != ["cell-0"]:
            self.violated(event, "opened without the core")

    @on("batch.stepped")
    def stepped(self, event: Event) -> None:
        data: e.BatchStepped = event.data
        batch = self.scene.batches.get(event.entity)
        if batch is not None and batch.undone:
            return
        if batch is None or batch.stepped:
            self.violated(event, "stepped and is not open")
            return
        if (data.step, data.version) != (batch.opened.step, batch.opened.version + 1):
            self.violated(event, f"made version {data.version} in step {data.step}, opened as {batch.opened.step}")
        if data.step != self._step + 1:
            self.violated(event, f"step {data.step} follows step {self._step}")
        self._step = data.step

    @on("checkpoint.restored")
    def restored(self, event: Event) -> None:
        self._step = min(self._step, event.data.version)


class Bursts(Invariant):
    """Bursts follow each other, each of mu steps; one ends when its last step was made, all its groups are consumed, and
    every serving engine holds the version that it made.

    Source: section 'Group-relative RL pipeline and bursts'; DESIGN section 4
    """

    name = "bursts"
    order = "scheduler"

    @on("burst.opened")
    def opened(self, event: Event) -> None:
        scene, data = self.scene, event.data
        mu = scene.rules.scheduler.mu
        right = (scene.bursts + 1, mu, scene.bursts * mu + 1, scene.published)
        said = (data.index, data.steps, data.first_step, data.version)
        if said != right or scene.burst is not None:
            self.violated(event, f"index, steps, first step and version {said}, expected {right}")

    @on("burst.ended")
    def ended(self, event: Event) -> None:
        scene, version = self.scene, event.data.version
        if scene.burst is None or scene.burst_done != scene.burst.steps:
            self.violated(event, f"ended after {scene.burst_done} steps")
        if scene.batch:
            self.violated(event, f"ended while {scene.batch} is open")
        if version != scene.version:
            self.violated(event, f"ended with version {version}, trained is {scene.version}")
        behind = [name for name, cell in scene.cells.items() if cell.takes and cell.version < version]
        if behind:
            self.violated(event, f"ended before {names(behind)} served version {version}")


class BurstWhole(Invariant):
    """Without streaming nothing of a burst is claimed before the groups of its steps, mu B of them, are ready.

    Source: section 'Limitations' (global shuffle); table 2, column 'Streaming'
    """

    name = "burst_whole"

    @on("group.claimed")
    def claimed(self, event: Event) -> None:
        scene = self.scene
        batch = scene.batches.get(event.data.batch)
        if scene.rules.scheduler.streaming or batch is None or batch.undone:
            return
        s = scene.rules.scheduler
        needed = (s.mu - (batch.opened.step - 1) % s.mu) * s.B
        there = len(scene.ready) + len(batch.claimed)
        if there < needed:
            self.violated(event, f"claimed when {there} groups of {needed} were ready")


class JoinClosed(Invariant):
    """The join window closes when the stream is closed, every micro-step is done and no cell is on its way into training;
    the members are the cells that train then, the core first, with their epochs.

    Source: section 'Streaming training with dynamic membership'; DESIGN section 9
    """

    name = "join_closed"
    order = "scheduler"

    def begin(self) -> None:
        self._recalled: set[str] = set()

    @on("burst.ended")
    def ended(self, event: Event) -> None:
        self._recalled = set(self.scene.training()) - set(event.data.stays)

    @on("cell.role-transition")
    def moved(self, event: Event) -> None:
        if event.data.phase in ("decided", "failed"):
            self._recalled.discard(event.entity)

    @on("batch.join-closed")
    def closed(self, event: Event) -> None:
        data: e.BatchJoinClosed = event.data
        scene = self.scene
        batch = scene.batches.get(event.entity)
        if batch is None or batch.closed is None:
            self.violated(event, "closed before the stream")
            return
        if len(batch.done) < batch.closed.micro_steps:
            self.violated(event, f"closed with {len(batch.done)} of {batch.closed.micro_steps} micro-steps done")
        leaving = [name for name, cell in scene.cells.items() if cell.place == "leaving"]
        if leaving:
            self.violated(event, f"closed while {names(leaving)} is on its way into training")
        members = [name for name in scene.training() if name not in self._recalled]
        epochs = [scene.cells[name].epoch for name in members]
        if (data.members, data.epochs) != (members, epochs):
            self.violated(event, f"members {data.members} at {data.epochs}, training are {members} at {epochs}")


class Claims(Invariant):
    """A micro-step is claimed by one cell at a time, at the event that made it free, by a member that trains at its current
    epoch, or by one that was put out and hadn't heard of it; done by whoever holds it, once; and only what is held is
    released.

    Source: DESIGN section 3 (a claim is a publish with expected last sequence), section 9
    """

    name = "claims"

    def begin(self) -> None:
        self._free: dict[str, int] = {}
        """Micro-step to the sequence at which it became free."""
        self._holder: dict[str, str] = {}
        self._done: set[str] = set()

    @on("micro-step.enqueued")
    def enqueued(self, event: Event) -> None:
        self._free[event.entity] = event.seq

    @on("micro-step.claimed")
    def claimed(self, event: Event) -> None:
        data: e.MicroStepClaimed = event.data
        name, cell = event.entity, self.scene.cells.get(data.cell)
        if name in self._holder:
            self.violated(event, f"claimed by {data.cell} while {self._holder[name]} holds it")
        elif name not in self._free:
            self.violated(event, f"claimed by {data.cell} and was never enqueued")
        elif event.causation and event.causation != self._free[name]:
            self.violated(event, f"the claim answers {event.causation}, it is free since {self._free[name]}")
        batch = self.scene.batches.get(data.batch)
        late = cell is not None and data.epoch == cell.failed_epoch
        if batch is None or (batch.stepped and not batch.undone):
            self.violated(event, f"claimed for {data.batch}, which is not open")
        if cell is not None and (cell.place != "training" or cell.epoch != data.epoch) and not late:
            self.violated(event, f"{data.cell} is {cell.place} at epoch {cell.epoch}, the claim says {data.epoch}")
        if batch is not None and batch.join is not None and data.cell not in batch.join.members and not late:
            self.violated(event, f"{data.cell} is no member: {names(batch.join.members)}")
        self._holder[name] = data.cell
        self._done.discard(name)

    @on("micro-step.done")
    def done(self, event: Event) -> None:
        holder = self._holder.get(event.entity, "")
        cell = self.scene.cells.get(event.data.cell)
        if holder != event.data.cell:
            if cell is not None and cell.failed_epoch >= 0:
                return
            self.violated(event, f"done by {event.data.cell}, {holder or 'nobody'} holds it")
        if event.entity in self._done:
            self.violated(event, "done twice")
        self._done.add(event.entity)

    @on("micro-step.released")
    def released(self, event: Event) -> None:
        if self._holder.pop(event.entity, None) is None:
            self.violated(event, "released and nobody holds it")
        self._done.discard(event.entity)
        self._free[event.entity] = event.seq
