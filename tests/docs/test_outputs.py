"""What the page on replay shows is what its commands print."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from replay.simulator.scenario import load
from tests.docs.outputs import BLOCK, PAGE, SECTION, fresh, simulated


def test_the_outputs_in_the_page_on_replay_are_current(tmp_path: Path) -> None:
    page = PAGE.read_text()
    section = SECTION.search(page)
    assert section is not None and sum(bool(each[2]) for each in BLOCK.finditer(section[0])) >= 12
    assert page == fresh(page, tmp_path), "make them again: python -m tests.docs.outputs"


def test_the_python_in_the_page_on_replay_runs(tmp_path: Path) -> None:
    [code] = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    simulated(tmp_path / "run.gyre", load("small", ["run.steps=3"]))
    names: dict[str, object] = {}
    with contextlib.chdir(tmp_path):
        exec(compile(code, str(PAGE), "exec"), names)
    assert names["snapshot"]
