"""`gyre bench scenarios` on a scenario that plays in no time."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from replay.logfile import read
from replay.simulator.scenario import find
from schemas.errors import ConfigError
from services.cli import bench_scenarios
from services.cli.app import app


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(f'base = "{find("small")}"\n[run]\nname = "tiny"\nsteps = 3\n')
    return path


def test_a_scenario_is_simulated_and_replayed(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app(["bench", "scenarios", "--scenario", str(tiny), "--folder", str(tmp_path), "--json"]) == 0
    said = msgspec.json.decode(capsys.readouterr().out)
    assert (said["name"], said["ok"], said["figures"]["differ"]) == ("scenarios", True, 0)
    [run] = said["runs"]
    assert (run["scenario"], run["strategy"]) == ("tiny", "elastic")
    assert run["events"] == said["figures"]["events"] == len(read(tmp_path / "tiny.gyre"))
    assert run["decisions"] == run["same"] > 0 and run["hours"] == pytest.approx(3.4, abs=1)


def test_one_that_differs_fails(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = bench_scenarios.play

    def play(name: str, seed: int, path: Path) -> bench_scenarios.Played:
        played = whole(name, seed, path)
        return msgspec.structs.replace(played, same=played.same - 1, ok=False)

    monkeypatch.setattr(bench_scenarios, "play", play)
    assert app(["bench", "scenarios", "--scenario", str(tiny)]) == 1
    out = capsys.readouterr().out
    assert "1 scenarios, 1 differ" in out and "missed: differ == 0" in out


def test_an_unknown_scenario_is_refused() -> None:
    with pytest.raises(ConfigError, match="no such scenario"):
        bench_scenarios.scenarios_bench(["smal"], seed=0, folder=None, json=False)
