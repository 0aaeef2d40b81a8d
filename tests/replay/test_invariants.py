"""Every invariant: silent over runs in which nothing goes wrong, loud over the smallest change that it is about."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from replay.checker import Checker, Report, check
from replay.invariants import ALL, Evidence, Served, markdown
from replay.invariants.recorded import attempt_of
from schemas import events as e
from schemas.envelope import Event
from schemas.errors import ConfigError
from schemas.records import Closed
from schemas.units import Counters
from services.mesh.tree_codec import decode_record, encode_record
from tests.replay.mesh import Mesh
from tests.replay.mutations import Case, Log, changed, find, later, of, renumbered, repeated, with_evidence, without

ENDS: Any = ("completed", "completed", "failed", "harness_timeout", "overall_timeout", "total_failure")
SHAPES: list[dict[str, Any]] = [
    {},
    {"lose": 0.1, "cells__trainable": 1},
    {"fail": 0.3, "reasons": ENDS},
    {"restart": 0.3, "cells__capacity": 9},
    {"reasons": ENDS[3:], "fail": 0.3, "scheduler__phi": 1.0},
    {"cells__capacity": 14, "lose": 0.05, "restart": 0.1, "reasons": ENDS},
    {"scheduler__mu": 1, "scheduler__B": 3, "scheduler__phi": 1.0, "cells__capacity": 9},
    {"scheduler__mu": 3, "cells__capacity": 12, "lose": 0.1, "steps": 6},
    {"scheduler__phi": 0.0, "cells__capacity": 14, "reasons": (*ENDS[3:], "overall_timeout")},
    {"scheduler__oversample": 2, "lose": 0.1, "fail": 0.1},
    {"scheduler__oversample": 1, "reasons": ENDS, "cells__capacity": 9, "restart": 0.1},
]
OVERSAMPLED = 9
"""Shape in which more than N are dispatched."""


@cache
def run(shape: int, seed: int) -> tuple[tuple[Event, ...], Evidence]:
    mesh = Mesh(seed=seed, **SHAPES[shape])
    log = tuple(mesh.run())
    rows = {"groups": [(group, 1) for group in sorted({event.entity for event in log if event.kind == "group.ready"})]}
    return log, msgspec.structs.replace(mesh.evidence, tables=lambda: rows, rebuilt=lambda: rows)


def good() -> Log:
    return list(run(0, 0)[0])


def oversampled(where: Any, number: int = 0, **values: Any) -> Any:
    """A run in which more than N are dispatched, with one event changed."""
    return lambda log: changed(list(run(OVERSAMPLED, 0)[0]), where, number, **values)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_nothing_is_said_of_a_run_in_which_nothing_goes_wrong(shape: int, seed: int) -> None:
    log, evidence = run(shape, seed)
    report = check(log, evidence=evidence)
    assert report.violations == []
    assert [each.invariant for each in report.checked if each.skipped] == []
    assert [each.invariant for each in report.checked] == list(ALL)


@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_nothing_is_said_of_a_log_that_ends_anywhere(shape: int) -> None:
    log, _ = run(shape, 0)
    names = [name for name in ALL if name != "replays"]
    for end in range(shape, len(log), 31):
        assert check(log[:end], only=names).violations == []
    assert check(log[: len(log) // 2], only=["replays"]).violations == []


def test_runs_hold_everything_that_is_to_be_looked_at() -> None:
    """So that silence means something: the runs above have lost attempts, discards, moves, releases, several members."""
    logs = [event for shape in range(len(SHAPES)) for seed in range(3) for event in run(shape, seed)[0]]
    kinds = {event.kind for event in logs}
    assert {"execution.lost", "group.discarded", "route.moved", "micro-step.released", "evaluation.failed"} <= kinds
    assert any(event.kind == "batch.stepped" and len(event.data.members) > 1 for event in logs)
    assert any(event.kind == "burst.ended" and event.data.core_stays for event in logs)
    ready = [event.data for event in logs if event.kind == "group.ready" and event.data.surplus]
    cancelled = [event.entity for event in logs if event.kind == "execution.cancelled"]
    assert ready and len(cancelled) < sum(len(each.surplus) for each in ready), "some had finished, some had not"
    reasons = {event.data.reason for event in logs if event.kind == "group.dispatched"}
    assert reasons == {"initial", "boundary", "replacement", "refill"}


def surplus_of(event: Event) -> bool:
    return event.kind == "group.ready" and bool(event.data.surplus)


def moved(target: str, phase: str) -> Any:
    return of("cell.role-transition", target=target, phase=phase)


def fewer_executions(log: Log) -> Log:
    index = find(log, of("group.dispatched"))
    gone = log[index].data.executions[0]
    return renumbered([event for event in log if event.entity != gone or event.kind != "execution.dispatched"])


def trained(kind: str) -> Any:
    """Events of a kind about executions that aren't held out."""
    return lambda event: event.kind == kind and not event.entity.startswith("e-h")


