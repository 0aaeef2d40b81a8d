"""Invariants of groups: how they close, their advantages, and the rows that admission draws."""

from __future__ import annotations

import math
from collections import Counter

from replay.invariants.base import Invariant, on
from schemas import events as e
from schemas.envelope import Event
from schemas.units import RowPlan

_NEXT = {
    "group.ready": ("dispatched", "ready"),
    "group.materialized": ("ready", "materialized"),
    "group.claimed": ("materialized", "claimed"),
    "group.consumed": ("claimed", "consumed"),
    "group.discarded": ("dispatched", "discarded"),
}


class Groups(Invariant):
    """Every group closes or is replaced: dispatched, ready, materialized, claimed for a batch, consumed by its step; or
    discarded. What a restored version undid is there again. A group that has N valid executions, or whose executions are all
    settled, is closed at once, and a batch claims only while it is open.

    Source: DESIGN section 4 (a group is ready when ...), section 8
    """

    name = "groups"
    order = "scheduler"

    def begin(self) -> None:
        self._at: dict[str, str] = {}
        self._open: dict[str, int] = {}
        """Group to how many of its executions are not settled."""
        self._group_of: dict[str, str] = {}
        self._valid: Counter[str] = Counter()
        self._due: dict[str, Event] = {}
        """Groups that are settled and not closed, and the settlement that did it."""
        self._newest = 0
        """The input that trajectories answered last."""

    @on("group.dispatched")
    def dispatched(self, event: Event) -> None:
        self._at[event.entity] = "dispatched"
        self._open[event.entity] = len(event.data.executions)
        for execution in event.data.executions:
            self._group_of[execution] = event.entity

    @on("execution.settled")
    def settled(self, event: Event) -> None:
        self._newest = max(self._newest, event.causation)
        group = self._group_of.pop(event.entity, "")
        if group:
            self._open[group] -= 1
            self._valid[group] += event.data.outcome == "valid"
            complete = self._open[group] == 0 or self._valid[group] == self.scene.rules.scheduler.N
            if complete and self._at[group] == "dispatched":
                self._due[group] = event

    @on(*_NEXT)
    def moved(self, event: Event) -> None:
        before, after = _NEXT[event.kind]
        if event.kind in ("group.claimed", "group.consumed") and self.scene.undone(event.data.batch):
            return
        at = self._at.get(event.entity, "never dispatched")
        if at != before:
            self.violated(event, f"{after}, and it was {at}")
        self._at[event.entity] = after
        if event.owner == "trajectories":
            self._newest = max(self._newest, event.causation)
        if event.kind != "group.ready":
            self._due.pop(event.entity, None)
        if event.kind == "group.claimed":
            batch = self.scene.batches.get(event.data.batch)
            if batch is None or batch.closed is not None:
                self.violated(event, f"claimed for {event.data.batch}, which is not open")

    @on("checkpoint.restored")
    def restored(self, event: Event) -> None:
        """What the batches that are undone had claimed is there again."""
        self._at.update(dict.fromkeys(self.scene.given_back(event.data.version), "materialized"))

    def end(self) -> None:
        for group, event in self._due.items():
            # The last decisions may lie beyond the log's end.
            if event.causation < self._newest or self.evidence.complete:
                self.report(event.seq, group, "N of its executions are valid, or all are settled, and it was never closed")


class OldestFirst(Invariant):
    """A batch claims the oldest groups that are ready: fewer than `reorder_groups` of an older version are left behind.

    Source: DESIGN sections 4 (oldest version first) and 8 (the reorder window is bounded in groups)
    """

    name = "oldest_first"

    def begin(self) -> None:
        self._there: dict[str, int] = {}
        """Group that can be claimed to the sequence since which it can."""

    @on("group.materialized")
    def materialized(self, event: Event) -> None:
        self._there[event.entity] = event.seq

    @on("group.discarded")
    def discarded(self, event: Event) -> None:
        self._there.pop(event.entity, None)

    @on("group.claimed")
    def claimed(self, event: Event) -> None:
        scene, mine = self.scene, self.scene.groups.get(event.entity)
        if scene.undone(event.data.batch):
            return
        self._there.pop(event.entity, None)
        if mine is None:
            return
        # What the packer had not read when it claimed is not left behind.
        known = [scene.groups[group] for group, seq in self._there.items() if seq <= event.causation]
        older = sum(group.version < mine.version for group in known)
        if older >= scene.rules.packer.reorder_groups:
            self.violated(event, f"claimed with version {mine.version}, and {older} older groups are ready")

    @on("checkpoint.restored")
    def restored(self, event: Event) -> None:
        """What the batches that are undone had claimed is there again."""
        self._there.update(dict.fromkeys(self.scene.given_back(event.data.version), event.seq))


