"""What a run needs is looked at before anything starts, and what is missing is named with its remedy."""

from __future__ import annotations

import errno
import os
import socket
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from services.cli import checks, preflight
from services.cli.places import Places
from services.mesh.nats_bus import connect
from tests.cli.command import gyre, read_json, told
from tests.cli.conftest import TOML, write_policy, write_tasks


def test_a_port_in_use_is_named(config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert gyre("run", config_file, "--set", f"bus.port={port}", "--state", tmp_path / "state") == 3
    error = capsys.readouterr().err
    assert f"bus.port: port {port} on 127.0.0.1 is in use" in error
    assert "choose another bus.port" in error
    assert not (tmp_path / "state").exists()


def test_a_missing_system_library_is_named(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "LIBRARIES", {"libabsent.so.9": "libabsent9"})
    words = ["run", config_file, "--set", "rollout.transport=mooncake", "--state", tmp_path / "state"]
    assert gyre(*words) == 3
    error = capsys.readouterr().err
    assert "libabsent.so.9: the system library is missing" in error
    assert "apt-get install libabsent9" in error
    assert not (tmp_path / "state").exists()


def test_a_task_without_tests_is_named(config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = Places(tmp_path / "state")
    write_policy(places.cache / "policy")
    write_tasks(places.cache / "tasks", without="tests/test.sh")
    assert gyre("run", config_file, "--state", places.root) == 2
    error = capsys.readouterr().err
    assert "task-0: the task has no tests/test.sh" in error
    assert not places.runs.exists()
    assert not places.nats.exists()
    assert places.holder() is None


def test_an_incomplete_policy_is_named(config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = Places(tmp_path / "state")
    write_policy(places.cache / "policy")
    write_tasks(places.cache / "tasks")
    (places.cache / "policy" / "tokenizer.json").unlink()
    assert gyre("run", config_file, "--state", places.root) == 3
    assert "has no tokenizer.json" in capsys.readouterr().err
    assert not places.nats.exists()


def test_two_runs_do_not_share_a_state_folder(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = Places(tmp_path / "state")
    with places.hold("the first"):
        assert gyre("run", config_file, "--state", places.root) == 3
    error = capsys.readouterr().err
    assert "(the first) runs here already" in error
    assert "gyre down" in error


def test_doctor(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert gyre("doctor", "--state", tmp_path / "state", "--json") == 0
    found = read_json(capsys)
    assert found["ok"] is True
    assert {"python", "nats-server", "torch", "mooncake", "store", "disk", "memory"} <= {
        each["name"] for each in found["checks"]
    }
    monkeypatch.setattr(sys, "version_info", (3, 12, 1, "final", 0))
    assert gyre("doctor", "--state", tmp_path / "state") == 3
    out = capsys.readouterr().out
    assert "MISSING  python" in out
    assert "python -> install Python 3.11" in out


def test_doctor_names_a_missing_bash(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    state = tmp_path / "state"
    assert gyre("doctor", "--state", state) == 3
    out = capsys.readouterr().out
    assert "MISSING  bash" in out
    assert "bash -> install bash" in out
    # A run says so before it starts anything.
    assert gyre("run", config_file, "--state", state) == 3
    assert "bash: not on the PATH" in told(capsys)
    assert not state.exists()


def test_doctor_of_a_configuration_looks_for_its_inputs(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = Places(tmp_path / "state")
    assert gyre("doctor", config_file, "--state", places.root) == 3
    out = capsys.readouterr().out
    assert "MISSING  policy" in out and "MISSING  tasks" in out
    config_file.write_text(
        TOML
        + """
[[prepare]]
makes = "policy"
command = ["{python}", "{out}"]
[[prepare]]
makes = "tasks"
command = ["{python}", "{out}"]
"""
    )
    assert gyre("doctor", config_file, "--state", places.root) == 0
    assert "is made when a run begins" in capsys.readouterr().out
    config_file.write_text(TOML)
    write_policy(places.cache / "policy")
    write_tasks(places.cache / "tasks")
    assert gyre("doctor", config_file, "--state", places.root) == 0


@pytest.mark.parametrize("words", [["open", "--nats", "{url}"], ["run", "--set", 'bus.url="{url}"']])
def test_nothing_is_made_for_a_bus_that_does_not_answer(
    words: list[str],
    config_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config_file.write_text(TOML + '[[prepare]]\nmakes = "policy"\ncommand = ["{python}", "{out}"]\n')
    monkeypatch.setattr(preflight, "connect", partial(connect, timeout_s=0.2))
    state = tmp_path / "state"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        url = f"nats://127.0.0.1:{taken.getsockname()[1]}"
        filled = [word.format(url=url) for word in words]
        assert gyre(filled[0], config_file, *filled[1:], "--state", state) == 3
    assert "no nats-server answered" in capsys.readouterr().err
    assert not state.exists()


@pytest.mark.parametrize("part", [".", "nats", "runs", "cache"])
def test_a_part_of_the_state_folder_that_cannot_be_written(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = Places(tmp_path / "state")
    locked = (places.root / part).resolve()
    for folder in (places.nats, places.runs, places.cache):
        folder.mkdir(parents=True)
    opened = tempfile.TemporaryFile

    def refusing(*, dir: Path) -> Any:
        # The superuser may write everywhere, so the refusal is ours.
        if Path(dir) == locked:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return opened(dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryFile", refusing)
    found = checks.store(places)
    assert not found.ok
    assert found.detail == f"{locked} cannot be written: Permission denied"


def test_up_tells_why_it_did_not_come_up(config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = Places(tmp_path / "state")
    assert gyre("up", config_file, "--state", places.root) == 1
    error = capsys.readouterr().err
    assert "ended with 3" in error
    assert "has no config.json" in error
    assert places.holder() is None
