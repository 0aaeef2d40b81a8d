"""Faults do what they say: what follows from one of a kind is in the log, and nothing is violated."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from replay.fault import plan as p
from replay.fault.run import Outcome, simulate_plan
from replay.fault.setting import setting_of
from schemas.envelope import Event
from services.mesh.codec import decode
from services.mesh.decider import Driver
from services.mesh.service import Context
from services.packer import service as packer
from services.rollout import service as rollout
from services.rollout.service import RolloutCell

PAIRS = 1
"""A seed with more than one optimizer step a burst, and cells that take turns."""


def struck(seed: int, *faults: p.AnyFault) -> tuple[Outcome, list[Event]]:
    outcome = simulate_plan(p.Plan(seed=seed, faults=list(faults)))
    assert not outcome.violations
    assert len(outcome.struck) == len(faults)
    return outcome, [decode(stored) for stored in outcome.log]


def said_by(log: Sequence[Event], instance: str, kind: str) -> list[Event]:
    return [event for event in log if event.instance == instance and event.kind == kind]


def services() -> list[str]:
    return setting_of(PAIRS).instances()


@pytest.mark.parametrize("service", [name for name in services() if not name.endswith(("cell-1", "cell-2"))])
def test_a_service_that_is_told_to_stop_says_that_it_left_and_comes_again(service: str) -> None:
    at = p.Pin(kind="execution.finished", nth=20)
    _, log = struck(PAIRS, p.Stop(pin=at, service=service, steps=3, down_s=30.0))
    (left,) = said_by(log, service, "service.left")
    first, second = said_by(log, service, "service.joined")
    assert first.seq < left.seq < second.seq
    assert second.time_us - left.time_us >= 30e6


def test_one_that_decides_is_killed_in_the_midst_of_what_it_says() -> None:
    """An answer of the event bus takes its time, in which whoever waits for it can die."""
    at = p.Pin(kind="execution.dispatched", nth=2)
    _, log = struck(PAIRS, p.Crash(pin=at, service="scheduler", down_s=30.0))
    second, third = [event for event in log if event.kind == "execution.dispatched"][1:3]
    assert second.causation == third.causation, "decided on the same input"
    assert third.time_us - second.time_us >= 30e6
    (joined,) = said_by(log, "scheduler", "service.joined")[1:]
    assert second.seq < joined.seq < third.seq


@pytest.mark.parametrize("killed", [False, True], ids=["goes on", "killed"])
def test_a_cell_that_hangs_for_long_is_lost_and_joins_anew(killed: bool) -> None:
    at = p.Pin(kind="execution.started", nth=10)
    _, log = struck(PAIRS, p.Hung(pin=at, service="rollout-cell-1", seconds=7200.0, killed=killed))
    first, second = said_by(log, "rollout-cell-1", "service.joined")
    (lost,) = [event for event in log if event.kind == "cell.lost"]
    assert lost.entity == "cell-1" and lost.data.process == first.seq
    assert first.seq < lost.seq < second.seq
    assert any(event.kind == "route.moved" and event.causation == lost.seq for event in log)
    assert not said_by(log, "rollout-cell-1", "service.left")


def test_a_service_that_hangs_for_a_while_goes_on_as_if_nothing_had_been() -> None:
    at = p.Pin(kind="execution.started", nth=10)
    _, log = struck(PAIRS, p.Hung(pin=at, service="scheduler", seconds=1200.0))
    decided = [event.time_us for event in log if event.owner == "scheduler"]
    assert max(after - before for before, after in itertools.pairwise(decided)) >= 1200e6
    assert len(said_by(log, "scheduler", "service.joined")) == 1


@pytest.mark.parametrize("how", ["garbled", "gone", "swapped"])
def test_a_version_whose_checkpoint_is_damaged_is_made_again(how: str) -> None:
    at = p.Pin(kind="batch.stepped", nth=1, after_s=0.001)
    _, log = struck(PAIRS, p.DamagedCheckpoint(pin=at, how=how, seconds=3600.0))  # type: ignore[arg-type]
    (restored,) = [event for event in log if event.kind == "checkpoint.restored" and event.data.version == 0]
    made = [event.seq for event in log if event.kind == "batch.stepped" and event.data.version == 1]
    assert len(made) == 2 and made[0] < restored.seq < made[1]


def test_a_core_whose_published_version_is_damaged_waits_for_a_copy() -> None:
    at = p.Pin(kind="weights.published", nth=1)
    outcome, log = struck(PAIRS, p.DamagedCheckpoint(pin=at, seconds=600.0))
    struck_us = next(event.time_us for event in log if event.seq == outcome.struck[0].seq)
    again = said_by(log, "trainer-cell-0", "service.joined")[1]
    assert again.time_us - struck_us >= 590e6
    assert not any(event.kind == "checkpoint.restored" and event.data.version == 0 for event in log)


@pytest.mark.parametrize("service", ["scheduler", "trajectories", "packer"])
def test_a_service_recovers_from_the_last_snapshot_of_the_life_before(
    service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    restored: dict[str, int] = {}
    restore = Driver.restore

    def spied(driver: Driver[Any], snapshot: bytes) -> None:
        restore(driver, snapshot)
        restored[driver.decider.name] = driver.position

    monkeypatch.setattr(Driver, "restore", spied)
    crash = p.Crash(pin=p.Pin(kind="execution.finished", nth=20), service=service, down_s=30.0)
    outcome = simulate_plan(p.Plan(seed=PAIRS, faults=[crash], snapshot_every={service: 5}))
    assert not outcome.violations
    assert list(restored) == [service]
    assert 0 < outcome.struck[0].seq - restored[service] < 100


@pytest.mark.parametrize("how", ["garbled", "gone", "unreadable", "old"])
def test_a_service_whose_snapshot_is_damaged_takes_the_log_from_its_beginning_or_an_older_one(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    restored: list[int] = []
    restore = Driver.restore

    def spied(driver: Driver[Any], snapshot: bytes) -> None:
        restore(driver, snapshot)
        restored.append(driver.position)

    monkeypatch.setattr(Driver, "restore", spied)
    at = p.Pin(kind="execution.finished", nth=20)
    damaged = p.DamagedSnapshot(pin=at, service="scheduler", how=how, seconds=1800.0)  # type: ignore[arg-type]
    outcome = simulate_plan(p.Plan(seed=PAIRS, faults=[damaged], snapshot_every={"scheduler": 5}))
    assert not outcome.violations
    (struck,) = outcome.struck
    assert len(restored) == (1 if how == "old" else 0)
    assert all(position < struck.seq - 5 for position in restored)
    assert len(said_by([decode(stored) for stored in outcome.log], "scheduler", "service.joined")) == 2


def test_a_core_that_cannot_write_its_checkpoint_begins_again_until_there_is_room() -> None:
    at = p.Pin(kind="batch.join-closed", nth=1)
    outcome, log = struck(PAIRS, p.HostDiskFull(pin=at, where="checkpoints", seconds=600.0))
    full_us = next(event.time_us for event in log if event.seq == outcome.struck[0].seq)
    saved = next(event for event in log if event.kind == "checkpoint.saved")
    assert saved.time_us - full_us >= 590e6
    assert len(said_by(log, "trainer-cell-0", "service.joined")) > 1


def test_an_execution_without_room_for_its_workspace_is_a_total_failure() -> None:
    at = p.Pin(kind="execution.started", nth=10)
    _, log = struck(PAIRS, p.HostDiskFull(pin=at, where="harness", seconds=1800.0))
    ends = [event.data for event in log if event.kind == "execution.finished"]
    assert any(end.reason == "total_failure" and "No space left" in end.detail for end in ends)


def test_a_process_that_was_taken_for_lost_and_lives_on_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    async def deaf(self: RolloutCell, position: int) -> None:
        async for event in self._context.events(position, about=rollout.ABOUT):
            self._folded = event.seq
            self.role.fold(event)
            self._changed.set()

    monkeypatch.setattr(RolloutCell, "_follow", deaf)
    at = p.Pin(kind="execution.started", nth=10)
    outcome = simulate_plan(p.Plan(seed=PAIRS, faults=[p.Hung(pin=at, service="rollout-cell-1", seconds=7200.0)]))
    assert [each.what for each in outcome.violations if each.invariant == "lives-on"]


def test_a_service_that_does_not_stop_is_stubborn(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = packer.serve

    async def deaf(context: Context) -> None:
        try:
            await serve(context)
        except asyncio.CancelledError:
            await asyncio.Event().wait()

    monkeypatch.setattr(packer, "serve", deaf)
    at = p.Pin(kind="execution.finished", nth=20)
    outcome = simulate_plan(p.Plan(seed=PAIRS, faults=[p.Stop(pin=at, service="packer")]))
    assert [(each.invariant, each.entity) for each in outcome.violations] == [("stubborn", "packer")]


def test_what_a_service_said_when_it_died_is_stored_while_it_is_away() -> None:
    at = p.Pin(kind="execution.started", nth=10)
    last = p.LastWords(pin=at, service="harness", late_s=30.0, down_s=60.0)
    outcome, log = struck(PAIRS, last)
    first, second = said_by(log, "harness", "service.joined")
    late = [event for event in log if event.instance == "harness" and outcome.struck[0].seq < event.seq < second.seq]
    struck_us = log[outcome.struck[0].seq - 1].time_us
    assert late and late[0].time_us - struck_us >= 29e6
    assert first.seq < late[0].seq < second.seq


def test_a_step_that_a_dead_core_told_is_refused_once_the_next_has_begun() -> None:
    at = p.Pin(kind="checkpoint.saved", nth=2)
    outcome, log = struck(PAIRS, p.LastWords(pin=at, service="trainer-cell-0", late_s=600.0, down_s=1.0))
    _, joined = said_by(log, "trainer-cell-0", "service.joined")
    (step,) = [event for event in said_by(log, "trainer-cell-0", "batch.stepped") if event.data.version == 2]
    assert outcome.struck[0].seq < joined.seq < step.seq


def test_nothing_is_placed_while_the_operator_has_paused_the_run() -> None:
    at = p.Pin(kind="execution.placed", nth=3)
    _, log = struck(PAIRS, p.Paused(pin=at, seconds=1800.0))
    (paused,), (resumed,) = (said_by(log, "operator", kind) for kind in ("run.paused", "run.resumed"))
    assert 1800e6 <= resumed.time_us - paused.time_us < 1801e6
    # What the scheduler had decided on before it heard of it is no matter.
    placed = [event for event in log if event.kind == "execution.placed" and event.causation > paused.seq]
    assert placed and placed[0].seq > resumed.seq


def test_a_wish_is_said_again_until_the_event_bus_hears_it() -> None:
    at = p.Pin(kind="execution.finished", nth=10)
    _, log = struck(PAIRS, p.ServerRestart(pin=at, down_s=120.0), p.Paused(pin=at, seconds=60.0))
    (paused,), (resumed,) = (said_by(log, "operator", kind) for kind in ("run.paused", "run.resumed"))
    assert paused.time_us - [event for event in log if event.kind == at.kind][9].time_us >= 119e6
    assert resumed.time_us - paused.time_us >= 60e6


def test_a_cell_that_the_operator_drained_empties_and_serves_again_once_it_is_added() -> None:
    at = p.Pin(kind="execution.started", nth=10)
    _, log = struck(PAIRS, p.Withdrawn(pin=at, cell="cell-1", seconds=3600.0))
    (withdrawn,), (added,) = (said_by(log, "operator", kind) for kind in ("cell.withdrawn", "cell.reinstated"))
    between = [event for event in log if event.kind == "route.moved" and withdrawn.seq <= event.causation < added.seq]
    assert {event.data.reason for event in between if event.data.source == "cell-1"} == {"withdrawn"}
    placed = [event for event in log if event.kind == "execution.placed" and event.data.cell == "cell-1"]
    assert not [event for event in placed if withdrawn.seq < event.causation < added.seq]
    assert any(event.causation >= added.seq for event in placed)


@pytest.mark.parametrize(
    "wish",
    [
        p.Paused(pin=p.Pin(kind="run.finished"), seconds=60.0),
        p.Withdrawn(pin=p.Pin(), cell="cell-1", seconds=60.0),
    ],
    ids=["of a run that is over", "of a cell before it joins"],
)
def test_nobody_says_what_the_command_refuses(wish: p.AnyFault) -> None:
    outcome = simulate_plan(p.Plan(seed=PAIRS, faults=[wish]))
    assert not outcome.violations and not outcome.struck
