"""Every invariant: silent over runs in which nothing goes wrong, loud over the smallest change that it is about."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from replay.checker import Checker, Report, check
from replay.invariants import ALL, Evidence, markdown
from replay.invariants.recorded import attempt_of
from schemas.errors import ConfigError
from schemas.records import Closed
from services.mesh.tree_codec import encode_record
from tests.replay import outcome_mutations, record_mutations, scheduling_mutations, training_mutations
from tests.replay.good_runs import SHAPES, good, run
from tests.replay.mutations import changed, find, moved, of, renumbered, with_evidence

MUTATIONS = {
    **scheduling_mutations.MUTATIONS,
    **outcome_mutations.MUTATIONS,
    **training_mutations.MUTATIONS,
    **record_mutations.MUTATIONS,
}


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


def closed_at_the_end(evidence: Evidence) -> Evidence:
    """As several proxies write it: every attempt closed after its last record."""
    assert evidence.records is not None
    ends = {attempt_of(each): each for each in evidence.records}
    closed = [
        msgspec.structs.replace(each, seq=10**6 + number, data=encode_record(Closed(execution=name, attempt=attempt)))
        for number, ((name, attempt), each) in enumerate(ends.items())
    ]
    return with_evidence(evidence, records=[*evidence.records, *closed])


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
