"""`gyre replay FILE --with KEY=VALUE`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from replay.logfile import read_events
from replay.logwriter import LogWriter
from schemas.errors import ConfigError, GyreError
from services.cli.app import app
from services.mesh import codec
from tests.cli.command import said
from tests.replay.whatif.simulated import simulated


def test_it_says_where_decisions_part_and_what_becomes_of_it(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, "replay", log, "--with", "rho_min=0.9", "--with", "tau_s=30")
    for line in (
        "scheduler.rho_min  0.125 -> 0.9",
        "decisions part after",
        "when each step is made",
        "staleness_mean",
        "idle_cell_hours",
    ):
        assert line in out
    assert "what the recording can't tell" in out


def test_as_data(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(said(capsys, "replay", log, "--with", "rho_min=0.9", "--json"))
    assert found["changes"] == [{"key": "scheduler.rho_min", "was": 0.125, "now": 0.9}]
    assert [each["step"] for each in found["steps"]] == [1, 2, 3]
    assert found["world_pct"] == 0.0 and found["parting"]["decider"] == "scheduler"
    assert {"idle_cell_hours", "staleness_mean"} <= found["what_if"]["figures"].keys()


def test_the_recorded_value_gives_the_recording_back(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = tmp_path / "again.gyre"
    out = said(capsys, "replay", log, "--with", "scheduler.rho_min=0.125", "-o", again)
    assert "no decision changes" in out
    assert read_events(again) == read_events(log)


def test_the_log_that_comes_out_is_a_log(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.gyre"
    said(capsys, "replay", log, "--with", "strategy=colocate", "--output", other)
    said(capsys, "check", other)
    said(capsys, "replay", other)


def test_a_sweep_is_a_table_and_a_picture(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "sweep.svg"
    out = said(capsys, "replay", log, "--sweep", "rho_min=0.5:0.9:0.4", "--with", "tau_s=30", "-o", picture)
    rows = [line for line in out.splitlines() if "●" in line]
    assert [row.split()[0] for row in rows] == ["0.5", "0.9", "recorded"]
    assert picture.read_text().startswith("<svg")
    found = json.loads(said(capsys, "replay", log, "--sweep", "strategy=elastic,colocate", "--json"))
    assert [each["value"] for each in found["points"]] == ["elastic", "colocate"]
    with pytest.raises(ConfigError, match="drawn as"):
        app(["replay", str(log), "--sweep", "rho_min=0.5:0.9:0.4", "-o", str(tmp_path / "sweep.png")])


@pytest.mark.parametrize("last", ["run.started", "execution.placed", "evaluation.scored", "weights.exposed"])
def test_a_recording_without_a_step_is_answered_as_far_as_it_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], last: str
) -> None:
    run = simulated()
    short = tmp_path / "short.gyre"
    with LogWriter(short) as writer:
        for event in run.events[: 1 + next(at for at, each in enumerate(run.events) if each.kind == last)]:
            writer.add(codec.stored(event, run=run.name))
        writer.finish()
    assert "0 steps recorded" in said(capsys, "replay", short, "--with", "rho_min=0.5")
    rows = said(capsys, "replay", short, "--sweep", "rho_min=0.5,0.9", "-o", tmp_path / "sweep.svg").splitlines()
    assert [row.split()[:2] for row in rows if row.startswith("  0.")] == [["0.5", "-"], ["0.9", "-"]]


def test_the_bench_compares_with_fresh_simulations(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from services.cli import bench_what_if

    monkeypatch.setattr(bench_what_if, "STEPS", 6)
    monkeypatch.setattr(bench_what_if, "CHANGES", (("scheduler.rho_min=0.5",), ("scheduler.oversample=1",)))
    found = json.loads(said(capsys, "bench", "what-if", "--scenario", "small", "--json"))
    assert found["ok"] and found["figures"]["identity_exact"] == 1.0
    assert [each["told"] for each in found["rows"]] == [True, False]
    assert {each["log"] for each in found["identity"]} == {"small", "quickstart-elastic"}
    assert "every event" in said(capsys, "bench", "what-if", "--scenario", "small")


def test_files_that_can_not_be_used_are_refused(log: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gyre"
    broken.write_bytes(log.read_bytes()[:5000])
    for path, words in (
        (broken, ["--with", "rho_min=0.3"]),
        (tmp_path / "none.gyre", ["--with", "rho_min=0.3"]),
        (tmp_path, ["--with", "rho_min=0.3"]),
        (log, ["--with", "rho_mn=0.3"]),
        (log, ["--with", "rho_min=0.3", "--at", "40"]),
    ):
        with pytest.raises(GyreError) as raised:
            app(["replay", str(path), *words])
        assert raised.value.exit_code == 2


def test_an_unknown_key_names_what_is_near(log: Path) -> None:
    with pytest.raises(ConfigError, match=r"scheduler\.rho_min"):
        app(["replay", str(log), "--with", "rho_mim=0.3"])
