"""What breaks the laws of the ledger, of placement, of role transitions and of their reasons."""

from __future__ import annotations

import msgspec

from schemas import events as e
from schemas.envelope import Event
from tests.replay.mutations import (
    Case,
    Log,
    after_its,
    changed,
    find,
    later,
    moved,
    of,
    raised,
    renumbered,
    repeated,
    tampered,
    without,
)


def fewer_executions(log: Log) -> Log:
    index = find(log, of("group.dispatched"))
    gone = log[index].data.executions[0]
    return renumbered([event for event in log if event.entity != gone or event.kind != "execution.dispatched"])


def no_end_before_the_first_transition(log: Log) -> Log:
    first = find(log, moved("train", "decided"))
    return renumbered([event for event in log if event.kind != "execution.finished" or event.seq > first])


def paused(beside: Event) -> Event:
    return msgspec.structs.replace(beside, kind="run.paused", id="pause", seq=-1, data=e.RunPaused(by="test"))


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
        (
            lambda log: changed(log, of("batch.opened"), reason=[]),
            None,
            "carries no checks, expected steps of the burst",
        ),
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
}
