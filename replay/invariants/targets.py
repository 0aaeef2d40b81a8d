"""Invariants of what is trained: whole groups, every admitted target exactly once, nothing else."""

from __future__ import annotations

from collections import Counter, defaultdict

from replay.invariants.base import Invariant, names, on
from schemas import events as e
from schemas.envelope import Event
from schemas.units import RowPlan, RowRef


class StepIsBGroups(Invariant):
    """Every training step consumed exactly B groups: those that the batch claimed, each once in the line that counts, which
    leaves out the batches that a restored version undid.

    Source: section 'Group-relative RL pipeline and bursts'; section 'Streaming training with dynamic membership'
    """

    name = "step_is_B_groups"

    def begin(self) -> None:
        self._consumed: dict[str, list[str]] = defaultdict(list)
        self._owner: dict[str, str] = {}
        self._stepped: list[Event] = []
        self._claimed: dict[str, list[str]] = defaultdict(list)

    @on("group.claimed")
    def claimed(self, event: Event) -> None:
        self._claimed[event.data.batch].append(event.entity)

    @on("batch.stepped")
    def stepped(self, event: Event) -> None:
        if self.scene.undone(event.entity):
            return
        groups, B = self._groups(event.entity), self.scene.rules.scheduler.B
        if len(groups) != B or len(set(groups)) != B:
            self.violated(event, f"its stream closed after {len(set(groups))} groups of {B}")
        if Counter(groups) != Counter(self._claimed[event.entity]):
            self.violated(event, "its stream's groups are not those that it claimed")
        # The groups of the last step may not be consumed yet when the log ends.
        for before in self._stepped:
            self._whole(before)
        self._stepped = [event]

    @on("group.consumed")
    def consumed(self, event: Event) -> None:
        data: e.GroupConsumed = event.data
        owner = self._owner.get(event.entity)
        if owner is not None and not self.scene.undone(owner) and not self.scene.undone(data.batch):
            self.violated(event, f"consumed by {owner} already")
        batch = self.scene.batches.get(data.batch)
        if batch is not None and not batch.stepped:
            self.violated(event, f"consumed by {data.batch} before its step")
        self._owner[event.entity] = data.batch
        self._consumed[data.batch].append(event.entity)

    def end(self) -> None:
        for event in self._stepped if self.evidence.complete else []:
            self._whole(event)

    def _groups(self, batch: str) -> list[str]:
        known = self.scene.batches.get(batch)
        return known.closed.groups if known is not None and known.closed is not None else []

    def _whole(self, event: Event) -> None:
        counted = not self.scene.undone(event.entity)
        if counted and Counter(self._consumed[event.entity]) != Counter(self._groups(event.entity)):
            B = self.scene.rules.scheduler.B
            self.violated(event, f"{len(self._consumed[event.entity])} groups consumed of {B}")


class TargetsOnce(Invariant):
    """No target token is trained twice: in a batch each (execution, node) is a target of one row at most, no draw is
    packed twice in the line that counts, and every micro-step counts once in its step, done by whoever held it when the
    gradients were added up.

    Source: section 'Execution-level objective' (on-tree masking makes target sets disjoint); DESIGN section 9
    """

    name = "targets_once"

    def begin(self) -> None:
        self._plans: dict[tuple[str, int], RowPlan] = {}
        self._packed: dict[tuple[str, int], tuple[str, str]] = {}
        """Draw to its micro-step and batch."""
        self._nodes: dict[str, dict[tuple[str, int], str]] = defaultdict(dict)

    @on("group.materialized")
    def materialized(self, event: Event) -> None:
        for plan in event.data.rows:
            self._plans[plan.execution, plan.draw] = plan

    @on("micro-step.enqueued")
    def enqueued(self, event: Event) -> None:
        data: e.MicroStepEnqueued = event.data
        if not self.scene.undone(data.batch):
            for row in data.rows:
                self._row(event, data.batch, row)

    def _row(self, event: Event, batch: str, row: RowRef) -> None:
        key = (row.execution, row.draw)
        before, its_batch = self._packed.get(key, ("", ""))
        if before and not self.scene.undone(its_batch):
            self.violated(event, f"draw {row.draw} of {row.execution} is in {before} too")
        self._packed[key] = (event.entity, batch)
        plan = self._plans.get(key)
        if plan is None:
            self.violated(event, f"draw {row.draw} of {row.execution} was never admitted")
            return
        if (row.tokens, row.targets) != (plan.tokens, plan.targets):
            self.violated(event, f"draw {row.draw} of {row.execution} is not as admitted")
        nodes = self._nodes[batch]
        for node in plan.target_nodes:
            twin = nodes.setdefault((row.execution, node), event.entity)
            if twin != event.entity or before == event.entity:
                self.violated(event, f"node {node} of {row.execution} is in {twin} too")

    @on("batch.stepped")
    def stepped(self, event: Event) -> None:
        data: e.BatchStepped = event.data
        batch = self.scene.batches.get(event.entity)
        if batch is None or batch.undone:
            return
        for name, done in batch.done_as_of(summed(data)).items():
            if len(done) != 1:
                self.violated(event, f"{name} counts {len(done)} times in the step")
        self._nodes.pop(event.entity, None)


