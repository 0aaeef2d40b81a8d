"""The projection and its figures, and how they are drawn."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from schemas import events as e
from schemas.units import Counters, GapStats
from services.cli.figures import figures, summarize
from services.cli.progress import Progress
from services.cli.projection import evolve
from services.cli.view import PlainView, bar, panel_rows, sparkline
from tests.replay.recorded import event, recorded
from tests.scheduler.world import small_config


def projected(events: list[Any]) -> Progress:
    progress = Progress()
    for each in events:
        evolve(progress, each)
    return progress


def stepped(step: int, reward: float) -> e.BatchStepped:
    return e.BatchStepped(
        step=step,
        version=step,
        members=["cell-0"],
        loss=0.1,
        grad_norm=1.0,
        lr=1e-6,
        micro_steps=1,
        tokens=100,
        targets=50,
        executions=8,
        masked=1,
        reward=reward,
        gap=GapStats(sum_abs=2e-5, max_abs=1e-5, count=10),
        seconds=0.5,
    )


def test_a_cancelled_execution_ends_once_and_its_refusal_is_no_error() -> None:
    """Running, and queued; the harness of the first says that it was refused."""
    names = ["e-000000.00", "e-000000.01"]
    said = [event(1, "run.started", "r-test", e.RunStarted(seed=0, config=small_config(), tasks=[], code="test"))]
    for name in names:
        dispatched = e.ExecutionDispatched(group="g-000000", member=0, task="t")
        said.append(event(len(said) + 1, "execution.dispatched", name, dispatched))
    said.append(event(4, "execution.started", names[0], e.ExecutionStarted(attempt=0), owner="harness"))
    cancelled = e.ExecutionCancelled(reason="surplus", checks=[])
    said += [event(5 + i, "execution.cancelled", name, cancelled, owner="trajectories") for i, name in enumerate(names)]
    progress = projected(said)
    assert (progress.d, progress.p, progress.f, progress.waterlevel) == (2, 2, 2, 0) and not progress.running
    for seq, name in enumerate(names, start=7):
        counters = Counters(calls=3, harness_errors=1)
        finished = e.ExecutionFinished(
            attempt=0, reason="surplus", exit_code=1, seconds=1.0, workspace="", workspace_digest="", counters=counters
        )
        evolve(progress, event(seq, "execution.finished", name, finished, owner="harness"))
        settled = e.ExecutionSettled(attempt=0, outcome="excluded", reward=0.0, reason="surplus")
        evolve(progress, event(seq + 2, "execution.settled", name, settled, owner="trajectories"))
    assert (progress.p, progress.f) == (2, 2)
    numbers = figures(progress, peak_rss_bytes=0)
    assert (numbers["executions"], numbers["executions_surplus"]) == (2, 2)
    assert (numbers["harness_calls"], numbers["harness_errors"]) == (6, 0)
    assert "2 surplus executions" in dict(panel_rows(progress))["groups"]


def test_time_in_which_the_run_was_stopped_does_not_count() -> None:
    started = e.RunStarted(seed=0, config=small_config(), tasks=[], code="test")
    said = [
        event(1, "run.started", "r-test", started),
        event(2_000, "batch.stepped", "b-000001", stepped(1, 0.5)),
        event(600_000, "run.continued", "r-test", e.RunContinued(code="test")),
        event(603_000, "batch.stepped", "b-000002", stepped(2, 0.5)),
    ]
    progress = projected(said)  # one sequence number is a millisecond here
    assert progress.seconds == pytest.approx(4.999)
    assert [step.seconds for step in progress.steps] == pytest.approx([1.999, 3.0])


@pytest.mark.parametrize("seed", range(4))
def test_the_ledger_of_a_whole_run(seed: int) -> None:
    """d, p, f and loads agree with the scheduler's own; in the end nothing is open that was not dispatched."""
    progress = projected(recorded(seed=seed, lose=0.1 * (seed % 2)))
    assert progress.f <= progress.p <= progress.d
    assert progress.waterlevel == len(progress.open) == progress.d - progress.f
    for name, cell in progress.cells.items():
        assert cell.load == sum(place == name for place in progress.open.values())
        assert 0 <= cell.load <= cell.capacity
    config = progress.config
    assert config is not None
    assert len(progress.steps) == config.steps
    assert progress.groups_consumed == config.steps * config.scheduler.B
    assert progress.finished == "steps_done"
    assert progress.transitions >= 1


def test_applying_a_fact_again_changes_nothing() -> None:
    events = recorded(seed=5)
    facts = [each for each in events if each.owner == "harness"]
    once, twice = projected(events), projected(events)
    for each in facts:
        evolve(twice, each)
    assert (once.d, once.p, once.f) == (twice.d, twice.p, twice.f)


def test_rewards_counters_and_gap() -> None:
    events = [
        event(step, "batch.stepped", f"b-{step}", stepped(step, reward))
        for step, reward in enumerate([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7], start=1)
    ]
    progress = projected(events)
    found = figures(progress, peak_rss_bytes=3_000_000_000)
    assert found["reward_first5"] == 0.3
    assert found["reward_last5"] == 0.5
    assert found["reward_gain"] == 0.2
    assert found["logprob_gap"] == pytest.approx(2e-6)
    assert found["peak_rss_gb"] == 3.0


