"""`gyre replay` with --at, --until, --step on a simulated run."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from replay.debugging.moments import Walk, point
from replay.logfile import read
from schemas.errors import ConfigError
from services.cli.app import app
from tests.cli.command import said


def test_the_state_at_a_sequence(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(said(capsys, "replay", log, "--at", 400, "--json"))
    state = Walk(read(log)).to(point("400")).state
    assert found["event"]["seq"] == 400
    assert found["fields"]["w"] == state.d - state.f
    assert found["state"] == json.loads(msgspec.json.encode(state, order="deterministic"))
    assert len(found["fields"]["cells"]) == 4
    text = said(capsys, "replay", log, "--at", 400)
    assert text.startswith("400  +") and f"w = d - f = {state.d - state.f}" in text and "\x1b" not in text


def test_the_state_at_a_time_is_after_the_last_event_until_then(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(said(capsys, "replay", log, "--at", "1h", "--json"))
    began = read(log).manifest.first_us
    following = next(
        each for each in read(log) if each.seq > found["event"]["seq"] and each.time_us - began > 3_600_000_000
    )
    assert found["event"]["time_us"] - began <= 3_600_000_000 < following.time_us - began


def test_what_was_decided_on_an_event_is_named(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished = next(each.causation for each in read(log) if each.kind == "execution.placed" and each.causation > 20)
    found = json.loads(said(capsys, "replay", log, "--at", finished, "--json"))
    assert [each["kind"] for each in found["decided"]] == ["execution.placed"]
    assert "decided on it:" in said(capsys, "replay", log, "--at", finished)
    assert f"decided on {finished}" in said(capsys, "replay", log, "--at", found["decided"][0]["seq"])


def test_it_stops_where_a_condition_begins_to_hold(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Before the first dispatch there are none outstanding either: that is no beginning.
    found = json.loads(said(capsys, "replay", log, "--until", "w <= 40", "--json"))
    assert found["fields"]["w"] == 40 and found["condition"] == {"w": 40}
    assert found["event"]["kind"] == "execution.finished"
    later = json.loads(said(capsys, "replay", log, "--at", found["event"]["seq"] + 5, "--until", "w <= 40", "--json"))
    assert later["event"]["seq"] == found["event"]["seq"] + 5
    assert "w = 40" in said(capsys, "replay", log, "--until", "w <= 40")


def test_a_condition_that_never_begins_to_hold(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no event with which this begins to hold: w > 100000" in said(
        capsys, "replay", log, "--until", "w > 100000", code=1
    )
    assert json.loads(said(capsys, "replay", log, "--until", "w > 100000", "--json", code=1))["found"] is False


def test_stepping_in_a_pipe_prints_every_decision(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    decisions = [
        each for each in read(log) if each.owner == "scheduler" and each.causation and each.kind != "timer.fired"
    ]
    lines = [json.loads(each) for each in said(capsys, "replay", log, "--step", "--json").splitlines()]
    assert [each["seq"] for each in lines] == [each.seq for each in decisions]
    assert lines[-1]["kind"] == "run.finished"
    text = said(capsys, "replay", log, "--step", "--at", 300)
    assert text.count("  -> ") == sum(each.seq > 300 for each in decisions)
    assert "waterlevel (2): " in text


def test_stepping_ends_where_the_condition_begins_to_hold(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "replay", log, "--step", "--until", "cells[0].role == training")
    assert text.splitlines()[-1] == "  here begins: cells[0].role == training"
    assert "completed to train" in text and "batch.stepped" not in text


def test_stepping_in_a_terminal_waits_for_keys(log: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "services.cli", "replay", str(log), "--step"]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    try:
        for key, wanted in ((b" ", b"burst.opened"), (b"s", b"group.dispatched"), (b"q", b"ledger")):
            while wanted not in shown:
                shown += _more(ours)
            os.write(ours, key)
        while more := _more(ours):
            shown += more
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert shown.count(b"->") == 2


def _more(terminal: int) -> bytes:
    """Empty once the terminal has lost its last user."""
    readable, _, _ = select.select([terminal], [], [], 60)
    assert readable, "nothing is printed any more"
    try:
        return os.read(terminal, 4096)
    except OSError:
        return b""


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--at", "99999999"], "99999999 is outside of the log"),
        (["--at", "900h"], "900h is outside of the log"),
        (["--at", "soon"], "'soon' is no place in a log"),
        (["--until", "x > 1"], "no field is called x"),
        (["--step", "--until", "w"], "it is a value and no condition"),
        (["--at", "3", "--decider", "packer"], "--decider decides again"),
    ],
)
def test_what_cannot_be_shown_is_refused(log: Path, words: list[str], what: str) -> None:
    with pytest.raises(ConfigError) as refused:
        app(["replay", str(log), *words])
    assert what in str(refused.value)


def test_debugging_looks_at_one_log(log: Path) -> None:
    for paths in ([], [str(log), str(log)], [str(log.parent)]):
        with pytest.raises(ConfigError, match="debugging looks at one log"):
            app(["replay", *paths, "--at", "3"])


def test_why_tells_of_cells_and_of_what_goes_through_them(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held = next(each for each in read(log) if each.kind == "cell.held")
    text = said(capsys, "replay", log, "--why", held.entity, "--at", held.seq)
    assert "what held it back from training" in text and "waterlevel (2) holds it back" in text
    found = json.loads(said(capsys, "replay", log, "--why", held.entity, "--at", held.seq, "--json"))
    assert found["role"] == "rollout" and found["at"]["seq"] == held.seq
    text = said(capsys, "replay", log, "--why", "e-000000.00")
    assert text.startswith("e-000000.00\n\ndispatch\n") and "capacity (1): " in text
    assert json.loads(said(capsys, "replay", log, "--why", "b-000001", "--json"))["entity"] == "b-000001"


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--why", "cell-77"], "cells there: cell-0"),
        (["--why", "e-999999.00"], "there is no execution e-999999.00"),
        (["--why", "everything"], "is nothing that can be asked about"),
        (["--why", "cell-0", "--at", "99999999"], "is outside of the log"),
        (["--why", "cell-0", "--step"], "--why asks something else"),
    ],
)
def test_what_cannot_be_told_is_refused(log: Path, words: list[str], what: str) -> None:
    with pytest.raises(ConfigError) as refused:
        app(["replay", str(log), *words])
    assert what in str(refused.value)


def test_two_runs_are_compared(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.gyre"
    assert (
        app(["simulate", "small", "--set", "run.steps=3", "--set", "run.scheduler.rho_min=0.5", "-o", str(other)]) == 0
    )
    found = json.loads(said(capsys, "replay", "--diff", log, other, "--json"))
    assert [each["path"] for each in found["config"]] == ["scheduler.rho_min"]
    assert found["parting"]["a"]["before"] and found["a"]["steps_s"].keys() == {"1", "2", "3"}
    text = said(capsys, "replay", "--diff", log, other)
    assert "scheduler.rho_min  0.125  0.5" in text and "the first that parts" in text and "idle_cell_hours" in text
    text = said(capsys, "replay", log, log, "--diff")
    assert "decisions of the scheduler are the same" in text
    with pytest.raises(ConfigError, match="two logs are compared"):
        app(["replay", "--diff", str(log)])
    with pytest.raises(ConfigError, match="--diff asks something else"):
        app(["replay", "--diff", str(log), str(log), "--at", "3"])
