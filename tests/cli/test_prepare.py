"""What a run needs is made once, appears whole, and is made again when the recipe changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from schemas.config import Config, Prepare
from schemas.errors import ConfigError, GyreError
from services.cli import prepare
from services.cli.prepare import Step

WRITE = "import sys, pathlib; out = pathlib.Path(sys.argv[1]); out.mkdir(); (out / 'x').write_text(sys.argv[2])"


def step_of(config: Config, tmp_path: Path, *command: str, makes: str = "thing") -> Step:
    import msgspec

    changed = msgspec.structs.replace(config, prepare=[Prepare(makes=makes, command=list(command))])
    [step] = prepare.steps(changed, cache=tmp_path / "cache", here=tmp_path)
    return step


def test_it_is_made_once(config: Config, tmp_path: Path) -> None:
    told: list[str] = []
    step = step_of(config, tmp_path, "{python}", "-c", WRITE, "{out}", "one")
    assert not step.ready
    for _ in range(2):
        prepare.make(step, tell=lambda step, text: told.append(step.makes))
    assert told == ["thing"]
    assert (tmp_path / "cache" / "thing" / "x").read_text() == "one"
    assert step.ready


def test_a_changed_recipe_is_made_again_and_the_old_one_kept(config: Config, tmp_path: Path) -> None:
    one = step_of(config, tmp_path, "{python}", "-c", WRITE, "{out}", "one")
    two = step_of(config, tmp_path, "{python}", "-c", WRITE, "{out}", "two")
    for step, text in ((one, "one"), (two, "two"), (one, "one")):
        prepare.make(step)
        assert (tmp_path / "cache" / "thing" / "x").read_text() == text


def test_a_changed_program_is_a_changed_recipe(config: Config, tmp_path: Path) -> None:
    program = tmp_path / "make.py"
    program.write_text("pass")
    before = step_of(config, tmp_path, "{python}", "{here}/make.py", "{out}").made
    program.write_text("pass  # otherwise")
    assert step_of(config, tmp_path, "{python}", "{here}/make.py", "{out}").made != before


def test_the_key_covers_what_a_module_of_ours_imports() -> None:
    files = {path.name for path in prepare._closure("services.mesh.tasks")}
    assert {"tasks.py", "errors.py", "units.py"} <= files
    assert "bus.py" not in files


def test_a_command_that_fails_leaves_nothing(config: Config, tmp_path: Path) -> None:
    fails = "import sys, pathlib; pathlib.Path(sys.argv[1]).mkdir(); sys.exit('no luck')"
    step = step_of(config, tmp_path, "{python}", "-c", fails, "{out}")
    with pytest.raises(GyreError, match="no luck") as caught:
        prepare.make(step)
    assert caught.value.where == str(step.log)
    assert [path.suffix for path in step.made.parent.iterdir()] == [".log"]
    assert not (tmp_path / "cache" / "thing").exists()


def test_what_a_killed_command_left_is_cleared(config: Config, tmp_path: Path) -> None:
    step = step_of(config, tmp_path, "{python}", "-c", WRITE, "{out}", "one")
    left = step.made.with_name(f".{step.made.name}.part123.part")
    left.mkdir(parents=True)
    prepare.make(step)
    assert not left.exists()


def test_an_interruption_leaves_nothing(config: Config, tmp_path: Path) -> None:
    hangs = (
        "import sys, pathlib, time; out = pathlib.Path(sys.argv[1]); out.mkdir(); print('made', flush=True);"
        "out.with_name('.' + out.name + '.part').mkdir(); time.sleep(600)"
    )
    step = step_of(config, tmp_path, "{python}", "-c", hangs, "{out}")

    def interrupt(step: Step, text: str) -> None:
        if text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare.make(step, tell=interrupt)
    assert [path.suffix for path in step.made.parent.iterdir()] == [".log"]


@pytest.mark.parametrize(
    ("command", "makes", "what"),
    [
        (["true"], "thing", "never says {out}"),
        (["true", "{out}"], "../thing", "no plain name"),
        (["true", "{out}"], "/thing", "no plain name"),
        (["true", "{out}"], "thing", "left nothing"),
        (["/no-such-program", "{out}"], "thing", "cannot run"),
    ],
)
def test_recipes_that_cannot_work(config: Config, tmp_path: Path, command: list[str], makes: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        prepare.make(step_of(config, tmp_path, *command, makes=makes))


def test_what_a_person_put_there_is_not_replaced(config: Config, tmp_path: Path) -> None:
    (tmp_path / "cache" / "thing").mkdir(parents=True)
    with pytest.raises(ConfigError, match="not made by the configuration"):
        prepare.make(step_of(config, tmp_path, "{python}", "-c", WRITE, "{out}", "one"))