def after_its(log: Log, kind: str, behind: str) -> Log:
    """The first event of the kind about a training execution moves behind the other kind's of the same."""

    entity = log[find(log, trained(kind))].entity
    return later(log, trained(kind), lambda event: event.kind == behind and event.entity == entity)


def no_end_before_the_first_transition(log: Log) -> Log:
    first = find(log, moved("train", "decided"))
    return renumbered([event for event in log if event.kind != "execution.finished" or event.seq > first])


def of_group(name: str) -> Any:
    return lambda event: event.kind == "group.dispatched" and event.entity == name


def claimed_too_early(log: Log) -> Log:
    """A group that was claimed while two others could be is younger than they are."""
    there: dict[str, int] = {}
    for event in log:
        if event.kind == "group.materialized":
            there[event.entity] = event.seq
        elif event.kind == "group.claimed":
            del there[event.entity]
            if sum(seq <= event.causation for seq in there.values()) > 1:
                return changed(log, of_group(event.entity), version=9)
    raise AssertionError("nothing is ever left behind")


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


def raised(amount: int) -> Any:
    return lambda value: value + amount


def other_records(**values: Any) -> Any:
    """The last record of RECORDS with fields changed."""

    def change(evidence: Evidence) -> Evidence:
        assert evidence.records is not None
        *rest, last = evidence.records
        data = encode_record(msgspec.structs.replace(decode_record(last.data), **values))
        return with_evidence(evidence, records=[*rest, msgspec.structs.replace(last, data=data)])

    return change


def closed_too_soon(evidence: Evidence) -> Evidence:
    """The last record's attempt was closed before it."""
    assert evidence.records is not None
    *rest, last = evidence.records
    record = decode_record(last.data)
    closed = encode_record(Closed(execution=record.execution, attempt=record.attempt))
    return with_evidence(evidence, records=[*rest, msgspec.structs.replace(last, data=closed), last])


def closed_at_the_end(evidence: Evidence) -> Evidence:
    """As several proxies write it: every attempt closed after its last record."""
    assert evidence.records is not None
    ends = {attempt_of(each): each for each in evidence.records}
    closed = [
        msgspec.structs.replace(each, seq=10**6 + number, data=encode_record(Closed(execution=name, attempt=attempt)))
        for number, ((name, attempt), each) in enumerate(ends.items())
    ]
    return with_evidence(evidence, records=[*evidence.records, *closed])


def one_record_more(evidence: Evidence) -> Evidence:
    assert evidence.records is not None
    last = evidence.records[-1]
    return with_evidence(evidence, records=[*evidence.records, msgspec.structs.replace(last, seq=last.seq + 1)])


def other_call(**values: Any) -> Any:
    def change(evidence: Evidence) -> Evidence:
        assert evidence.calls is not None
        first, *rest = evidence.calls
        return with_evidence(evidence, calls=[first, *rest, msgspec.structs.replace(first, **values)])

    return change


