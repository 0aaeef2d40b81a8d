"""The command as a person meets it: help at once, clear errors, nothing half-started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from replay.logfile import read_manifest
from schemas.kinds import KINDS
from services.cli.figures import Summary
from services.cli.places import Places
from services.cli.run_command import closing
from tests.cli.command import gyre, read_json, told
from tests.cli.conftest import ROOT, TOML
from tests.replay.recorded import altered, first, recorded, write

HEAVY = ("torch", "nats", "aiohttp", "renderers", "numpy", "sqlalchemy", "megatron", "psutil", "rich.markdown")

HELP = """
import sys
from services.cli.app import app
app(["--help"])
print("loaded:", *(name for name in {heavy!r} if name in sys.modules))
"""


def test_help_loads_nothing_heavy() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HELP.format(heavy=HEAVY)], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.splitlines()[-1].strip() == "loaded:"
    for command in (
        "run",
        "up",
        "down",
        "status",
        "events",
        "export",
        "replay",
        "check",
        "doctor",
        "service",
        "schema",
    ):
        assert f" {command} " in done.stdout


def test_an_unknown_key_names_the_nearest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(TOML.replace("phi = 1.0", "phy = 1.0"))
    assert gyre("run", file, "--state", tmp_path / "state") == 2
    error = capsys.readouterr().err
    assert "unknown key 'scheduler.phy'" in error
    assert "did you mean 'scheduler.phi'?" in error
    assert not (tmp_path / "state").exists()


def test_a_reader_that_leaves_is_no_failure() -> None:
    """`| head` of a page that Rich draws, and of a help: neither is what exit code 1 means."""
    log = ROOT / "tests" / "golden" / "simulated" / "C0.gyre"
    for words in (["replay", str(log), "--at", "700"], ["replay", str(log)], ["bench", "--help"]):
        reading, writing = os.pipe()
        os.close(reading)
        done = subprocess.run(
            [sys.executable, "-m", "services.cli", *words],
            stdout=writing,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            check=False,
        )
        os.close(writing)
        assert (done.returncode, done.stderr) == (0, b""), words


def test_what_is_next_begins_where_the_shell_finds_no_gyre(
    places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = Summary(
        name="n", run="r-1", finished="steps_done", figures={}, targets={}, missed=[], ok=True, machine={}
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    bin_ = Path(sys.executable).parent
    assert f'Next (first: export PATH="{bin_}:$PATH"):' in closing(summary, places, again="gyre run FILE")
    monkeypatch.setenv("PATH", str(bin_))
    assert "Next:" in closing(summary, places, again="gyre run FILE")


def test_a_missing_word_is_named_as_it_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert gyre("run") == 2
    error = capsys.readouterr().err
    assert "parameter FILE requires" in error and "--file" not in error


def test_an_override_is_checked_too(config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gyre("run", config_file, "--set", "cells.cuont=3", "--state", tmp_path / "state") == 2
    assert "cells.count" in capsys.readouterr().err
    assert not (tmp_path / "state").exists()


def test_dry_run_starts_nothing(config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gyre("run", config_file, "--dry-run", "--json", "--set", "cells.trainable=2", "--state", tmp_path / "s") == 0
    found = read_json(capsys)
    names = [each["name"] for each in found["services"]]
    assert [name for name in names if name.startswith(("rollout", "trainer"))] == [
        "rollout-cell-0",
        "rollout-cell-1",
        "rollout-cell-2",
        "trainer-cell-0",
        "trainer-cell-1",
    ]
    assert found["config"]["cells"]["trainable"] == 2
    assert not (tmp_path / "s").exists()


def test_replay_of_a_good_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "run.gyre", recorded())
    assert gyre("replay", tmp_path / "run.gyre", "--decider", "scheduler", "--json") == 0
    found = read_json(capsys)
    assert found["ok"] is True
    assert found["deciders"][0]["same"] == found["deciders"][0]["recorded"] > 100
    assert found["first"] is None


def test_replay_names_an_altered_decision(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = recorded()
    placed = first(events, "execution.placed", after=100)
    write(tmp_path / "run.gyre", altered(events, placed.seq, epoch=5))
    assert gyre("replay", tmp_path / "run.gyre", "--decider", "scheduler") == 1
    out = capsys.readouterr().out
    assert f"recorded at sequence {placed.seq}: execution.placed {placed.entity}" in out
    assert f"data.epoch: recorded 5, computed {placed.data.epoch}" in out


def test_replay_of_a_damaged_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.gyre").write_text("not a log")
    assert gyre("replay", tmp_path / "run.gyre") == 2
    assert "no zstd file" in capsys.readouterr().err


def test_check_names_what_is_violated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = recorded()
    write(tmp_path / "good.gyre", events)
    assert gyre("check", tmp_path / "good.gyre", "--invariant", "ledger", "--invariant", "capacity") == 0
    placed = first(events, "execution.placed", after=first(events, "cell.role-transition").seq)
    write(tmp_path / "bad.gyre", altered(events, placed.seq, cell="cell-0"))
    capsys.readouterr()
    assert gyre("check", tmp_path / "bad.gyre", "--invariant", "capacity", "--json") == 1
    found = read_json(capsys)
    assert found["violations"][0]["seq"] == placed.seq
    assert read_manifest(tmp_path / "bad.gyre").messages == found["events"]


def test_schema_is_made_from_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert gyre("schema", "--json") == 0
    found = read_json(capsys)
    assert set(found["kinds"]) == set(KINDS)
    assert found["kinds"]["execution.placed"]["data"]["$ref"] == "#/$defs/ExecutionPlaced"
    assert gyre("schema") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(KINDS) + 1


@pytest.mark.parametrize(
    ("pattern", "near"), [("cell.joind", "cell.joined"), ("cel.*", "cell.*"), ("nothing-like-it", "gyre schema")]
)
def test_a_kind_that_nothing_says(pattern: str, near: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert gyre("events", "--kind", pattern) == 2
    error = told(capsys)
    assert pattern in error and near in error


def test_nothing_runs_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gyre("down", "--state", tmp_path / "state") == 0
    assert "nothing runs here" in capsys.readouterr().out
    assert gyre("status", "--state", tmp_path / "state") == 1
    assert "start one with `gyre run FILE`" in capsys.readouterr().err
    assert gyre("events", "--run", "r-x", "--state", tmp_path / "state") == 1
    assert "no run r-x" in capsys.readouterr().err


def test_a_service_that_does_not_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--run", "r-x", "--nats", "nats://127.0.0.1:1", "--state", tmp_path, "--here", tmp_path]
    assert gyre("service", "schedular", *words) == 2
    assert "choose from scheduler" in capsys.readouterr().err


COMMANDS = {
    "run": ["run", "{config}"],
    "up": ["up", "{config}"],
    "down": ["down"],
    "status": ["status"],
    "events": ["events"],
    "export": ["export"],
}


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - {"down"}))
def test_a_state_folder_that_is_a_file(
    command: str, config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = tmp_path / "file"
    state.write_text("")
    assert gyre(*[word.format(config=config_file) for word in COMMANDS[command]], "--state", state) in (1, 3)
    assert str(state) in told(capsys)
    assert state.read_text() == ""


def test_nothing_runs_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert gyre("down", "--state", tmp_path / "file") == 0
    assert "nothing runs here" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["status", "events", "export"])
def test_a_damaged_mesh_file(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "runs" / "r-1"
    folder.mkdir(parents=True)
    (folder / "mesh.json").write_text("{")
    assert gyre(command, "--state", tmp_path) == 1
    assert str(folder / "mesh.json") in told(capsys)


@pytest.mark.parametrize("content", [None, b"", b"no log", b"\x28\xb5\x2f\xfd"])
@pytest.mark.parametrize("command", ["check", "replay"])
def test_what_is_no_log(
    command: str, content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path
    if content is not None:
        path = tmp_path / "file"
        path.write_bytes(content)
    assert gyre(command, path) == 2
    assert str(path) in told(capsys)


def test_a_name_that_nothing_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.gyre"
    write(path, recorded())
    assert gyre("check", path, "--invariant", "leger") == 2
    assert "ledger" in told(capsys)
    assert gyre("replay", path, "--decider", "sheduler") == 2
    assert "scheduler" in told(capsys)