class Oversampling(Invariant):
    """A group counts at most N rewards. Where N are valid before all are settled, the others are its surplus: those that have
    not finished are cancelled with its closing, and no others ever are, none has a reward or a row. Placeholders count for as
    many valid ones as are missing.

    Source: section 'Boundary dispatch and waterlevel control' (surplus executions under oversampling); DESIGN section 4
    """

    name = "oversampling"

    def begin(self) -> None:
        self._outcomes: dict[str, e.ExecutionSettled] = {}
        self._cancelled: dict[str, Event] = {}
        self._surplus: set[str] = set()

    @on("execution.settled")
    def settled(self, event: Event) -> None:
        if event.entity in self._cancelled and event.data.reason != "surplus":
            self.violated(event, f"settled for {event.data.reason!r}, and was cancelled")
        self._outcomes[event.entity] = event.data

    @on("execution.cancelled")
    def cancelled(self, event: Event) -> None:
        self._cancelled[event.entity] = event
        N = self.scene.rules.scheduler.N
        if [(each.left, each.right, each.holds) for each in event.data.checks] != [(N, N, True)]:
            self.violated(event, f"its check is not that {N} of N = {N} are valid")

    @on("group.ready")
    def ready(self, event: Event) -> None:
        data: e.GroupReady = event.data
        scene, N = self.scene, self.scene.rules.scheduler.N
        group = scene.groups.get(event.entity)
        members = group.executions if group else []
        outcomes = {name: self._outcomes[name].outcome for name in members if name in self._outcomes}
        valid = sum(outcome == "valid" for outcome in outcomes.values())
        inside = [reward for reward in data.rewards if reward.outcome != "excluded"]
        right = min(N, valid + sum(outcome == "placeholder" for outcome in outcomes.values()))
        if len(inside) != right or valid > N:
            self.violated(event, f"{len(inside)} rewards of {valid} valid ones in the baseline, expected {right}, N = {N}")
        if sum(reward.outcome == "valid" for reward in inside) != valid:
            self.violated(event, "a valid execution is not in the baseline")
        for name in members:
            cancelled = self._cancelled.get(name)
            if cancelled is not None and cancelled.causation != event.causation:
                self.violated(event, f"{name} was cancelled by another event than closes its group")
            if cancelled is not None and (valid < N or name not in data.surplus):
                self.violated(event, f"{name} is cancelled, {valid} of N = {N} are valid")
        for name in data.surplus:
            known = self._outcomes.get(name)
            if name not in self._cancelled and (known is None or (known.reason != "surplus" and known.outcome != "placeholder")):
                self.violated(event, f"{name} is surplus, and was not given up")
        self._surplus.update(data.surplus)

    @on("group.materialized")
    def materialized(self, event: Event) -> None:
        for row in event.data.rows:
            if row.execution in self._surplus:
                self.violated(event, f"a row of {row.execution}, which is surplus")

    @on("group.discarded")
    def discarded(self, event: Event) -> None:
        group = self.scene.groups.get(event.entity)
        gone = [name for name in (group.executions if group else []) if name in self._cancelled]
        if gone:
            self.violated(event, f"discarded, and {gone[0]} was cancelled")


class Advantages(Invariant):
    """A ready group has at least two rewards in its baseline; advantages are (r - mean) / (std + 1e-4), or r - mean, sum to
    zero over it, and are zero outside.

    Source: section 'Partial scoring'; DESIGN section 7
    """

    name = "advantages"

    @on("group.ready")
    def ready(self, event: Event) -> None:
        data: e.GroupReady = event.data
        inside = [reward for reward in data.rewards if reward.outcome != "excluded"]
        if len(inside) < 2:
            self.violated(event, f"{len(inside)} rewards in the baseline")
        if abs(total := sum(reward.advantage for reward in inside)) > 1e-3:
            self.violated(event, f"advantages sum to {total:.4f}")
        if any(reward.advantage for reward in data.rewards if reward.outcome == "excluded"):
            self.violated(event, "an excluded execution has an advantage")
        if not inside or self.scene.config is None:
            return
        mean = math.fsum(reward.reward for reward in inside) / len(inside)
        std = math.sqrt(math.fsum((reward.reward - mean) ** 2 for reward in inside) / len(inside))
        if not (math.isclose(data.mean, mean, abs_tol=1e-9) and math.isclose(data.std, std, abs_tol=1e-9)):
            self.violated(event, f"mean {data.mean:g} and std {data.std:g}, its rewards have {mean:g} and {std:g}")
        divisor = std + 1e-4 if self.scene.config.trajectories.advantage == "mean_std" else 1.0
        for reward in inside:
            right = (reward.reward - mean) / divisor
            if not math.isclose(reward.advantage, right, rel_tol=1e-6, abs_tol=1e-6):
                self.violated(event, f"{reward.execution} has advantage {reward.advantage:g}, expected {right:g}")


