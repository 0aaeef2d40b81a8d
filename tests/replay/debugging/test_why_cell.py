"""Why a cell was in its role: what is told agrees with the scheduler at every moment, and rests on cited events."""

from __future__ import annotations

import pytest

from replay.debugging.fields import role
from replay.debugging.moments import Walk, point
from replay.debugging.why_cell import WhyCell, why_cell
from schemas.envelope import Event
from schemas.errors import ConfigError
from services.scheduler.core.state import State
from tests.replay.recorded import first, recorded


@pytest.fixture(scope="module")
def events() -> list[Event]:
    return recorded(seed=3, lose=0.1, lose_cells=0.1, restore=0.1, cells__count=4, cells__trainable=3)


def why(events: list[Event], cell: str, event: Event) -> WhyCell:
    return why_cell(events, cell, point(str(event.seq)))


def transition(events: list[Event], target: str, phase: str, after: int = 0) -> Event:
    return next(
        each
        for each in events
        if each.kind == "cell.role-transition"
        and (each.data.target, each.data.phase) == (target, phase)
        and each.seq > after
    )


def test_a_cell_that_serves_is_held_back_by_what_the_scheduler_said(events: list[Event]) -> None:
    checked = 0
    for held in [each for each in events if each.kind == "cell.held"][:12]:
        found = why(events, held.entity, held)
        failing = [each for each in held.data.reason if not each.holds]
        told = [check for because in found.now for check in because.checks if not check.holds]
        assert found.role == "rollout" and {each.rule for each in told} == {each.rule for each in failing}
        for each in failing:
            assert each in told
        assert found.held[-1].cited.seq == held.seq and found.held[-1].seconds == 0
        assert any(cited.seq == held.seq for because in found.now for cited in because.cited)
        checked += 1
    assert checked


def test_a_cell_above_the_next_one_waits_for_it(events: list[Event]) -> None:
    held = first(events, "cell.held")
    assert held.entity == "cell-0"
    assert "cell-0 is next" in why(events, "cell-1", held).now[0].text


def test_a_cell_on_its_way_is_there_by_a_decision_with_its_checks(events: list[Event]) -> None:
    decided = transition(events, "train", "decided")
    found = why(events, decided.entity, decided)
    assert found.role == "leaving" and found.came[0].checks == decided.data.reason
    assert "it said decided last" in found.now[0].text
    assert found.held and all(each.seconds >= 0 for each in found.held)


def test_a_cell_that_trains_does_until_the_burst_is_over(events: list[Event]) -> None:
    completed = transition(events, "train", "completed")
    found = why(events, completed.entity, completed)
    assert found.role == "training"
    assert [each.seq for each in found.came][-1] == completed.seq
    assert "cells that train stay until its end" in found.now[-1].text
    ended = next(
        each for each in events if each.kind == "burst.ended" and not each.data.stays and each.seq > completed.seq
    )
    last = [each for each in events if each.kind == "batch.stepped" and each.seq < ended.seq][-1].data.members[-1]
    back = why(events, last, ended)
    assert back.role == "training" and "the burst ended" in back.now[0].text
    assert back.now[0].cited[0].seq == ended.seq and back.now[0].checks == ended.data.reason


def test_the_supply_timer_is_told(events: list[Event]) -> None:
    armed = next(each for each in Walk(events) if each.event.kind == "timer.set")
    found = why(events, "cell-0", armed.event)
    told = [each for each in found.now if "the supply has not held for tau yet" in each.text]
    assert told and not told[0].checks[0].holds
    assert armed.event.seq in [each.seq for each in told[0].cited]


def test_what_is_told_has_the_role_that_the_cell_had_at_every_moment(events: list[Event]) -> None:
    roles: dict[int, dict[str, str]] = {}
    for moment in Walk(events):
        roles[moment.event.seq] = {name: role(cell) for name, cell in moment.state.cells.items()}
    seen = set()
    for seq in range(40, len(events), 7):
        for cell, expected in roles[seq].items():
            found = why_cell(events, cell, point(str(seq)))
            assert found.role == expected and found.now and found.came, (seq, cell)
            assert all(each.seq <= len(events) for because in found.now for each in because.cited)
            seen.add(expected)
    assert seen >= {"rollout", "training", "leaving", "returning"}


def test_a_cell_that_went_down_says_what_happened(events: list[Event]) -> None:
    lost = next((m for m in Walk(events) if m.event.kind == "cell.lost" and _gone(m.state, m.event.entity)), None)
    assert lost is not None
    found = why(events, lost.event.entity, lost.event)
    assert "process does not answer" in found.now[0].text and found.now[0].cited[0].seq == lost.event.seq


def _gone(state: State, cell: str) -> bool:
    return role(state.cells[cell]) == "away"


def test_an_unknown_cell_is_refused_and_those_that_are_there_are_named(events: list[Event]) -> None:
    with pytest.raises(ConfigError, match=r"there is no cell-77 at sequence \d+\n  -> cells there: cell-0, cell-1"):
        why_cell(events, "cell-77")
    with pytest.raises(ConfigError, match="cells there: none yet"):
        why_cell(events, "cell-0", point("1"))


def test_at_the_end_of_a_run_nothing_keeps_it_but_the_end(events: list[Event]) -> None:
    assert why_cell(events, "cell-0").now[0].text == "the run is over"
