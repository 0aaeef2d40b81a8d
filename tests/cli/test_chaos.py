"""Every process killed once: the plan for all seeds, and a scripted mesh that is really killed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.config import Config
from services.cli.chaos import processes
from services.cli.chaos_plan import SPREAD, Killed, plan, position
from services.cli.launch import Plan, launch
from services.cli.places import Places
from services.cli.run_command import closing, survived
from services.mesh.processes import read_mesh
from tests.cli.conftest import Remembering

Planner = Callable[..., Plan]
NAMES = st.sets(st.text("abcdefgh-0123", min_size=1), min_size=1, max_size=40)
SEEDS = st.integers(min_value=-(2**40), max_value=2**40)
STEPS = st.integers(min_value=1, max_value=2000)


@given(names=NAMES, seed=SEEDS, steps=STEPS)
def test_everyone_once_before_the_last_step(names: set[str], seed: int, steps: int) -> None:
    kills = plan(names, seed=seed, steps=steps)
    assert sorted(kill.process for kill in kills) == sorted(names)
    moments = [kill.at for kill in kills]
    assert moments == sorted(moments)
    span = SPREAD * max(1, steps - 1)
    assert 0 <= moments[0]
    assert moments[-1] < span < max(1, steps - 1)
    # Spread: each in a part of its own.
    for index, at in enumerate(moments):
        assert index <= at * len(names) / span + 1e-6
        assert at * len(names) / span <= index + 1 + 1e-6


@given(names=NAMES, seed=SEEDS, steps=STEPS)
def test_the_seed_decides_and_the_order_of_names_does_not(names: set[str], seed: int, steps: int) -> None:
    assert plan(sorted(names), seed=seed, steps=steps) == plan(sorted(names, reverse=True), seed=seed, steps=steps)


def test_seeds_differ() -> None:
    names = [f"p{index}" for index in range(16)]
    orders = {tuple(kill.process for kill in plan(names, seed=seed, steps=20)) for seed in range(20)}
    assert len(orders) == 20


@given(gaps=st.lists(st.integers(min_value=1, max_value=5000), max_size=20), more=st.integers(0, 10_000))
def test_a_position_rises_with_the_log_and_is_whole_at_the_end_of_a_step(gaps: list[int], more: int) -> None:
    ends = [sum(gaps[: index + 1]) for index in range(len(gaps))]
    last = ends[-1] if ends else 0
    at = position(ends, last, expected=300)
    later = position(ends, last + more, expected=300)
    assert at == len(ends)
    assert at <= later < at + 1
    assert later <= position(ends, last + more + 1, expected=300)


def test_half_of_the_usual_events_is_half_a_step() -> None:
    assert position([], 150, expected=300) == 0.5
    assert position([100, 300], 375, expected=1) == 2.5


def test_engines_and_our_own_bus_are_processes_too() -> None:
    names = ["scheduler", "rollout-cell-0", "rollout-cell-1", "trainer-cell-0"]
    assert processes(names, own_bus=True) == [*names, "engine-cell-0", "engine-cell-1", "nats-server"]
    assert processes(["scheduler"], own_bus=False) == ["scheduler"]


class Ending(Remembering):
    """Lets the run end once all were killed."""

    def __init__(self, go: Path) -> None:
        super().__init__()
        self.go = go

    def note(self, text: str) -> None:
        super().note(text)
        if text.startswith("chaos: killed 5 of 5"):
            self.go.write_text("go")


@pytest.mark.timeout(90)
async def test_every_process_is_killed_once_and_the_run_ends(
    config: Config, places: Places, plan: Planner, go: Path, tmp_path: Path
) -> None:
    view = Ending(go)
    roles = ("scheduler", "worker", "rollout-cell-0")
    async with asyncio.timeout(80):
        with places.hold("test"):
            summary, signum = await launch(
                config,
                tasks=[],
                here=tmp_path,
                places=places,
                view=view,
                plan=plan(*roles),
                settle_s=0.5,
                chaos_seed=7,
            )
    assert (signum, summary.finished, summary.ok) == (0, "steps_done", True), view.notes
    assert sorted(each.process for each in summary.chaos) == sorted([*roles, "engine-cell-0", "nats-server"])
    assert all(each.ready_after_s and each.at_sequence > 0 for each in summary.chaos)
    assert summary.figures["kills"] == 5
    assert summary.targets["kills"] == ">= 5"

    # A service was started again once for each process of it that was killed, and none for another's end.
    mesh = read_mesh(places.run(summary.run))
    assert mesh is not None
    assert {each.name: each.restarts for each in mesh.services} == {"scheduler": 1, "worker": 1, "rollout-cell-0": 2}

    # One after the other: what was killed is back before the next is.
    said = [note for note in view.notes if note.startswith("chaos:")]
    assert [note.split()[1] for note in said] == ["killed", "all"] * 5 + ["killed"]
    rows = survived(summary)
    assert len(rows) == 7
    assert set(rows) <= set(closing(summary, places, again="gyre run FILE"))


def test_what_did_not_come_back_is_said() -> None:
    from services.cli.figures import summarize
    from services.cli.progress import Progress

    killed = [Killed(process="proxy", at_step=3, at_sequence=40)]
    summary = summarize(Progress(), peak_rss_bytes=1, killed=killed, kills=2)
    assert summary.figures["kills"] == 0
    assert "kills" in summary.missed
    assert survived(summary)[-1].split() == ["proxy", "3", "40", "never"]
