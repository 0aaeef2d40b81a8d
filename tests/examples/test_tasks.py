"""The quickstart's tasks: Harbor's format, the same every time, and tests that pay by the line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from services.mesh.tasks import list_tasks

PROGRAM = Path(__file__).parents[2] / "examples" / "quickstart" / "make_tasks.py"


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), "--out", str(folder), *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    assert make(folder, "--count", "5").returncode == 0
    return folder


def score(task: Path, folder: Path, content: str | None) -> float:
    """What tests/test.sh writes for a workspace whose out.txt holds `content`."""
    work, logs = folder / "work", folder / "logs"
    work.mkdir()
    if content is not None:
        (work / "out.txt").write_text(content)
    env = {"PATH": "/nowhere", "VERIFIER_LOGS": str(logs)}
    logs.mkdir()
    subprocess.run(["/bin/bash", str(task / "tests" / "test.sh")], cwd=work, env=env, check=True)
    return float((logs / "reward.txt").read_text())


def test_the_harness_accepts_them_and_they_are_always_the_same(tasks: Path, tmp_path: Path) -> None:
    make(tmp_path, "--count", "5")
    first, again = list_tasks(tasks), list_tasks(tmp_path)
    assert [task.digest for task in first] == [task.digest for task in again]
    assert len({task.digest for task in first}) == 5 and first[0].agent_timeout_s == 300.0


def test_sets_with_other_starts_share_no_card(tasks: Path, tmp_path: Path) -> None:
    make(tmp_path, "--count", "5", "--start", "5")
    read = lambda folder: {path.read_text() for path in folder.glob("*/environment/in.txt")}  # noqa: E731
    assert len(read(tasks) | read(tmp_path)) == 10


def test_too_many_are_refused(tmp_path: Path) -> None:
    done = make(tmp_path, "--count", "5", "--start", "1596")
    assert done.returncode != 0 and "1600 cards" in done.stderr and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("lines", "reward"),
    [
        (None, 0.0),
        ([], 0.0),
        (["todo", "todo", "todo"], 0.0),
        (["name={name}"], 0.25),
        (["{name}", "color={color}", "size:{size}", "done"], 0.5),
        (["name={name}", "color={color}", "size={size}", ""], 0.75),
        (["", "name={name}", "color={color}", "size={size}", "done"], 0.0),
        (["name={name}", "color={color}", "size={size}", "done"], 1.0),
        (["name={name}", "color={color}", "size={size}", "done", "more"], 1.0),
    ],
)
def test_partial_rewards(tasks: Path, tmp_path: Path, lines: list[str] | None, reward: float) -> None:
    task = tasks / "card-0002"
    name, color, size = (task / "environment" / "in.txt").read_text().strip().split(",")
    content = None if lines is None else "\n".join(lines).format(name=name, color=color, size=size)
    assert score(task, tmp_path, content) == reward


def test_the_solution_solves_it(tasks: Path, tmp_path: Path) -> None:
    task = tasks / "card-0003"
    work = tmp_path / "solved"
    work.mkdir()
    (work / "in.txt").write_text((task / "environment" / "in.txt").read_text())
    subprocess.run(["bash", str(task / "solution" / "solve.sh")], cwd=work, check=True)
    assert score(task, tmp_path, (work / "out.txt").read_text()) == 1.0