def test_harness_counters_are_summed() -> None:
    dispatched = e.ExecutionDispatched(group="g-1", member=0, task="t")
    finished = e.ExecutionFinished(
        attempt=0,
        reason="completed",
        exit_code=0,
        seconds=1.0,
        workspace="",
        workspace_digest="",
        counters=Counters(calls=4, reconnects=1, harness_errors=2),
    )
    said = [("execution.dispatched", dispatched), ("execution.finished", finished)]
    progress = projected([event(seq, kind, "e-1.0", data) for seq, (kind, data) in enumerate(said, start=1)])
    assert (progress.harness_calls, progress.reconnects, progress.harness_errors) == (4, 1, 2)
    # It never started: p and f rise together.
    assert (progress.d, progress.p, progress.f) == (1, 1, 1)


def quickstart(*, steps: int, lr: float, rewards: list[float]) -> Progress:
    progress = Progress(config=small_config(name="quickstart", steps=steps, trainer__lr=lr))
    for step, reward in enumerate(rewards, start=1):
        evolve(progress, event(step, "batch.stepped", f"b-{step}", stepped(step, reward)))
    return progress


@pytest.mark.parametrize(
    ("steps", "lr", "rewards", "missed"),
    [
        (20, 4e-4, [0.2] * 10 + [0.9] * 10, []),
        (20, 4e-4, [0.2] * 20, ["reward_gain"]),
        (20, 0.0, [0.2] * 20, []),
        (6, 4e-4, [0.2] * 6, []),
        (20, 4e-4, [], ["reward_gain", "steps"]),
    ],
)
def test_targets_of_the_quickstart(steps: int, lr: float, rewards: list[float], missed: list[str]) -> None:
    summary = summarize(quickstart(steps=steps, lr=lr, rewards=rewards), peak_rss_bytes=10**9)
    assert sorted(summary.missed) == missed
    assert summary.ok is (not missed)
    assert summary.targets["peak_rss_gb"] == "< 8"
    read = msgspec.json.decode(msgspec.json.encode(summary))
    assert {"name", "figures", "targets", "ok", "machine"} <= set(read)


def test_too_much_memory_misses() -> None:
    summary = summarize(quickstart(steps=4, lr=0.0, rewards=[0.1] * 4), peak_rss_bytes=9 * 10**9)
    assert summary.missed == ["peak_rss_gb"]


def test_a_line_a_step() -> None:
    out = io.StringIO()
    view, progress = PlainView(out), Progress()
    for each in recorded(seed=1):
        evolve(progress, each)
        view.update(progress)
    lines = out.getvalue().splitlines()
    assert lines[0] == "run r-test"
    assert [line.split("  ")[0] for line in lines[1:]] == [f"step {n}/8" for n in range(1, 9)]
    assert "cell-0:" in lines[1]


def test_steps_of_an_earlier_mesh_are_not_told_again() -> None:
    out = io.StringIO()
    view, progress = PlainView(out), Progress()
    for each in recorded(seed=1):
        evolve(progress, each)
        if len(progress.steps) >= 3:
            view.update(progress)
    lines = out.getvalue().splitlines()
    assert lines[0] == "run r-test, 3 steps are made"
    assert [line.split("  ")[0] for line in lines[1:]] == [f"step {n}/8" for n in range(4, 9)]


def test_a_step_that_was_undone_is_told_again() -> None:
    out = io.StringIO()
    view, progress = PlainView(out), Progress()
    said = [
        event(1, "run.started", "r-test", e.RunStarted(seed=0, config=small_config(), tasks=[], code="test")),
        event(2, "batch.stepped", "b-000001", stepped(1, 0.5)),
        event(3, "batch.stepped", "b-000002", stepped(2, 0.5)),
        event(4, "checkpoint.restored", "r-test", e.CheckpointRestored(version=1, log_sequence=2)),
        event(5, "batch.stepped", "b-000003", stepped(2, 0.5)),
    ]
    for each in said:
        evolve(progress, each)
        view.update(progress)
    assert [line.split("  ")[0] for line in out.getvalue().splitlines()[1:]] == ["step 1/8", "step 2/8", "step 2/8"]


def test_the_panel_shows_every_cell() -> None:
    rows = dict(panel_rows(projected(recorded(seed=1))))
    assert {"step", "reward", "waterlevel", "cell-0", "cell-1", "cell-2", "staleness", "tokens/s"} <= set(rows)
    assert rows["step"].startswith("8 of 8")
    assert "(core)" in rows["cell-0"]


IN_A_TERMINAL = """
from services.cli.view import open_view

view = open_view(quiet=False, json=False)
view.note("making policy")
view.busy("making policy: step 10/160")
view.memory(2_000_000_000)
view.close()
print(type(view).__name__)
"""


def test_a_terminal_gets_a_panel() -> None:
    ours, theirs = pty.openpty()
    child = subprocess.Popen([sys.executable, "-c", IN_A_TERMINAL], stdout=subprocess.PIPE, stderr=theirs, text=True)
    os.close(theirs)
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        drawn = b""
        try:
            while piece := terminal.read(4096):
                drawn += piece
        except OSError:
            pass  # Linux says so when the last one who had the terminal open is gone.
    out, _ = child.communicate()
    assert (child.returncode, out) == (0, "LiveView\n"), drawn.decode()
    assert b"making policy: step 10/160" in drawn
    assert b"2.0 GB" in drawn
    assert b"Traceback" not in drawn


def test_drawing() -> None:
    assert sparkline([0.0, 0.5, 1.0], low=0.0, high=1.0) == "▁▅█"
    assert bar(1, 2, 4) == "━━╌╌"
    assert bar(0, 0, 2) == "╌╌"
    assert bar(9, 3, 2) == "━━"
