"""`gyre bench replay`: what it measures is said as data, and of the bounds those that are missed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from services.cli import bench_replay
from services.cli.bench_replay import Measured, replay_bench
from tests.replay.recorded import recorded, write


@pytest.fixture
def real(tmp_path: Path) -> Path:
    write(tmp_path / "real.gyre", recorded(steps=2))
    return tmp_path / "real.gyre"


def test_logs_are_made_replayed_and_measured(real: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replay_bench(real, sizes=[2000, 1000], folder=tmp_path, json=True)
    said = msgspec.json.decode(capsys.readouterr().out)
    figures = said["figures"]
    assert set(said["targets"]) <= set(figures)
    assert [each["events"] for each in said["runs"]] == [1000, 2000]
    assert figures["same"] is True
    assert figures["events_per_s"] > 0 and figures["peak_rss_mb_2k"] > 0 and 0 < figures["share_of_bare_rate"]
    assert {each.name for each in tmp_path.glob("simulated-*.gyre")} == {"simulated-1000.gyre", "simulated-2000.gyre"}


def test_the_memory_of_the_one_who_asks_is_not_the_replays(real: Path) -> None:
    ballast = b"x" * (400 << 20)
    assert bench_replay.measure(real).peak_rss_mb < len(ballast) >> 20


@pytest.mark.parametrize(
    ("share", "peaks", "same", "last"),
    [
        (0.6, (50.0, 60.0), True, "ok"),
        (0.4, (50.0, 60.0), True, "missed: share_of_bare_rate >= 0.5"),
        (0.6, (50.0, 160.0), False, "missed: rss_growth_mb <= 64, same == true"),
    ],
)
def test_only_what_is_missed_is_named(
    share: float,
    peaks: tuple[float, float],
    same: bool,
    last: str,
    real: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def measure(path: Path) -> Measured:
        events = int(path.stem.partition("-")[2])
        return Measured(events=events, cpu_s=1.0, peak_rss_mb=peaks[events > 1000], ok=same)

    monkeypatch.setattr(bench_replay, "share_of_bare_rate", lambda log: share)
    monkeypatch.setattr(bench_replay, "simulated", lambda path, size: None)
    monkeypatch.setattr(bench_replay, "measure", measure)
    code = replay_bench(real, sizes=[1000, 2000], folder=tmp_path, json=False)
    assert capsys.readouterr().out.splitlines()[-1] == last
    assert code == (0 if last == "ok" else 1)
