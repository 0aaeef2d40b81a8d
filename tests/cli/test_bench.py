"""`gyre bench`: what it runs, what it adds up, when it is content. The runs themselves are scripted answers."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from schemas.errors import ConfigError
from services.cli import bench_command
from services.cli.log_lines import Complaints, complaints

RUN = "r-20260102-0304-5f3c"


class Scripted:
    """Answers of `gyre`, and what was asked."""

    def __init__(self, state: Path, *, missed: list[str] | None = None, log: str = "", replayed: int = 0) -> None:
        self.asked: list[list[str]] = []
        self.missed, self.replayed = missed or [], replayed
        logs = state / "runs" / RUN / "logs"
        logs.mkdir(parents=True)
        (logs / "proxy.log").write_text(log)

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        self.asked.append(list(words))
        summary: dict[str, Any] = {
            "run": RUN,
            "figures": {"steps": 20, "processes": 16, "kills": 16, "attempts_lost": 9, "seconds": 270.5},
            "targets": {"kills": "== 16"},
            "missed": self.missed,
        }
        out = msgspec.json.encode(summary).decode() if words[0] == "run" else ""
        code = self.replayed if words[0] == "replay" else 0
        return subprocess.CompletedProcess(list(words), code, stdout=out, stderr="")


def measured(
    name: str, scripted: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **chosen: Any
) -> tuple[int, list[list[str]]]:
    monkeypatch.setattr(bench_command, "_gyre", scripted)
    file = tmp_path / "quickstart.toml"
    file.touch()
    words = {"seeds": None, "count": None, **chosen}
    code = bench_command.bench_command(name, file=file, state=tmp_path / "state", json=True, **words)
    return code, scripted.asked


def test_chaos_kills_with_each_seed_and_proves_each_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted = Scripted(tmp_path / "state", log='{"event": "engine lost", "level": "warning"}\n')
    code, asked = measured("chaos", scripted, tmp_path, monkeypatch)
    assert code == 0
    runs = [words for words in asked if words[0] == "run"]
    assert [words[words.index("--chaos") + 1] for words in runs] == ["0", "1"]
    assert [words[words.index("--set") + 1] for words in runs] == ["seed=0", "seed=1"]
    assert [words[0] for words in asked] == ["run", "export", "check", "replay"] * 2
    answer = msgspec.json.decode(capsys.readouterr().out)
    assert (answer["name"], answer["ok"]) == ("chaos", True)
    figures = answer["figures"]
    assert (figures["processes[seed=1]"], figures["kills[seed=1]"], figures["attempts_lost[seed=0]"]) == (16, 16, 9)
    assert (figures["log_warnings[seed=0]"], figures["log_tracebacks[seed=0]"]) == (1, 0)
    assert answer["targets"]["kills[seed=0]"] == "== 16"
    assert answer["targets"]["log_tracebacks[seed=0]"] == "== 0"


@pytest.mark.parametrize(
    "trouble",
    [{"missed": ["kills"]}, {"log": "Traceback (most recent call last):\nKeyError: 1\n"}, {"replayed": 1}],
    ids=["target", "traceback", "replay"],
)
def test_one_thing_missed_and_it_is_not_ok(
    trouble: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _ = measured("chaos", Scripted(tmp_path / "state", **trouble), tmp_path, monkeypatch, count=1)
    assert code == 1


def test_seeds_are_named_or_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, asked = measured("quickstart", Scripted(tmp_path / "state"), tmp_path, monkeypatch, seeds=[7])
    runs = [words for words in asked if words[0] == "run"]
    assert code == 0
    assert [words[words.index("--set") + 1 :] for words in runs] == [["seed=7"], ["seed=7", "--set", "trainer.lr=0"]]
    other = tmp_path / "other"
    other.mkdir()
    for wrong in ({"seeds": [1], "count": 2}, {"count": 0}):
        with pytest.raises(ConfigError, match="seeds"):
            measured("chaos", Scripted(other / str(len(wrong))), tmp_path, monkeypatch, **wrong)


def test_lines_of_libraries_are_no_complaints(tmp_path: Path) -> None:
    lines = [
        '{"event": "recovered", "level": "info"}',
        '{"event": "failed", "level": "error", "what": "the engine ended"}',
        '{"event": "crashed", "level": "error", "exception": "Traceback (most recent call last):\\n  KeyError"}',
        "WARNING: Logging before InitGoogleLogging() is written to STDERR",
        "Traceback (most recent call last):",
        "[1, 2]",
        "\xff",
    ]
    (tmp_path / "a.log").write_bytes("\n".join(lines).encode("latin-1"))
    assert complaints(tmp_path) == Complaints(warnings=0, errors=2, tracebacks=2)
    assert complaints(tmp_path / "absent") == Complaints()
