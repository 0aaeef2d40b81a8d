"""A log file without our code: zstd, JSON and the page that describes it. Nothing secret is in it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import replay
from replay.logwriter import LogWriter
from schemas.config_file import from_tree
from schemas.errors import ConfigError
from services.mesh.tokens import make_token
from tests.replay.recorded import recorded, stored, write

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "log-files.md"
EVENTS = recorded(steps=2)
needs_zstd = pytest.mark.skipif(shutil.which("zstd") is None, reason="no zstd here")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write(tmp_path / "run.gyre", EVENTS)
    return tmp_path / "run.gyre"


def python_of_the_page() -> str:
    [code] = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return str(code)


@needs_zstd
def test_zstd_and_json_are_enough(file: Path) -> None:
    out = subprocess.run(f"zstd -dc {file} | head -n 3", shell=True, capture_output=True, text=True, check=True).stdout
    manifest, first, second = map(json.loads, out.splitlines())
    assert (manifest["format"], manifest["run"], manifest["messages"]) == ("gyre-log", "r-test", len(EVENTS))
    assert manifest["config"]["name"] == "small" and manifest["seed"] == 0
    assert sum(manifest["counts"].values()) == len(EVENTS) and manifest["counts"].keys() == manifest["kinds"].keys()
    assert (first["seq"], first["data"]["kind"], second["seq"]) == (1, "run.started", 2)
    assert first["headers"]["Nats-Msg-Id"] == first["data"]["id"]
    assert (manifest["first_us"], manifest["last_us"]) == (EVENTS[0].time_us, EVENTS[-1].time_us)


@needs_zstd
def test_the_page_proves_a_file(file: Path) -> None:
    def prove() -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-I", "-c", python_of_the_page()]
        return subprocess.run(words, cwd=file.parent, capture_output=True, text=True, check=False)

    assert prove().returncode == 0, prove().stderr
    lines = subprocess.run(["zstd", "-dc", file], capture_output=True, check=True).stdout.splitlines(keepends=True)
    lines[9] = lines[9].replace(b'"time_us":', b'"time_us":1', 1)
    (file.parent / "lines").write_bytes(b"".join(lines))
    subprocess.run(["zstd", "-qf", file.parent / "lines", "-o", file], check=True)
    assert "sequence 9 was altered" in prove().stderr


def test_a_log_is_read_as_often_as_one_likes(file: Path) -> None:
    log = replay.read(file)
    assert list(log) == list(log) == EVENTS
    assert len(log) == len(EVENTS) and [each.seq for each in log.messages()] == [each.seq for each in EVENTS]
    assert json.loads(log.data_of(1))["seed"] == 0 and log.data_of(10**9) == b""


def test_secrets_stay_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the harness service gets from its own environment is named in the configuration, never said."""
    canary = "sk-canary-5f3a"
    monkeypatch.setenv("CANARY_KEY", canary)
    events = recorded(steps=2, harness__command=["true"], harness__env={"CANARY_KEY": "{env:CANARY_KEY}"})
    path = tmp_path / "run.gyre"
    with LogWriter(path) as writer:
        for each in events:
            writer.add(stored(each))
        writer.finish()
    whole = b"".join(message.data + repr(message.headers).encode() for message in replay.read(path).messages())
    assert b"{env:CANARY_KEY}" in whole and canary.encode() not in whole
    executions = {each.entity for each in events if each.kind == "execution.placed"}
    assert executions and not any(make_token(b"key", name, 0).encode() in whole for name in executions)


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("ANTHROPIC_API_KEY", True),
        ("HF_TOKEN", True),
        ("db_password", True),
        ("AWS_SECRET", True),
        ("TOKENIZERS_PARALLELISM", False),
        ("MAX_TOKENS", False),
        ("KEYBOARD", False),
    ],
)
def test_a_literal_secret_in_the_configuration_is_refused(name: str, refused: bool) -> None:
    def load(value: str) -> None:
        from_tree({"name": "x", "steps": 3, "harness": {"command": ["true"], "env": {name: value}}}, where="test")

    load(f"{{env:{name}}}")
    load("")
    if refused:
        with pytest.raises(ConfigError, match=f"harness.env.{name} looks like a secret") as caught:
            load("literal")
        assert "{env:" in caught.value.remedy
    else:
        load("literal")
