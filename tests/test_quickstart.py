"""The quickstart as a newcomer runs it: real services, real policy, a reward that rises, a log that proves it.

One run of the full length, a short one whose scheduler is killed in the middle, and one that is stopped, and killed
as a whole, and goes on each time. All are exported, checked, and decided again.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from replay.logfile import read_events, read_messages
from replay.logwriter import LogWriter
from services.cli.places import Places
from services.mesh.bus import Stored
from services.mesh.codec import decode
from services.mesh.processes import Mesh, Process, read_mesh

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "examples" / "quickstart.toml"
ENDED_S = 1500.0


class Finished(msgspec.Struct, frozen=True):
    """A run that is over."""

    code: int
    summary: dict[str, Any]
    log: Path
    places: Places
    errors: str

    @property
    def figures(self) -> dict[str, float]:
        found: dict[str, float] = self.summary["figures"]
        return found


def gyre(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.cli", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


class Running:
    """A run in a process of its own."""

    def __init__(self, places: Places, *overrides: str) -> None:
        self.places = places
        self.errors = places.root.parent / f"{places.root.name}.err"
        words = [word for override in overrides for word in ("--set", override)]
        self.out = self.errors.with_suffix(".out")
        with self.out.open("wb") as out, self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "services.cli",
                    "run",
                    str(QUICKSTART),
                    "--state",
                    str(places.root),
                    "--json",
                    *words,
                ],
                stdout=out,
                stderr=errors,
                cwd=ROOT,
            )

    def wait_for_step(self, step: int) -> None:
        """Until the run's progress tells of the step."""
        deadline = time.monotonic() + ENDED_S
        while max((int(each) for each in re.findall(r"^step (\d+)/", self.errors.read_text(), re.M)), default=0) < step:
            assert self.process.poll() is None, self.errors.read_text()
            assert time.monotonic() < deadline, self.errors.read_text()
            time.sleep(0.2)

    def wait_for_harnesses(self, count: int) -> None:
        """Until at least so many harness processes run."""
        service = psutil.Process(self.service("harness").pid)
        deadline = time.monotonic() + ENDED_S
        while len(service.children()) < count:
            assert self.process.poll() is None, self.errors.read_text()
            assert time.monotonic() < deadline, self.errors.read_text()
            time.sleep(0.02)

    def mesh(self) -> Mesh:
        mesh = self.places.live()
        assert mesh is not None
        return mesh

    def service(self, name: str) -> Process:
        return next(each for each in self.mesh().services if each.name == name)

    def kill_all(self) -> None:
        """Every process at once: supervisor, event bus, services, engines, harnesses."""
        me = psutil.Process(self.process.pid)
        for process in [me, *me.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(60)

    def finish(self) -> Finished:
        self.process.wait(ENDED_S)
        errors = self.errors.read_text()
        assert self.out.stat().st_size, errors
        summary = msgspec.json.decode(self.out.read_bytes())
        log = self.places.root.parent / f"{summary['run']}.gyre"
        exported = gyre("export", summary["run"], "-o", log, "--state", self.places.root)
        assert exported.returncode == 0, exported.stderr
        return Finished(self.process.returncode, summary, log, self.places, errors)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    """One state folder for all runs: the policy is made once."""
    return Places(tmp_path_factory.mktemp("quickstart") / "state")


@pytest.fixture(scope="module")
def learned(places: Places) -> Iterator[Finished]:
    running = Running(places)
    yield running.finish()
    running.end()


@pytest.fixture(scope="module")
def survived(places: Places) -> Iterator[Finished]:
    """Six steps; the scheduler is killed after the second."""
    running = Running(places, "steps=6", "seed=1")
    running.wait_for_step(2)
    killed = running.service("scheduler")
    os.kill(killed.pid, signal.SIGKILL)
    finished = running.finish()
    mesh = read_mesh(places.run(finished.summary["run"]))
    assert mesh is not None
    scheduler = next(each for each in mesh.services if each.name == "scheduler")
    assert scheduler.restarts == 1
    assert scheduler.pid != killed.pid
    yield finished
    running.end()


@pytest.fixture(scope="module")
def resumed(places: Places) -> Iterator[Finished]:
    """Six steps: Ctrl-C after the second, everything killed after the third, and the same command each time."""
    overrides = ("steps=6", "seed=2")
    running = Running(places, *overrides)
    try:
        running.wait_for_step(2)
        running.wait_for_harnesses(8)
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(120) == 128 + signal.SIGINT, running.errors.read_text()
        stopped = msgspec.json.decode(running.out.read_bytes())
        assert stopped["finished"] == ""
        running = Running(places, *overrides)
        running.wait_for_step(3)
        running.kill_all()
        running = Running(places, *overrides)
        finished = running.finish()
        assert finished.summary["run"] == stopped["run"]
        yield finished
    finally:
        running.end()


def nothing_is_left(places: Places) -> None:
    assert places.holder() is None
    for process in psutil.process_iter(["cmdline"]):
        assert str(places.root) not in " ".join(process.info["cmdline"] or []), process


def proven(finished: Finished) -> None:
    checked = gyre("check", finished.log, "--json")
    assert checked.returncode == 0, checked.stdout
    replayed = gyre("replay", finished.log, "--json")
    assert replayed.returncode == 0, replayed.stdout[-4000:] + replayed.stderr
    result = msgspec.json.decode(replayed.stdout)
    assert {each["decider"] for each in result["deciders"]} == {"scheduler", "trajectories", "packer"}
    for each in result["deciders"]:
        assert each["same"] == each["recorded"] > 0


def test_the_reward_rises(learned: Finished) -> None:
    assert learned.code == 0, (learned.summary, learned.errors[-4000:])
    assert learned.summary["ok"] is True
    figures = learned.figures
    assert figures["steps"] == 20
    assert figures["reward_last5"] - figures["reward_first5"] >= 0.2
    assert figures["harness_errors"] == 0
    assert figures["measurements"] == 3
    assert figures["held_out_last"] > figures["held_out_first"]
    assert figures["harness_calls"] > 0
    assert figures["peak_rss_gb"] < 8
    assert figures["logprob_gap"] < 1e-3
    assert abs(figures["staleness_mean"] - 1.0) <= 0.05


def test_its_log_proves_it(learned: Finished) -> None:
    proven(learned)
    nothing_is_left(learned.places)


def test_a_run_survives_its_scheduler(survived: Finished) -> None:
    assert survived.summary["figures"]["steps"] == 6, survived.errors[-4000:]
    assert survived.figures["harness_errors"] == 0
    assert survived.code == 0, survived.summary
    proven(survived)
    nothing_is_left(survived.places)


def test_a_run_that_was_stopped_or_killed_goes_on(resumed: Finished) -> None:
    assert resumed.code == 0, (resumed.summary, resumed.errors[-4000:])
    assert (resumed.figures["steps"], resumed.figures["harness_errors"]) == (6, 0)
    events = read_events(resumed.log)
    assert [each.owner for each in events if each.kind == "run.continued"] == ["operator"] * 2
    assert [each.kind for each in events if each.kind == "run.finished"] == ["run.finished"]
    # What was in flight started again, and only that was scored and trained.
    lost = {each.entity for each in events if each.kind == "execution.lost"}
    assert lost
    ends = {each.entity: each.data for each in events if each.kind == "execution.finished"}
    assert {ends[name].attempt for name in lost & ends.keys()} <= {1, 2}
    assert all(end.attempt == 0 for name, end in ends.items() if name not in lost)
    closed = [each.data for each in events if each.kind == "measurement.closed"]
    assert [(each.version, each.valid) for each in closed] == [(0, 8), (6, 8)]
    proven(resumed)
    nothing_is_left(resumed.places)


def test_an_altered_decision_is_named(survived: Finished, tmp_path: Path) -> None:
    placed = [each for each in read_events(survived.log) if each.kind == "execution.placed"]
    chosen = placed[len(placed) // 2]

    def change(stored: Stored) -> Stored:
        if stored.seq != chosen.seq:
            return stored
        data = stored.data.replace(chosen.data.cell.encode(), b"cell-7")
        assert data != stored.data
        return msgspec.structs.replace(stored, data=data)

    other = tmp_path / "other.gyre"
    with LogWriter(other) as writer:
        for stored in read_messages(survived.log):
            writer.add(change(stored))
        writer.finish()
    replayed = gyre("replay", other, "--json")
    assert replayed.returncode == 1
    first = msgspec.json.decode(replayed.stdout)["first"]
    assert (first["decider"], first["recorded_seq"]) == ("scheduler", chosen.seq)
    assert first["expected"]["entity"] == chosen.entity
    assert {"path": "data.cell", "expected": "cell-7", "actual": chosen.data.cell} in first["differences"]


def test_the_log_holds_no_text_of_the_policy(survived: Finished) -> None:
    """Nothing that policy or task said is in it: it can be shared."""
    whole = b"".join(stored.data for stored in read_messages(survived.log))
    for text in (
        b"in.txt",
        b"Read in",
        b"tool_use",
        b"ANTHROPIC",
        (survived.places.run(survived.summary["run"]) / "secret").read_bytes(),
    ):
        assert text not in whole
    assert decode(next(iter(read_messages(survived.log)))).kind == "run.started"
