"""Task folders: what is read, what is refused and how it is said."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from schemas.errors import TaskError
from services.mesh.tasks import list_tasks, read_task, task_refs

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "make_tasks.py"


def make_task(folder: Path, toml: str = "[agent]\ntimeout_sec = 30.0\n[verifier]\ntimeout_sec = 5\n") -> Path:
    (folder / "environment").mkdir(parents=True)
    (folder / "tests").mkdir()
    (folder / "task.toml").write_text(toml)
    (folder / "instruction.md").write_text("Do it.\n")
    (folder / "environment" / "in.txt").write_text("ada\n")
    (folder / "tests" / "test.sh").write_text("echo 1 > $VERIFIER_LOGS/reward.txt\n")
    return folder


def test_reads_a_task(tmp_path: Path) -> None:
    task = read_task(make_task(tmp_path / "card"))
    assert (task.name, task.agent_timeout_s, task.verifier_timeout_s) == ("card", 30.0, 5.0)
    assert len(task.digest) == 64


def test_timeouts_are_the_runs_where_a_task_says_nothing(tmp_path: Path) -> None:
    task = read_task(make_task(tmp_path / "card", toml=""))
    assert (task.agent_timeout_s, task.verifier_timeout_s) == (0.0, 0.0)


def test_digest_is_of_content_alone(tmp_path: Path) -> None:
    one, two = make_task(tmp_path / "a" / "card"), make_task(tmp_path / "b" / "card")
    assert read_task(one).digest == read_task(two).digest


@pytest.mark.parametrize("change", ["content", "name", "mode", "new", "moved bytes"])
def test_digest_notices_every_change(tmp_path: Path, change: str) -> None:
    folder = make_task(tmp_path / "card")
    before = read_task(folder).digest
    file = folder / "environment" / "in.txt"
    match change:
        case "content":
            file.write_text("ben\n")
        case "name":
            file.rename(file.with_name("on.txt"))
        case "mode":
            file.chmod(0o755)
        case "new":
            (folder / "tests" / "expected").write_text("")
        case _:
            file.rename(file.with_name("in.txta"))
            file.with_name("in.txta").write_text("da\n")
    assert read_task(folder).digest != before


@pytest.mark.parametrize("part", ["task.toml", "instruction.md", "tests/test.sh"])
def test_names_what_is_missing(tmp_path: Path, part: str) -> None:
    folder = make_task(tmp_path / "card")
    (folder / part).unlink()
    with pytest.raises(TaskError) as error:
        read_task(folder)
    assert part in error.value.what and str(folder) in str(error.value) and error.value.remedy


def test_a_folder_without_tests_says_what_the_script_must_do(tmp_path: Path) -> None:
    folder = make_task(tmp_path / "card")
    (folder / "tests" / "test.sh").unlink()
    with pytest.raises(TaskError, match=r"reward\.txt"):
        read_task(folder)


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ("[agent", "not valid TOML"),
        ("[agent]\ntimeout_sec = 'long'", "timeout_sec = 'long'"),
        ("[agent]\ntimeout_sec = -1", "timeout_sec = -1"),
        ("[verifier]\ntimeout_sec = 0", "timeout_sec = 0"),
        ("[verifier]\ntimeout_sec = inf", "timeout_sec = inf"),
        ("[verifier]\ntimeout_sec = true", "timeout_sec = True"),
    ],
)
def test_refuses_a_bad_toml(tmp_path: Path, toml: str, said: str) -> None:
    with pytest.raises(TaskError) as error:
        read_task(make_task(tmp_path / "card", toml=toml))
    assert said in error.value.what


def test_a_section_that_is_a_value_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="agent"):
        read_task(make_task(tmp_path / "card", toml="agent = 3"))


def test_lists_by_name_and_passes_over_what_is_no_task(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        make_task(tmp_path / name)
    (tmp_path / ".cache").mkdir()
    (tmp_path / "README.md").write_text("")
    refs = task_refs(list_tasks(tmp_path))
    assert [ref.name for ref in refs] == ["a", "b", "c"]
    assert refs[0].agent_timeout_s == 30.0


def test_all_errors_of_a_folder_in_one_message(tmp_path: Path) -> None:
    make_task(tmp_path / "good")
    (make_task(tmp_path / "one") / "tests" / "test.sh").unlink()
    (make_task(tmp_path / "two") / "task.toml").write_text("x = ")
    with pytest.raises(TaskError) as error:
        list_tasks(tmp_path)
    said = str(error.value)
    assert "2 tasks" in said and "tests/test.sh" in said and "two" in said and "not valid TOML" in said


@pytest.mark.parametrize("there", [True, False])
def test_no_task_at_all_is_an_error(tmp_path: Path, there: bool) -> None:
    folder = tmp_path / "tasks"
    if there:
        folder.mkdir()
    with pytest.raises(TaskError) as error:
        list_tasks(folder)
    assert error.value.remedy


def test_the_quickstarts_tasks_are_tasks(tmp_path: Path) -> None:
    subprocess.run([sys.executable, QUICKSTART, "--out", tmp_path, "--count", "3"], check=True, capture_output=True)
    tasks = list_tasks(tmp_path)
    assert len(tasks) == 3 and len({task.digest for task in tasks}) == 3
