"""A configuration that can run nothing real, a mesh of scripted services, and a view that remembers."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from schemas.config import Config
from schemas.config_file import load
from services.cli.app import app
from services.cli.launch import Plan
from services.cli.places import Places
from services.cli.progress import Progress
from services.mesh.supervise import Spec

SCRIPT = Path(__file__).with_name("scripted.py")
ROOT = Path(__file__).parents[2]

TOML = """
name = "tiny"
steps = 2
[scheduler]
N = 2
B = 1
mu = 1
phi = 1.0
[harness]
command = ["{python}", "{instruction}"]
"""

TASK = {
    "task.toml": "",
    "instruction.md": "Do it.",
    "environment/in.txt": "in",
    "tests/test.sh": "echo 1 > $VERIFIER_LOGS/reward.txt\n",
}


class Remembering:
    """A view that keeps what it is told, and calls `react` at every change of the projection."""

    def __init__(self, react: Callable[[Progress], None] = lambda progress: None) -> None:
        self.notes: list[str] = []
        self.progress = Progress()
        self.react = react

    def update(self, progress: Progress) -> None:
        self.progress = progress
        self.react(progress)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def busy(self, text: str) -> None:
        self.notes.append(text)

    def memory(self, rss_bytes: int) -> None:
        assert rss_bytes > 0

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture(scope="session")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Log of a small simulated run; nobody writes to it."""
    path = tmp_path_factory.mktemp("log") / "small.gyre"
    assert app(["simulate", "small", "--set", "run.steps=3", "-o", str(path)]) == 0
    return path


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TOML)
    return path


@pytest.fixture
def config(config_file: Path) -> Config:
    return load(config_file)


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path / "state")


@pytest.fixture
def go(tmp_path: Path) -> Path:
    """Written to, it lets the scripted scheduler end the run."""
    path = tmp_path / "go"
    os.mkfifo(path)
    return path


@pytest.fixture
def plan(go: Path) -> Callable[..., Plan]:
    """The plan of a scripted mesh of these roles."""

    def make(*roles: str) -> Plan:
        def specs(run: str, url: str) -> list[Spec]:
            return [
                Spec(
                    name=role,
                    command=[sys.executable, str(SCRIPT), role, run, url, str(go)],
                    env={"PYTHONPATH": str(ROOT)},
                    rank=rank,
                )
                for rank, role in enumerate(roles)
            ]

        return specs

    return make


def write_tasks(folder: Path, *, without: str = "") -> None:
    for name, text in TASK.items():
        if name != without:
            path = folder / "task-0" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


def write_policy(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_text("{}")
