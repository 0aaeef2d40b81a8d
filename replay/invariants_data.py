"""Invariants of the data plane: harnesses, outcomes, batches, targets, weights."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from replay.checker import Invariant, Log, NotApplicable, Violation, violation
from replay.invariants_flow import config_of
from schemas import events as e
from schemas.envelope import Event
from schemas.units import RowPlan


def harness_errors(log: Log) -> Iterator[Violation]:
    """No harness met an answer that a correct endpoint wouldn't give."""
    for event in log:
        if event.kind == "execution.finished":
            data: e.ExecutionFinished = event.data
            if data.counters.harness_errors:
                yield violation("harness_errors", event, f"{data.counters.harness_errors} harness errors")


def one_outcome(log: Log) -> Iterator[Violation]:
    """Every execution of a group that is ready, consumed or discarded ended in exactly one outcome, and the group's
    rewards are those outcomes. An execution without one is open only because the run ended before."""
    members: dict[str, list[str]] = {}
    finished: set[str] = set()
    settled: dict[str, e.ExecutionSettled] = {}
    for event in log:
        match event.kind:
            case "group.dispatched":
                group: e.GroupDispatched = event.data
                members[event.entity] = group.executions
            case "execution.finished":
                finished.add(event.entity)
            case "execution.settled":
                outcome: e.ExecutionSettled = event.data
                if event.entity in settled:
                    yield violation("one_outcome", event, "settled twice")
                if event.entity not in finished:
                    yield violation("one_outcome", event, "settled and not finished")
                settled[event.entity] = outcome
            case "group.ready":
                ready: e.GroupReady = event.data
                yield from _missing("one_outcome", event, members, settled)
                for reward in ready.rewards:
                    known = settled.get(reward.execution)
                    if known and (known.outcome, known.reward) != (reward.outcome, reward.reward):
                        yield violation(
                            "one_outcome",
                            event,
                            f"{reward.execution} has {reward.outcome} {reward.reward}, settled {known.outcome} {known.reward}",
                        )
                said = Counter(reward.execution for reward in ready.rewards)
                if said != Counter(members.get(event.entity, [])):
                    yield violation("one_outcome", event, "its rewards are not one for each of its executions")
            case "group.discarded":
                yield from _missing("one_outcome", event, members, settled)


def _missing(
    name: str, event: Event, members: dict[str, list[str]], settled: dict[str, e.ExecutionSettled]
) -> Iterator[Violation]:
    for execution in members.get(event.entity, []):
        if execution not in settled:
            yield violation(name, event, f"{execution} has no outcome yet")


def advantages(log: Log) -> Iterator[Violation]:
    """A ready group has at least two rewards in its baseline; advantages sum to zero over it, and are zero outside."""
    for event in log:
        if event.kind != "group.ready":
            continue
        data: e.GroupReady = event.data
        inside = [reward for reward in data.rewards if reward.outcome != "excluded"]
        if len(inside) < 2:
            yield violation("advantages", event, f"{len(inside)} rewards in the baseline")
        if abs(sum(reward.advantage for reward in inside)) > 1e-3:
            yield violation("advantages", event, f"advantages sum to {sum(reward.advantage for reward in inside):.4f}")
        if any(reward.advantage for reward in data.rewards if reward.outcome == "excluded"):
            yield violation("advantages", event, "an excluded execution has an advantage")


def step_is_B_groups(log: Log) -> Iterator[Violation]:
    """Every training step consumed exactly B groups: those that the batch claimed, each once in the whole run."""
    B = config_of(log).scheduler.B
    claimed: dict[str, list[str]] = defaultdict(list)
    closed: dict[str, list[str]] = {}
    consumed: dict[str, list[str]] = defaultdict(list)
    owner: dict[str, str] = {}
    stepped: dict[str, Event] = {}
    step = 0
    for event in log:
        match event.kind:
            case "group.claimed":
                claim: e.GroupClaimed = event.data
                claimed[claim.batch].append(event.entity)
            case "batch.stream-closed":
                stream: e.BatchStreamClosed = event.data
                closed[event.entity] = stream.groups
            case "batch.stepped":
                data: e.BatchStepped = event.data
                stepped[event.entity] = event
                if data.step != step + 1:
                    yield violation("step_is_B_groups", event, f"step {data.step} follows step {step}")
                step = data.step
                groups = closed.get(event.entity, [])
                if len(groups) != B or len(set(groups)) != B:
                    yield violation("step_is_B_groups", event, f"its stream closed after {len(set(groups))} groups of {B}")
                if Counter(groups) != Counter(claimed[event.entity]):
                    yield violation("step_is_B_groups", event, "its stream's groups are not those that it claimed")
            case "group.consumed":
                use: e.GroupConsumed = event.data
                if event.entity in owner:
                    yield violation("step_is_B_groups", event, f"consumed by {owner[event.entity]} already")
                if use.batch not in stepped:
                    yield violation("step_is_B_groups", event, f"consumed by {use.batch} before its step")
                owner[event.entity] = use.batch
                consumed[use.batch].append(event.entity)
    # The groups of the last step may not be consumed yet when the log ends.
    for batch, event in list(stepped.items())[:-1]:
        if Counter(consumed[batch]) != Counter(closed.get(batch, [])):
            yield violation("step_is_B_groups", event, f"{len(consumed[batch])} groups consumed of {B}")