MUTATIONS: dict[str, list[Case]] = {
    "said_once": [
        (
            lambda log: repeated(log, of("micro-step.done"), _id=log[find(log, of("micro-step.done"))].id),
            None,
            "occurs twice",
        ),
        (lambda log: repeated(log, of("run.started")), None, "run.started was said before"),
    ],
    "decisions": [
        (lambda log: changed(log, of("execution.placed"), 3, _id="fresh"), None, "has the id fresh"),
        (lambda log: repeated(log, of("execution.placed")), None, "answers"),
        (lambda log: without(log, of("execution.dispatched"), 2), None, "is r-test.scheduler"),
    ],
    "causes": [(lambda log: changed(log, of("execution.started"), _causation=9999), None, "has the cause 9999")],
    "timers": [
        (lambda log: without(log, of("timer.set")), None, "was never set"),
        (lambda log: repeated(log, of("timer.fired")), None, "fired twice"),
    ],
    "ledger": [
        (fewer_executions, None, "was never dispatched"),
        (lambda log: after_its(log, "execution.started", "execution.finished"), None, "started after it had finished"),
    ],
    "boundary_dispatch": [
        (
            lambda log: changed(log, of("group.dispatched", reason="boundary"), reason="initial"),
            None,
            "too few boundary",
        ),
        (
            lambda log: changed(log, of("group.dispatched", reason="boundary"), reason="refill"),
            None,
            "was not discarded",
        ),
        (lambda log: changed(log, of("group.dispatched"), -1, version=0), None, "dispatched at version 0"),
        (lambda log: changed(log, of("group.dispatched"), executions=lambda old: old[1:]), None, "3 executions, not 4"),
    ],
    "waterlevel": [
        (lambda log: changed(log, of("burst.opened"), 1, _causation=1), None, "w rose to"),
    ],
    "queue_depth": [
        (lambda log: without(log, of("group.dispatched", reason="boundary")), None, "groups hold a slot"),
    ],
    "staleness": [
        (lambda log: changed(log, of("group.consumed"), staleness=raised(1)), None, "mean staleness"),
    ],
    "staleness_said": [
        (lambda log: changed(log, of("group.consumed"), staleness=7), None, "versions (0, 0), staleness 7"),
        (lambda log: changed(log, of("group.consumed"), -1, version_dispatched=raised(-1)), None, "the log says"),
    ],
    "capacity": [
        (lambda log: changed(log, of("cell.joined"), capacity=1), None, "holds 2 of 1"),
        (lambda log: changed(log, of("execution.placed"), cell="cell-9"), None, "is not in the rollout role"),
    ],
    "start_rule": [
        (lambda log: without(log, of("execution.placed"), 5), None, "could start on"),
        (lambda log: changed(log, of("cell.joined"), -1, capacity=0), None, "of C_R free"),
    ],
    "routes_to_serving": [
        (lambda log: changed(log, of("execution.placed"), -1, epoch=raised(1)), None, "said is"),
        (lambda log: changed(log, of("execution.placed"), cell="cell-7"), None, "it never joined"),
        (lambda log: changed(log, of("weights.published"), version=0), None, "holds version 0"),
    ],
    "paused": [
        (
            lambda log: renumbered([log[0], paused(log[0]), *log[1:]]),
            None,
            "placed while the run is paused",
        ),
        (lambda log: later(log, of("execution.placed"), of("run.finished"), -1), None, "after the run was over"),
    ],
    "transitions_serial": [
        (lambda log: without(log, moved("train", "completed")), None, "is in transition"),
    ],
    "training_prefix": [
        (lambda log: changed(log, of("burst.ended"), stays=["cell-1"]), None, "no prefix of"),
        (lambda log: changed(log, moved("train", "decided"), _entity="cell-2"), None, "no prefix"),
        (lambda log: without(log, of("burst.ended")), None, "returns before the burst's end"),
    ],
    "transition_phases": [
        (lambda log: without(log, moved("train", "drained")), None, "released by rollout, expected drained"),
        (lambda log: changed(log, moved("rollout", "acquired"), -1, version=0), None, "acquired version 0"),
    ],
    "epochs": [
        (lambda log: changed(log, moved("train", "decided"), epoch=0), None, "decided at epoch 0, expected 1"),
        (lambda log: changed(log, moved("train", "released"), epoch=7), None, "released at epoch 7"),
    ],
    "waterlevel_gate": [
        (no_end_before_the_first_transition, None, "C_R - C_e"),
    ],
    "supply_gate": [
        (lambda log: without(log, of("timer.fired")), None, "did not hold for tau"),
        (lambda log: changed(log, of("timer.set"), due_us=raised(-1)), None, "is another time"),
    ],
    "core_retention": [
        (lambda log: changed(log, of("burst.ended"), stays=lambda old: [] if old else ["cell-0"]), None, "the core"),
    ],
    "reasons": [
        (
            lambda log: changed(
                log, moved("train", "decided"), reason=lambda old: [tampered(old[0], left=0), *old[1:]]
            ),
            None,
            "waterlevel (2): 0 and",
        ),
        (
            lambda log: changed(log, of("execution.placed"), reason=lambda old: [tampered(old[0], holds=False)]),
            None,
            "is said to be False",
        ),
        (
            lambda log: changed(log, of("cell.held"), reason=lambda old: [each for each in old if each.holds]),
            None,
            "every check holds",
        ),
        (
            lambda log: changed(log, of("batch.join-closed"), reason=lambda old: [tampered(old[0], left=9), *old[1:]]),
            None,
            "micro-steps done: 9 and",
        ),
        (
            lambda log: changed(log, of("group.dispatched"), 1, checks=lambda old: [tampered(old[0], left=0)]),
            None,
            "initial dispatch (phi + mu) B: 0 and 5, the log says 1 and 5",
        ),
        (lambda log: changed(log, of("batch.opened"), reason=[]), None, "carries no checks, expected steps of the burst"),
        (lambda log: changed(log, of("route.moved"), reason="lost"), None, "is left for lost, expected transition"),
        (
            lambda log: changed(log, of("route.moved"), checks=lambda old: [tampered(old[0], left=3)]),
            None,
            "target has room: 3 and",
        ),
        (
            lambda log: changed(log, of("burst.ended"), -1, reason=lambda old: [each for each in old if each.holds]),
            None,
            "nobody stays, and the checks say otherwise",
        ),
        (lambda log: changed(log, of("run.started"), flags=[]), None, "expected none"),
    ],
    "attempts": [
        (lambda log: changed(log, of("execution.placed"), attempt=1), None, "attempt 1 placed after -1"),
        (lambda log: changed(log, of("execution.sealed"), attempt=1), None, "sealed attempt 1, attempt 0 finished"),
        (
            lambda log: changed(
                log, of("group.materialized"), rows=lambda old: [tampered(old[0], attempt=1), *old[1:]]
            ),
            None,
            "is of attempt 1, attempt 0 finished",
        ),
    ],
    "life_cycle": [
        (lambda log: without(log, of("execution.placed")), None, "before it was placed"),
        (lambda log: after_its(log, "execution.sealed", "execution.tree-frozen"), None, "frozen before it was sealed"),
        (lambda log: without(log, of("execution.sealed")), None, "finished and never sealed"),
    ],
    "one_outcome": [
        (lambda log: without(log, trained("execution.settled")), None, "has no outcome yet"),
        (lambda log: repeated(log, of("execution.settled")), None, "settled twice"),
        (
            lambda log: changed(log, of("group.ready"), rewards=lambda old: [tampered(old[0], reward=9.0), *old[1:]]),
            None,
            "has valid 9.0",
        ),
        (lambda log: changed(log, of("group.ready"), rewards=lambda old: old[1:]), None, "not one for each"),
    ],
    "outcome_rule": [
        (lambda log: changed(log, of("evaluation.scored"), score=0.25), None, "expected valid 0.25"),
        (
            lambda log: changed(log, trained("execution.finished"), reason="overall_timeout"),
            None,
            "expected excluded 0",
        ),
        (
            lambda log: changed(log, trained("execution.finished"), reason="total_failure"),
            None,
            "expected placeholder 0",
        ),
        (lambda log: changed(log, of("execution.settled"), evaluation="v-1"), None, "names the evaluation"),
    ],
    "evaluations": [
        (lambda log: without(log, of("evaluation.claimed")), None, "nobody had claimed it"),
        (lambda log: repeated(log, of("evaluation.claimed")), None, "claimed after it was answered"),
        (
            lambda log: changed(log, of("evaluation.claimed"), _causation=0),
            None,
            "the claim answers 0, the request is at",
        ),
        (lambda log: changed(log, of("evaluation.claimed"), evaluator="another"), None, "claimed by another"),
        (lambda log: repeated(log, of("evaluation.scored")), None, "answered twice in the same way"),
        (lambda log: changed(log, of("evaluation.requested"), tries=2), None, "try 2 follows try 0"),
    ],
    "harness_errors": [
        (
            lambda log: changed(log, of("execution.finished"), counters=Counters(harness_errors=2)),
            None,
            "2 harness errors",
        ),
    ],
    "groups": [
        (lambda log: without(log, of("group.materialized")), None, "claimed, and it was ready"),
        (
            lambda log: [event for event in log if event.entity != "g-000000" or event.kind == "group.dispatched"],
            None,
            "it was never closed",
        ),
        (lambda log: changed(log, of("group.claimed"), batch="b-000099"), None, "which is not open"),
    ],
    "oldest_first": [(claimed_too_early, None, "claimed with version 9, and")],
    "oversampling": [
        (
            oversampled(surplus_of, rewards=lambda old: old[1:]),
            None,
            "3 rewards of 4 valid ones in the baseline, expected 4",
        ),
        (oversampled(of("execution.cancelled"), _causation=1), None, "was cancelled by another event"),
        (oversampled(of("execution.cancelled"), checks=[]), None, "its check is not that 4 of N = 4 are valid"),
        (oversampled(surplus_of, -1, surplus=[]), None, "is cancelled, 4 of N = 4 are valid"),
        (oversampled(of("execution.settled", reason="surplus"), reason="completed"), None, "and was not given up"),
        (oversampled(of("execution.settled", reason="surplus"), -1, reason="completed"), None, "settled for 'completed'"),
    ],
    "advantages": [
        (
            lambda log: changed(
                log, of("group.ready"), rewards=lambda old: [tampered(old[0], advantage=9.0), *old[1:]]
            ),
            None,
            "advantages sum to",
        ),
        (lambda log: changed(log, of("group.ready"), mean=9.0), None, "mean 9"),
        (
            lambda log: changed(log, of("group.ready"), rewards=lambda old: old[:1]),
            None,
            "1 rewards in the baseline",
        ),
    ],
    "rows_disjoint": [
        (
            lambda log: changed(log, of("group.materialized"), rows=lambda old: [*old, tampered(old[0], draw=1)]),
            None,
            "is in draws 0 and 1",
        ),
    ],
    "admission": [
        (lambda log: changed(log, of("group.materialized"), rows=lambda old: old[:-1]), None, "J_max is 5"),
        (
            lambda log: changed(
                log, of("group.materialized"), rows=lambda old: [tampered(old[0], targets=99), *old[1:]]
            ),
            None,
            "is not the unmasked part of its path",
        ),
        (lambda log: changed(log, trained("execution.settled"), outcome="excluded"), None, "rows and no valid reward"),
    ],
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
    "seals": [
        (lambda log: changed(log, of("execution.sealed"), records=raised(1)), None, "RECORDS has"),
        (lambda log: changed(log, of("execution.sealed"), digest="x"), None, "the digest is not that"),
        (None, one_record_more, "RECORDS has"),
    ],
    "records_whole": [
        (None, one_record_more, "number"),
        (None, closed_too_soon, "stored after the attempt was closed"),
        (None, other_records(parent="c-0"), "its parent c-0 is not recorded"),
        (None, other_records(logprobs=[]), "log-probabilities"),
        (None, other_records(versions=[]), "versions do not cover"),
    ],
    "trees_recorded": [
        (None, other_records(input_ids=[1]), "that are not its"),
        (None, other_records(delivered=False), "that are not its"),
        (lambda log: changed(log, of("execution.tree-frozen"), blob=""), None, "not what was sealed"),
    ],
    "calls_answered": [
        (lambda log: log[: find(log, of("execution.finished"))], other_call(answered=False), "left without an answer"),
    ],
    "answers_recorded": [
        (None, other_call(records=0), "was answered before its record"),
        (None, other_call(request="msg_x"), "is not in RECORDS"),
        (None, other_call(answer="b"), "two different answers"),
    ],
    "gate_holds": [
        (
            None,
            lambda evidence: with_evidence(evidence, served=[Served(cell="cell-0", epoch=0, log=10**6)]),
            "took a call of epoch 0 after it drained at 1",
        ),
    ],
    "projections": [
        (None, lambda evidence: with_evidence(evidence, rebuilt=lambda: {"groups": []}), "0 after a rebuild"),
    ],
    "replays": [
        (lambda log: changed(log, of("execution.placed"), 7, reason=[]), None, "scheduler, decision"),
        (lambda log: log[: find(log, of("burst.ended"), -1)], None, "decisions are missing"),
    ],
}


