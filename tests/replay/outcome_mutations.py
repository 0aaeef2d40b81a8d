"""What breaks the laws of attempts, outcomes and evaluations, of groups and of admission."""

from __future__ import annotations

from typing import Any

from schemas.envelope import Event
from schemas.units import Counters
from tests.replay.good_runs import OVERSAMPLED, run
from tests.replay.mutations import Case, Log, after_its, changed, of, repeated, tampered, trained, without


def surplus_of(event: Event) -> bool:
    return event.kind == "group.ready" and bool(event.data.surplus)


def oversampled(where: Any, number: int = 0, **values: Any) -> Any:
    """A run in which more than N are dispatched, with one event changed."""
    return lambda log: changed(list(run(OVERSAMPLED, 0)[0]), where, number, **values)


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


MUTATIONS: dict[str, list[Case]] = {
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
        (
            oversampled(of("execution.settled", reason="surplus"), -1, reason="completed"),
            None,
            "settled for 'completed'",
        ),
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
}
