"""`gyre simulate`: one scenario, its log and picture, the numbers of its world, and suites."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from replay.simulator.scenario import Paper, changed, load
from schemas.errors import ConfigError
from services.cli.app import app


def _json(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, object]]:
    code = app([*argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_scenario_log_and_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log, picture = tmp_path / "small.gyre", tmp_path / "pictures" / "small.svg"
    code, said = _json(capsys, "simulate", "small", "--set", "run.steps=6", "-o", str(log), "--timeline", str(picture))
    assert code == 0
    assert said["outcome"]["steps"] == 6  # type: ignore[index]
    assert said["headroom"]["above_pct"] > 0  # type: ignore[index]
    assert picture.read_text().startswith("<svg")
    assert app(["check", str(log)]) == 0
    assert app(["replay", str(log)]) == 0


def test_text_names_the_papers_hours_where_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert app(["simulate", "small", "--set", "run.steps=3"]) == 0
    assert "paper" not in capsys.readouterr().out
    overrides = ["--set", "run.steps=3", "--set", "run.scheduler.B=2", "--set", "run.cells.capacity=9"]
    assert app(["simulate", "E0", *overrides]) == 0
    assert "16.12" in capsys.readouterr().out


def test_parameters_have_their_origin(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = _json(capsys, "simulate", "E0", "--parameters")
    assert code == 0
    assert said["to_train_s"] == {"value": 8.52, "origin": "given"}
    assert said["work_node_h"]["origin"] == "fitted"  # type: ignore[index]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "nothing given"),
        (["E0", "--fit"], "FILE and --fit given"),
        (["--suite", "ablations"], "choose from ablation"),
        (["--suite", "ablation", "--surfaces", "pyproject.toml"], "gyre simulate --fit"),
        (["--suite", "headroom", "--only", "E9"], "no name begins with 'E9'"),
        (["--suite", "speedups", "--seeds", "0"], "at least one"),
        (["E9"], "no such scenario"),
        (["small", "--set", "run.steps=3", "--timeline", "/dev/null/x.svg"], "cannot write"),
    ],
)
def test_what_is_wrong_is_said(argv: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        app(["simulate", *argv])


def test_headroom_of_named_rows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("replay.simulator.workloads.every_scenario", lambda: [load("small")])
    code, said = _json(capsys, "simulate", "--suite", "headroom", "--only", "small", "--seeds", "2", "--jobs", "1")
    assert code == 0
    assert set(said["figures"]) == {"above_bound_small_pct"}  # type: ignore[call-overload]


def test_surfaces_are_measured_again_when_they_are_past(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The whole suite, of one row that plays fast."""
    path = tmp_path / "surfaces.json"
    row = msgspec.structs.replace(changed(load("small"), name="E0", steps=3), paper=Paper(hours=6.0))
    monkeypatch.setattr("replay.simulator.fit.load", lambda name, overrides=None: row)
    monkeypatch.setattr("replay.simulator.fit.measure.__defaults__", (("A0", "C0", "E0", "E1"),))
    argv = ["simulate", "--suite", "ablation", "--seeds", "1", "--jobs", "1", "--surfaces", str(path)]
    _json(capsys, *argv)
    kept = path.read_bytes()
    path.write_bytes(kept.replace(b'"made_of": "', b'"made_of": "past '))
    _json(capsys, *argv)
    assert path.read_bytes() == kept