def tampered(value: Any, **values: Any) -> Any:
    return msgspec.structs.replace(value, **values)


def paused(beside: Event) -> Event:
    return msgspec.structs.replace(beside, kind="run.paused", id="pause", seq=-1, data=e.RunPaused(by="test"))


def test_every_invariant_has_a_mutation() -> None:
    assert list(MUTATIONS) == list(ALL)


@pytest.mark.parametrize(
    ("name", "number"), [(name, number) for name, cases in MUTATIONS.items() for number in range(len(cases))]
)
def test_what_breaks_a_law_is_named(name: str, number: int) -> None:
    change_log, change_evidence, said = MUTATIONS[name][number]
    log, evidence = run(0, 0)
    wrong = change_log(list(log)) if change_log else log
    report = check(wrong, only=[name], evidence=change_evidence(evidence) if change_evidence else evidence)
    assert report.violations, "nothing was said"
    assert any(said in each.what for each in report.violations), report.violations
    assert {each.invariant for each in report.violations} == {name}


def test_violations_are_there_as_soon_as_they_can_be_known() -> None:
    wrong = changed(good(), of("execution.placed"), cell="cell-7")
    checker = Checker(only=["routes_to_serving"])
    place = find(wrong, of("execution.placed"))
    for event in wrong[: place + 1]:
        checker.see(event)
    assert [each.seq for each in checker.violations] == [place + 1]


