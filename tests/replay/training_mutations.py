"""What breaks the laws of batches, micro-steps and weights, and of held-out measurement."""

from __future__ import annotations

from typing import Any

import msgspec

from schemas import events as e
from tests.replay.mutations import Case, Log, changed, find, later, moved, of, renumbered, repeated, tampered, without


def gone_back(log: Log, version: int) -> Log:
    """A core that starts again after the first publication, and goes on from this version."""
    index = find(log, of("weights.exposed"))
    data = e.CheckpointRestored(version=version, log_sequence=0)
    began = msgspec.structs.replace(log[index], kind="checkpoint.restored", seq=-1, id="restored", data=data)
    return renumbered([*log[: index + 1], began, *log[index + 1 :]])


def trained_by_a_stranger(log: Log) -> Log:
    return changed(changed(log, of("micro-step.claimed"), cell="cell-9"), of("micro-step.done"), cell="cell-9")


def not_streaming(config: Any) -> Any:
    return tampered(config, scheduler=tampered(config.scheduler, streaming=False))


MUTATIONS: dict[str, list[Case]] = {
    "batch_order": [
        (lambda log: changed(log, of("batch.opened"), 1, step=3), None, "step 3 on version 1 follows step 1"),
        (lambda log: changed(log, of("batch.opened"), final=True), None, "is final as step 1 of 2"),
        (lambda log: changed(log, of("batch.stepped"), version=2), None, "made version 2 in step 1"),
        (lambda log: without(log, moved("train", "completed")), None, "opened without the core"),
    ],
    "bursts": [
        (lambda log: changed(log, of("burst.opened"), 1, first_step=2), None, "expected (2, 2, 3, 2)"),
        (lambda log: without(log, of("weights.published")), None, "before"),
        (lambda log: without(log, of("batch.stepped")), None, "ended after 1 steps"),
    ],
    "burst_whole": [
        (lambda log: changed(log, of("run.started"), config=not_streaming), None, "claimed when"),
    ],
    "join_closed": [
        (lambda log: without(log, of("batch.stream-closed")), None, "closed before the stream"),
        (lambda log: without(log, of("micro-step.done")), None, "micro-steps done"),
        (lambda log: changed(log, of("batch.join-closed"), epochs=[9]), None, "members"),
        (lambda log: without(log, moved("train", "completed")), None, "is on its way into training"),
    ],
    "claims": [
        (lambda log: repeated(log, of("micro-step.claimed")), None, "holds it"),
        (lambda log: changed(log, of("micro-step.claimed"), epoch=0), None, "the claim says 0"),
        (lambda log: changed(log, of("micro-step.done"), cell="cell-2"), None, "done by cell-2"),
        (lambda log: changed(log, of("micro-step.claimed"), _causation=1), None, "the claim answers 1"),
        (lambda log: repeated(log, of("micro-step.done")), None, "done twice"),
    ],
    "step_is_B_groups": [
        (lambda log: changed(log, of("batch.stream-closed"), groups=lambda old: old[1:]), None, "after 1 groups of 2"),
        (lambda log: repeated(log, of("group.consumed")), None, "already"),
        (lambda log: without(log, of("group.consumed")), None, "1 groups consumed of 2"),
        (lambda log: changed(log, of("group.claimed"), batch="b-000002"), None, "not those that it claimed"),
    ],
    "targets_once": [
        (lambda log: without(log, of("micro-step.done")), None, "counts 0 times"),
        (lambda log: changed(log, of("micro-step.enqueued"), rows=lambda old: [*old, old[0]]), None, "is in m-"),
        (
            lambda log: changed(log, of("micro-step.enqueued"), rows=lambda old: [tampered(old[0], draw=9), *old[1:]]),
            None,
            "was never admitted",
        ),
        (
            lambda log: changed(
                log, of("micro-step.enqueued"), rows=lambda old: [tampered(old[0], targets=0), *old[1:]]
            ),
            None,
            "is not as admitted",
        ),
    ],
    "nothing_lost": [
        (lambda log: changed(log, of("micro-step.enqueued"), rows=lambda old: old[1:]), None, "not packed: draw 0"),
        (lambda log: without(log, of("micro-step.enqueued")), None, "not packed"),
        (lambda log: changed(log, of("batch.stepped"), targets=0), None, "counts micro-steps"),
        (lambda log: changed(log, of("batch.stepped"), members=["cell-2"]), None, "stepped by cell-2"),
        (trained_by_a_stranger, None, "cell-9 trained for it"),
    ],
    "durable_before_published": [
        (lambda log: without(log, of("checkpoint.saved")), None, "version 1 is not durable"),
        (lambda log: later(log, of("checkpoint.saved"), of("batch.stepped")), None, "version 1 is not durable"),
        (lambda log: gone_back(log, 1), None, "version 1 restored; 2 was exposed, 2 stepped"),
        (lambda log: gone_back(log, 3), None, "version 3 restored; 2 was exposed, 2 stepped"),
    ],
    "weights_in_order": [
        (lambda log: changed(log, of("weights.exposed"), version=1), None, "is no burst's last"),
        (lambda log: changed(log, of("weights.exposed"), version=9), None, "was never stepped"),
        (lambda log: without(log, of("weights.exposed")), None, "was not exposed for engines"),
    ],
    "held_out_measured": [
        (lambda log: changed(log, of("measurement.closed"), mean=9.0), None, "mean 9.0"),
        (lambda log: changed(log, of("measurement.closed"), valid=9), None, "its counts"),
        (lambda log: without(log, of("measurement.closed"), -1), None, "was open when the run was finished"),
        (lambda log: changed(log, of("execution.dispatched", group=""), task="task-0"), None, "is not a held-out task"),
        (lambda log: without(log, of("execution.dispatched", group="")), None, "not those that were dispatched"),
        (lambda log: without(log, of("measurement.opened")), None, "before version 0 was measured"),
    ],
    "held_out_apart": [
        (
            lambda log: changed(log, of("group.dispatched"), -1, executions=lambda old: ["e-h000000.00", *old[1:]]),
            None,
            "holds e-h000000.00, which is held out",
        ),
        (
            lambda log: changed(log, of("execution.dispatched", group=""), group="g-000000"),
            None,
            "of group 'g-000000', measurement 'h-000000'",
        ),
    ],
}
