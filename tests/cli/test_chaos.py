"""Every process killed once: the plan for all seeds, and a scripted mesh that is really killed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import events as e
from schemas import streams
from schemas.config import Config
from schemas.config_file import load
from services.cli import logs
from services.cli.chaos import processes
from services.cli.chaos_hold import CHAOS
from services.cli.chaos_plan import SPREAD, Killed, in_turn, last_hold, plan, position
from services.cli.launch import Plan, launch
from services.cli.places import Places
from services.cli.plan import service_specs
from services.cli.resuming import open_run
from services.cli.run_command import closing, survived
from services.mesh.clock import SystemClock
from services.mesh.codec import decode
from services.mesh.nats_bus import connect
from services.mesh.processes import Mesh, read_mesh
from services.mesh.publisher import Publisher
from services.mesh.server import NatsServer
from tests.cli.conftest import Remembering

Planner = Callable[..., Plan]
NAMES = st.sets(st.text("abcdefgh-0123", min_size=1), min_size=1, max_size=40)
SEEDS = st.integers(min_value=-(2**40), max_value=2**40)
STEPS = st.integers(min_value=1, max_value=2000)


MU = st.integers(min_value=1, max_value=9)


@given(names=NAMES, seed=SEEDS, steps=STEPS, mu=MU)
def test_everyone_once_and_nobody_outstanding_in_the_last_burst(
    names: set[str], seed: int, steps: int, mu: int
) -> None:
    kills = plan(names, seed=seed, steps=steps, mu=mu)
    assert sorted(kill.process for kill in kills) == sorted(names)
    moments, holds = [kill.at for kill in kills], [kill.hold for kill in kills]
    assert moments == sorted(moments)
    assert holds == sorted(holds)
    end = last_hold(steps=steps, mu=mu)
    assert 0 < end < steps
    assert end == steps - mu or steps <= mu
    assert holds[-1] == pytest.approx(end)
    span = SPREAD * end
    assert 0 <= moments[0]
    assert moments[-1] < span
    for index, (at, hold) in enumerate(zip(moments, holds, strict=True)):
        # Spread: each in a part of its own, and the run may go twice as far before it has to wait.
        assert index <= at * len(names) / span + 1e-6
        assert at * len(names) / span <= index + 1 + 1e-6
        assert at < hold
    assert all(0 <= kill.gap <= span / len(names) for kill in kills)


@given(
    names=NAMES,
    seed=SEEDS,
    steps=STEPS,
    mu=MU,
    late=st.lists(st.floats(min_value=0, max_value=5), min_size=40, max_size=40),
)
def test_a_late_kill_meets_a_run_at_work_and_no_last_burst(
    names: set[str], seed: int, steps: int, mu: int, late: list[float]
) -> None:
    kills = plan(names, seed=seed, steps=steps, mu=mu)
    now = 0.0
    for planned, delay in zip(kills, late, strict=False):
        kill = in_turn(planned, now=now, end=kills[-1].hold)
        assert planned.at <= kill.at <= kill.hold <= kills[-1].hold
        assert kill.at == kills[-1].hold or kill.at >= now + kill.gap
        # The run goes on until it is held, however long the process takes to come back.
        now = max(now, min(kill.at + delay, kill.hold))
    assert now <= kills[-1].hold


@given(names=NAMES, seed=SEEDS, steps=STEPS)
def test_the_seed_decides_and_the_order_of_names_does_not(names: set[str], seed: int, steps: int) -> None:
    forward = plan(sorted(names), seed=seed, steps=steps, mu=2)
    assert forward == plan(sorted(names, reverse=True), seed=seed, steps=steps, mu=2)


def test_seeds_differ() -> None:
    names = [f"p{index}" for index in range(16)]
    orders = {tuple(kill.process for kill in plan(names, seed=seed, steps=20, mu=2)) for seed in range(20)}
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


def test_each_of_several_proxies_is_killed() -> None:
    root = Path(__file__).parents[2]
    config = load(root / "examples" / "quickstart.toml", ["proxy.count=2"])
    specs = service_specs(config, run="r-1", url="nats://x", state=root, here=root)
    names = processes([spec.name for spec in specs], own_bus=True)
    kills = {kill.process for kill in plan(names, seed=1, steps=config.steps, mu=config.scheduler.mu)}
    assert kills == set(names) and {"proxy-0", "proxy-1"} < kills and "proxy" not in kills


class Ending(Remembering):
    """Lets the run end once all were killed."""

    def __init__(self, go: Path, places: Places) -> None:
        super().__init__()
        self.go, self.places = go, places
        self.buses: set[int] = set()
        """Event buses that mesh.json named."""

    def note(self, text: str) -> None:
        super().note(text)
        live = self.places.live()
        if live is not None:
            self.buses.add(live.nats_pid)
        if text.startswith("chaos: killed 5 of 5"):
            self.go.write_text("go")


@pytest.mark.timeout(90)
async def test_every_process_is_killed_once_and_the_run_ends(
    config: Config, places: Places, plan: Planner, go: Path, tmp_path: Path
) -> None:
    view = Ending(go, places)
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
    assert summary.targets["kills"] == "== 5"
    assert (summary.figures["crashes"], summary.targets["crashes"]) == (0, "== 0")

    assert len(view.buses) == 2, "the bus that came back is named too"

    # A service was started again once for each process of it that was killed, and none for another's end.
    mesh = read_mesh(places.run(summary.run))
    assert mesh is not None
    assert {each.name: each.restarts for each in mesh.services} == {"scheduler": 1, "worker": 1, "rollout-cell-0": 2}

    # The scripted run is at its last step at once: it was held back until the last kill was done.
    held = [event async for _, event in logs.read_events(places, summary.run, kinds=["run.*"])]
    assert [event.kind for event in held] == ["run.started", "run.paused", "run.resumed", "run.finished"]
    assert {event.data.by for event in held[1:3]} == {"chaos"}
    assert held[2].seq > max(each.at_sequence for each in summary.chaos)

    # One after the other: what was killed is back before the next is.
    said = [note for note in view.notes if note.startswith("chaos:")]
    assert [note.split()[1] for note in said if "waits" not in note] == ["killed", "all"] * 5 + ["killed"]
    rows = survived(summary)
    assert len(rows) == 7
    assert set(rows) <= set(closing(summary, places, again="gyre run FILE"))


@pytest.mark.parametrize(("by", "let_go"), [(CHAOS, True), ("command line", False)])
async def test_who_goes_on_lets_go_what_a_killed_chaos_held_back(
    by: str, let_go: bool, config: Config, places: Places, nats_server: NatsServer
) -> None:
    run = f"r-20260102-0304-5f3{let_go:d}"
    mesh = Mesh(run=run, supervisor=1, supervisor_created=0.0, nats=nats_server.url)
    places.run(run).mkdir(parents=True)
    (places.run(run) / "secret").write_bytes(b"")
    (places.run(run) / "mesh.json").write_bytes(msgspec.json.encode(mesh))
    async with await connect(nats_server.url, run, name="test") as bus:
        await bus.open_run()
        operator = Publisher(bus=bus, clock=SystemClock(), run=run, owner="operator", instance="operator")
        started = e.RunStarted(seed=0, config=config, tasks=[], code="test")
        await operator.say("run.started", run, started, id=f"{run}.started")
        await operator.say("run.paused", run, e.RunPaused(by=by), id=f"{run}.paused")
        for _ in range(2):
            again = open_run(config, tasks=[], places=places, url=nats_server.url, new=False, view=Remembering())
            assert await again == run
        log = streams.log_stream(run)
        events = [decode(stored) async for stored in bus.read_range(log, 0, await bus.last_seq(log))]
    assert [each.data.by for each in events if each.kind == "run.resumed"] == [CHAOS] * let_go


def test_what_did_not_come_back_is_said() -> None:
    from services.cli.figures import summarize
    from services.cli.progress import Progress

    killed = [Killed(process="proxy", at_step=3, at_sequence=40)]
    summary = summarize(Progress(), peak_rss_bytes=1, killed=killed, kills=2)
    assert summary.figures["kills"] == 0
    assert "kills" in summary.missed
    assert survived(summary)[-1].split() == ["proxy", "3", "40", "never"]