class RowsDisjoint(Invariant):
    """The rows that admission drew from one execution have no target in common.

    Source: section 'Trajectory sampling', equation (4) (a shared prefix is never trained twice)
    """

    name = "rows_disjoint"

    @on("group.materialized")
    def materialized(self, event: Event) -> None:
        seen: dict[tuple[str, int], int] = {}
        for row in event.data.rows:
            for node in row.target_nodes:
                draw = seen.setdefault((row.execution, node), row.draw)
                if draw != row.draw:
                    self.violated(event, f"node {node} of {row.execution} is in draws {draw} and {row.draw}")


class Admission(Invariant):
    """At most J_max rows an execution, from its frozen tree: each a root-to-leaf path, its targets trainable nodes on that
    path, counted right, of the highest class that has any left; nothing trainable is left over below J_max.

    Source: section 'Trajectory sampling', equation (4)
    """

    name = "admission"

    def begin(self) -> None:
        self._trees: dict[str, e.ExecutionTreeFrozen] = {}
        self._valid: set[str] = set()

    @on("execution.tree-frozen")
    def frozen(self, event: Event) -> None:
        self._trees[event.entity] = event.data

    @on("execution.settled")
    def settled(self, event: Event) -> None:
        if event.data.outcome == "valid":
            self._valid.add(event.entity)

    @on("group.materialized")
    def materialized(self, event: Event) -> None:
        group = self.scene.groups.get(event.entity)
        rows: dict[str, list[RowPlan]] = {name: [] for name in group.executions} if group else {}
        for row in event.data.rows:
            rows.setdefault(row.execution, []).append(row)
        for execution, drawn in rows.items():
            tree = self._trees.pop(execution, None)
            if execution not in self._valid:
                if drawn:
                    self.violated(event, f"{execution} has rows and no valid reward")
            elif tree is None:
                self.violated(event, f"{execution} has a valid reward and no tree")
            else:
                self._drawn(event, execution, tree, drawn)
            self._valid.discard(execution)

    def _drawn(self, event: Event, execution: str, tree: e.ExecutionTreeFrozen, drawn: list[RowPlan]) -> None:
        left = list(tree.trainable)
        for index, row in enumerate(drawn):
            if row.draw != index or row.leaf not in tree.leaves:
                self.violated(event, f"draw {row.draw} of {execution} is of node {row.leaf}, as number {index}")
                return
            path = []
            node = row.leaf
            while node >= 0:
                path.append(node)
                node = tree.parents[node]
            targets = [node for node in reversed(path) if left[node]]
            counts = (sum(tree.tokens[node] for node in path), sum(left[node] for node in targets))
            if row.target_nodes != targets or (row.tokens, row.targets) != counts:
                self.violated(event, f"draw {row.draw} of {execution} is not the unmasked part of its path")
            best = min(
                (kind for leaf, kind in zip(tree.leaves, tree.classes, strict=True) if self._open(tree, left, leaf)),
                default=-1,
            )
            if tree.classes[tree.leaves.index(row.leaf)] != best:
                self.violated(event, f"draw {row.draw} of {execution} passes over class {best}")
            for node in path:
                left[node] = 0
        limit = self.scene.rules.trajectories.J_max
        rest = any(self._open(tree, left, leaf) for leaf in tree.leaves)
        if len(drawn) > limit or (len(drawn) < limit and rest):
            self.violated(event, f"{execution} has {len(drawn)} rows, J_max is {limit}")

    @staticmethod
    def _open(tree: e.ExecutionTreeFrozen, left: list[int], leaf: int) -> bool:
        node = leaf
        while node >= 0:
            if left[node]:
                return True
            node = tree.parents[node]
        return False