def targets_once(log: Log) -> Iterator[Violation]:
    """No target token is trained twice: in a batch each (execution, node) is a target of one row at most, no draw is
    packed twice in the run, and every micro-step counts once in its step."""
    plans: dict[tuple[str, int], RowPlan] = {}
    packed: dict[tuple[str, int], str] = {}
    steps: dict[str, dict[str, int]] = defaultdict(dict)
    nodes: dict[str, dict[tuple[str, int], str]] = defaultdict(dict)
    for event in log:
        match event.kind:
            case "group.materialized":
                rows: e.GroupMaterialized = event.data
                for plan in rows.rows:
                    plans[plan.execution, plan.draw] = plan
            case "micro-step.enqueued":
                data: e.MicroStepEnqueued = event.data
                steps[data.batch][event.entity] = 0
                for row in data.rows:
                    key = (row.execution, row.draw)
                    if key in packed:
                        yield violation("targets_once", event, f"draw {row.draw} of {row.execution} is in {packed[key]} too")
                    packed[key] = event.entity
                    if key not in plans:
                        yield violation("targets_once", event, f"draw {row.draw} of {row.execution} was never admitted")
                        continue
                    if (row.tokens, row.targets) != (plans[key].tokens, plans[key].targets):
                        yield violation("targets_once", event, f"draw {row.draw} of {row.execution} is not as admitted")
                    for node in plans[key].target_nodes:
                        before = nodes[data.batch].get((row.execution, node))
                        if before is not None:
                            yield violation("targets_once", event, f"node {node} of {row.execution} is in {before} too")
                        nodes[data.batch][row.execution, node] = event.entity
            case "micro-step.done":
                done: e.MicroStepDone = event.data
                steps[done.batch][event.entity] = steps[done.batch].get(event.entity, 0) + 1
            case "micro-step.released":
                # A released micro-step's gradient went with the cell: what counts comes after.
                released: e.MicroStepReleased = event.data
                steps[released.batch][event.entity] = 0
            case "batch.stepped":
                for name, times in steps[event.entity].items():
                    if times != 1:
                        yield violation("targets_once", event, f"{name} counts {times} times in the step")


def rows_disjoint(log: Log) -> Iterator[Violation]:
    """The rows that admission drew from one execution have no target in common."""
    for event in log:
        if event.kind != "group.materialized":
            continue
        data: e.GroupMaterialized = event.data
        seen: dict[tuple[str, int], int] = {}
        for row in data.rows:
            for node in row.target_nodes:
                if (row.execution, node) in seen:
                    draw = seen[row.execution, node]
                    yield violation(
                        "rows_disjoint", event, f"node {node} of {row.execution} is in draws {draw} and {row.draw}"
                    )
                seen[row.execution, node] = row.draw


def durable_before_published(log: Log) -> Iterator[Violation]:
    """An engine serves a version only after the checkpoint that holds it was saved."""
    saved: set[int] = set()
    looked = 0
    for event in log:
        if event.kind == "checkpoint.saved":
            checkpoint: e.CheckpointSaved = event.data
            saved.add(checkpoint.version)
        elif event.kind == "weights.published":
            data: e.WeightsPublished = event.data
            looked += 1
            if data.version > 0 and data.version not in saved:
                yield violation("durable_before_published", event, f"version {data.version} is not durable")
    if not looked:
        raise NotApplicable("no weights were published")


ALL: dict[str, Invariant] = {
    each.__name__: each
    for each in (
        harness_errors,
        one_outcome,
        advantages,
        step_is_B_groups,
        rows_disjoint,
        targets_once,
        durable_before_published,
    )
}
