"""`gyre timeline`: a log drawn as picture, page and document."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import msgspec
import pytest

from replay.timeline import Document
from schemas.errors import ConfigError
from services.cli.app import app


@pytest.mark.parametrize(("suffix", "begin"), [("svg", "<svg"), ("html", "<!doctype html>"), ("json", '{"format":"gyre-timeline"')])
def test_a_log_is_drawn(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str, begin: str) -> None:
    file = tmp_path / "pictures" / f"run.{suffix}"
    capsys.readouterr()
    assert app(["timeline", str(log), "-o", str(file), "--title", "Small", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert file.read_text().startswith(begin)
    assert "Small" in file.read_text()
    assert said["bytes"] == file.stat().st_size
    assert said["cells"] == 4 and said["listed"] == said["events"] > 1000 and said["left_out"] == {}


def test_a_title_is_found_and_the_document_is_whole(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.json"
    assert app(["timeline", str(log), "-o", str(file)]) == 0
    document = msgspec.json.decode(file.read_bytes(), type=Document)
    assert document.title == f"{document.run}, strategy elastic" in capsys.readouterr().out
    assert document.finished == "steps_done"


@pytest.mark.parametrize(
    ("output", "said"), [("run.png", "not written as .png"), ("run", "without suffix"), ("/dev/null/run.svg", "cannot write")]
)
def test_what_cannot_be_written_is_said(log: Path, tmp_path: Path, output: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        app(["timeline", str(log), "-o", str(tmp_path / output)])


def test_the_page_in_the_documents_is_made_by_its_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docs = Path(__file__).parents[2] / "docs"
    block = re.search(r"^```sh\n(.*?)^```$", (docs / "timeline.md").read_text(), re.MULTILINE | re.DOTALL)
    assert block is not None
    monkeypatch.chdir(tmp_path)
    for line in block[1].splitlines():
        assert app(shlex.split(line, comments=True)[1:]) == 0
    assert {path.suffix for path in tmp_path.iterdir()} == {".gyre", ".svg", ".html", ".json"}
    made, shown = (path.read_text() for path in (tmp_path / "timeline-e0.svg", docs / "images" / "timeline-e0.svg"))
    # A simulation that changes moves the lines; it is to show the same things.
    assert _words(made) == _words(shown), "make it again: the first two commands of docs/timeline.md, in docs/images"


def _words(svg: str) -> list[str]:
    return sorted(re.findall(r">([^<>]+)</text>", svg))
