"""Two runs side by side: where they part is the first decision that only one of them took."""

from __future__ import annotations

import msgspec
import pytest

from replay.debugging.difference import FIGURES, compare_runs
from replay.debugging.moments import Walk
from replay.simulator.account import US_PER_H
from schemas.envelope import Event
from tests.replay.recorded import altered, recorded

CONFIG = {"cells__count": 4, "cells__trainable": 3}


@pytest.fixture(scope="module")
def events() -> list[Event]:
    return recorded(seed=2, **CONFIG)


def decisions(events: list[Event]) -> list[Event]:
    return [moment.event for moment in Walk(events) if moment.cause is not None]


def test_a_run_and_itself(events: list[Event]) -> None:
    found = compare_runs(events, events)
    assert found.parting is None and found.config == [] and found.a == found.b
    assert found.decisions == len(decisions(events))


def test_the_same_at_another_time_of_the_day_does_not_part(events: list[Event]) -> None:
    later = []
    for each in events:
        data = each.data
        if each.kind == "timer.set":
            data = msgspec.structs.replace(data, due_us=data.due_us + 777)
        later.append(msgspec.structs.replace(each, time_us=each.time_us + 777, data=data))
    found = compare_runs(events, later)
    assert found.parting is None and found.a.steps_s == found.b.steps_s


def test_a_decision_that_was_changed_is_where_they_part(events: list[Event]) -> None:
    placed = [each for each in events if each.kind == "execution.placed"][7]
    other = altered(events, placed.seq, epoch=placed.data.epoch + 3)
    found = compare_runs(events, other)
    parting = found.parting
    assert parting is not None and parting.a is not None and parting.b is not None
    assert [parting.a.decision.seq, parting.b.decision.seq] == [placed.seq, placed.seq]
    assert parting.a.input.seq == placed.causation
    assert [(each.path, each.expected, each.actual) for each in parting.decision] == [
        ("epoch", placed.data.epoch, placed.data.epoch + 3)
    ]
    assert parting.index == found.decisions == [each.seq for each in decisions(events)].index(placed.seq)
    before = next(m for m in Walk(events) if m.event.seq == placed.seq - 1)
    assert parting.a.before["a"] == before.state.a and parting.a.before == parting.b.before


def test_numbers_of_checks_alone_are_no_parting(events: list[Event]) -> None:
    placed = next(each for each in events if each.kind == "execution.placed")
    reason = [msgspec.structs.replace(each, right=each.right + 1) for each in placed.data.reason]
    assert compare_runs(events, altered(events, placed.seq, reason=reason)).parting is None


def test_a_log_that_ends_earlier(events: list[Event]) -> None:
    half = events[: len(events) // 2]
    found = compare_runs(events, half)
    assert found.parting is not None and found.parting.b is None and found.parting.a is not None
    assert found.a.finished and not found.b.finished
    assert found.decisions == len(decisions(half))


def test_another_configuration(events: list[Event]) -> None:
    found = compare_runs(events, recorded(seed=2, scheduler__rho_min=1.0, **CONFIG))
    assert [each.path for each in found.config if "rho_min" in each.path] == ["scheduler.rho_min"]
    assert found.parting is not None and found.parting.index > 0


def test_figures_are_those_of_the_events(events: list[Event]) -> None:
    side = compare_runs(events, events).a
    assert list(side.figures) == list(FIGURES)
    stepped = [each for each in events if each.kind == "batch.stepped"]
    assert side.figures["steps"] == len({each.data.step for each in stepped}) == len(side.steps_s)
    assert side.steps_s[1] == (stepped[0].time_us - events[0].time_us) / 1e6
    consumed = [each.data.staleness for each in events if each.kind == "group.consumed"]
    assert side.figures["staleness_mean"] == sum(consumed) / len(consumed)
    dispatched = sum(each.kind == "execution.dispatched" and not each.data.measurement for each in events)
    assert side.figures["executions"] == dispatched
    assert side.figures["hours"] == (events[-1].time_us - events[0].time_us) / US_PER_H


def test_a_step_that_was_undone_is_made_when_it_is_made_again() -> None:
    events = recorded(seed=1, restore=0.3, **CONFIG)
    undone = 0
    for restored in [each for each in events if each.kind == "checkpoint.restored"]:
        gone = {
            each.data.step
            for each in events
            if each.kind == "batch.stepped" and each.seq < restored.seq and each.data.version > restored.data.version
        }
        side = compare_runs(events, events).a
        at_s = (restored.time_us - events[0].time_us) / 1e6
        assert all(side.steps_s[step] > at_s for step in gone)
        undone += len(gone)
    assert undone


def test_idle_cell_hours_are_counted_over_the_time_between_events(events: list[Event]) -> None:
    moving = training = 0.0
    before: tuple[int, int, int] | None = None
    for moment in Walk(events):
        if before is not None:
            passed = max(0, moment.event.time_us - before[0])
            moving += before[1] * passed
            training += before[2] * passed
        places = [cell.place for cell in moment.state.cells.values()]
        now_us = max(moment.event.time_us, before[0] if before is not None else 0)
        before = (now_us, sum(each in ("leaving", "returning") for each in places), places.count("training"))
    figures = compare_runs(events, events).a.figures
    assert figures["moving_cell_hours"] == pytest.approx(moving / US_PER_H)
    worked = sum(each.data.seconds for each in events if each.kind == "micro-step.done")
    assert figures["waiting_cell_hours"] == pytest.approx(max(0.0, training / US_PER_H - worked / 3600))
    parts = ("empty_slot_cell_hours", "waiting_cell_hours", "moving_cell_hours")
    assert figures["idle_cell_hours"] == pytest.approx(sum(figures[name] or 0.0 for name in parts))
