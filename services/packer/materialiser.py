"""The arrays of a micro-step, made before its `enqueued` event is said, so that whoever reads the event finds the blob.

What a decision names by execution and draw is looked up where it was said: targets in `group.materialized`, advantages
in `group.ready`, tokens in the frozen tree. All three are written once, so making a micro-step again gives the same
bytes. Rows lie end to end: there is no padding. A tree is read once, because an execution's rows share a micro-step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate
from typing import TypeVar

import msgspec
import numpy as np

from schemas import streams
from schemas.envelope import Decision
from schemas.errors import LogBroken
from schemas.events import GroupMaterialized, GroupReady, MicroStepEnqueued
from schemas.ids import group_of
from schemas.micro_steps import DTYPES, MicroStep, encode, validate
from schemas.records import FrozenTree, TreeNode
from schemas.units import Reward, RowPlan, RowRef, Value
from services.mesh.bus import Bus
from services.mesh.codec import decode
from services.mesh.tree_codec import decode_tree

V = TypeVar("V", bound=Value)
_KEPT_GROUPS = 16


class GroupPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What was said about a group, by execution and by draw."""

    rewards: dict[str, Reward]
    rows: dict[tuple[str, int], RowPlan]


class Materialiser:
    """A shell's `before_publish`: puts the blob of every `micro-step.enqueued`. Raises LogBroken where it can't."""

    def __init__(self, *, bus: Bus, run: str) -> None:
        self._bus, self._run = bus, run
        self._plans: OrderedDict[str, GroupPlan] = OrderedDict()
        self.made = 0
        """Micro-steps made by this process."""
        self.padding = 0
        """Tokens in their arrays beyond the tokens of their rows."""

    def __repr__(self) -> str:
        return f"<Materialiser [{self.made} made, {len(self._plans)} groups kept]>"

    async def __call__(self, decision: Decision) -> None:
        data = decision.data
        if not isinstance(data, MicroStepEnqueued):
            return
        plans: list[RowPlan] = []
        rewards: dict[str, Reward] = {}
        trees: dict[str, FrozenTree] = {}
        for row in data.rows:
            group = await self._group(group_of(row.execution))
            plan = _plan_of(row, group)
            plans.append(plan)
            rewards[row.execution] = group.rewards[row.execution]
            if row.execution not in trees:
                blob = streams.tree_blob(row.execution, plan.attempt)
                trees[row.execution] = decode_tree(await self._bus.get_blob(blob))
        micro_step = build(decision.entity, data.batch, plans, trees=trees, rewards=rewards)
        validate(micro_step)
        await self._bus.put_blob(data.blob, encode(micro_step))
        self.made += 1
        self.padding += micro_step.token_count - data.tokens

    async def _group(self, group: str) -> GroupPlan:
        known = self._plans.get(group)
        if known is None:
            ready = await self._said("group.ready", group, GroupReady)
            materialized = await self._said("group.materialized", group, GroupMaterialized)
            known = self._plans[group] = GroupPlan(
                rewards={reward.execution: reward for reward in ready.rewards},
                rows={(row.execution, row.draw): row for row in materialized.rows},
            )
            if len(self._plans) > _KEPT_GROUPS:
                self._plans.popitem(last=False)
        return known

    async def _said(self, kind: str, group: str, data: type[V]) -> V:
        subject = streams.subject(self._run, "trajectories", kind, group)
        found = await self._bus.last_for(streams.log_stream(self._run), subject)
        said = decode(found).data if found is not None else None
        if not isinstance(said, data):
            raise LogBroken(f"there is no {kind} that this version can read", where=group)
        return said


def build(
    micro_step: str,
    batch: str,
    rows: Sequence[RowPlan],
    *,
    trees: dict[str, FrozenTree],
    rewards: dict[str, Reward],
) -> MicroStep:
    """The packed rows, in the order given. `trees` and `rewards` by execution; L_i is the targets of all its rows.

    Targets are the sampled ids of each row's target nodes. Elsewhere the log-probability is 0, the version -1 and the
    temperature that of the node. Raises LogBroken when a tree doesn't have the tokens that its row was admitted with.
    """
    executions = list(dict.fromkeys(row.execution for row in rows))
    packed = [_Row(row, trees[row.execution]) for row in rows]
    return MicroStep(
        micro_step=micro_step,
        batch=batch,
        cu_seqlens=_bytes("cu_seqlens", [0, *accumulate(row.tokens for row in rows)]),
        tokens=_bytes("tokens", [value for row in packed for value in row.tokens]),
        targets=_bytes("targets", [value for row in packed for value in row.targets]),
        behaviour_logprob=_bytes("behaviour_logprob", [value for row in packed for value in row.logprobs]),
        temperature=_bytes("temperature", [value for row in packed for value in row.temperature]),
        token_version=_bytes("token_version", [value for row in packed for value in row.versions]),
        row_execution=_bytes("row_execution", [executions.index(row.execution) for row in rows]),
        executions=tuple(executions),
        advantages=tuple(rewards[execution].advantage for execution in executions),
        target_counts=tuple(sum(row.targets for row in rows if row.execution == name) for name in executions),
    )


class _Row:
    """One row, token by token: root to leaf, each node's new input and then what was sampled for it."""

    def __init__(self, plan: RowPlan, tree: FrozenTree) -> None:
        self.tokens: list[int] = []
        self.targets: list[int] = []
        self.logprobs: list[float] = []
        self.temperature: list[float] = []
        self.versions: list[int] = []
        wanted = set(plan.target_nodes)
        for index in _path(tree, plan.leaf):
            self._add(tree.nodes[index], target=index in wanted)
        if (len(self.tokens), sum(self.targets)) != (plan.tokens, plan.targets):
            raise LogBroken(
                f"row {plan.draw} has {len(self.tokens)} tokens and {sum(self.targets)} targets in the frozen tree, "
                f"admitted were {plan.tokens} and {plan.targets}",
                where=f"execution {plan.execution}, attempt {plan.attempt}",
                remedy="the tree in BLOBS isn't the one that was announced; restore it from RECORDS",
            )

    def _add(self, node: TreeNode, *, target: bool) -> None:
        context, sampled = len(node.input_ids), len(node.output_ids)
        self.tokens += node.input_ids + node.output_ids
        self.temperature += [node.temperature] * (context + sampled)
        self.targets += [0] * context + [int(target)] * sampled
        self.logprobs += [0.0] * context + (node.logprobs if target else [0.0] * sampled)
        self.versions += [-1] * context
        if target:
            self.versions += [span.version for span in node.versions for _ in range(span.start, span.end)]
        else:
            self.versions += [-1] * sampled


def _path(tree: FrozenTree, leaf: int) -> list[int]:
    path = []
    while leaf >= 0:
        path.append(leaf)
        leaf = tree.nodes[leaf].parent
    return path[::-1]


def _plan_of(row: RowRef, group: GroupPlan) -> RowPlan:
    plan = group.rows.get((row.execution, row.draw))
    if plan is None:
        raise LogBroken(f"row {row.draw} was never admitted", where=f"execution {row.execution}")
    return plan


def _bytes(field: str, values: Sequence[float]) -> bytes:
    return np.asarray(values, DTYPES[field]).tobytes()