class NothingLost(Invariant):
    """Every target of a group that a step consumes is trained by it: all rows admitted of its groups are in its
    micro-steps, no other's, and the step counts them.

    Source: section 'Streaming training with dynamic membership' (closes the stream only after all are enqueued)
    """

    name = "nothing_lost"

    def begin(self) -> None:
        self._rows: dict[str, dict[tuple[str, int], int]] = {}
        """Group to its admitted rows and their targets."""
        self._packed: dict[str, dict[tuple[str, int], int]] = defaultdict(dict)
        self._micro_steps: Counter[str] = Counter()

    @on("group.materialized")
    def materialized(self, event: Event) -> None:
        self._rows[event.entity] = {(row.execution, row.draw): row.targets for row in event.data.rows}

    @on("micro-step.enqueued")
    def enqueued(self, event: Event) -> None:
        data: e.MicroStepEnqueued = event.data
        self._micro_steps[data.batch] += 1
        self._packed[data.batch].update({(row.execution, row.draw): row.targets for row in data.rows})

    @on("batch.stream-closed")
    def closed(self, event: Event) -> None:
        data: e.BatchStreamClosed = event.data
        if data.micro_steps != self._micro_steps[event.entity]:
            self.violated(
                event, f"closed after {data.micro_steps} micro-steps, {self._micro_steps[event.entity]} enqueued"
            )
        admitted = {row: targets for group in data.groups for row, targets in self._rows.get(group, {}).items()}
        packed = self._packed.pop(event.entity, {})
        lost, strange = admitted.keys() - packed.keys(), packed.keys() - admitted.keys()
        if lost:
            self.violated(event, f"not packed: {names(f'draw {draw} of {name}' for name, draw in lost)}")
        if strange:
            self.violated(event, f"of no group of it: {names(f'draw {draw} of {name}' for name, draw in strange)}")

    @on("batch.stepped")
    def stepped(self, event: Event) -> None:
        data: e.BatchStepped = event.data
        batch = self.scene.batches.get(event.entity)
        if batch is not None and batch.undone:
            return
        if batch is None or batch.closed is None:
            self.violated(event, "stepped before its stream was closed")
            return
        done = [each for name in batch.done_as_of(summed(data)).values() for each in name]
        said = (data.micro_steps, data.tokens, data.targets, data.executions)
        right = (
            batch.closed.micro_steps,
            sum(each.tokens for each in done),
            sum(each.targets for each in done),
            sum(each.executions for each in done),
        )
        if said != right:
            self.violated(event, f"counts micro-steps, tokens, targets, executions {said}, done are {right}")
        if batch.join is None or data.members != batch.join.members:
            self.violated(event, f"stepped by {names(data.members)}, not by those with whom the window closed")
        else:
            outside = {each.cell for each in done} - set(data.members)
            if outside:
                self.violated(event, f"{names(outside)} trained for it and is no member")


def summed(data: e.BatchStepped) -> int:
    """Sequence up to which LOG says whose gradients the step added up; 0 where it doesn't say so."""
    return int(getattr(data, "as_of", 0))