def test_attempts_that_were_closed_are_whole() -> None:
    names = ["seals", "records_whole", "trees_recorded"]
    assert check(good(), evidence=closed_at_the_end(run(0, 0)[1]), only=names).violations == []


def test_laws_of_records_are_skipped_without_them() -> None:
    report: Report = check(good(), only=["seals", "calls_answered", "projections"])
    assert [bool(each.skipped) for each in report.checked] == [True, True, True]


def test_an_engine_that_starts_again_while_its_cell_trains_serves_nothing_old() -> None:
    """It joins with the version it starts from, and serves when it has acquired the newest."""
    log = good()
    back = [index for index, event in enumerate(log) if moved("rollout", "decided")(event)][-1]
    joined = next(event for event in log if event.kind == "cell.joined" and event.entity == log[back].entity)
    again = msgspec.structs.replace(joined, id="again", data=msgspec.structs.replace(joined.data, version=0))
    assert check(renumbered([*log[: back + 1], again, *log[back + 1 :]]), only=["weights_in_order"]).violations == []
    served = max(index for index, event in enumerate(log) if event.kind == "weights.published")
    again = msgspec.structs.replace(again, entity=log[served].entity)
    [violation] = check(renumbered([*log[: served + 1], again]), only=["weights_in_order"]).violations
    assert "serves version 0 after" in violation.what


def test_events_of_a_later_version_are_passed_over() -> None:
    unknown = msgspec.structs.replace(good()[0], kind="cell.sang", seq=-1, id="x", data=msgspec.Raw(b"{}"))
    log = renumbered([*good()[:5], unknown, *good()[5:]])
    assert [each for each in check(log).violations if each.invariant not in ("decisions", "replays")] == []


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="choose from said_once"):
        check([], only=["nobody"])


def test_the_page_of_invariants_is_made_from_them() -> None:
    page = Path(__file__).parents[2] / "docs" / "invariants.md"
    assert markdown() in page.read_text()


@pytest.mark.parametrize("name", ALL)
def test_every_law_is_stated_with_its_source(name: str) -> None:
    assert ALL[name].law().endswith(".")
    assert ALL[name].source()
