"""What the page on replay shows is what its commands print."""

from __future__ import annotations

from pathlib import Path

from tests.docs.outputs import BLOCK, PAGE, SECTION, fresh


def test_the_outputs_in_the_page_on_replay_are_current(tmp_path: Path) -> None:
    page = PAGE.read_text()
    section = SECTION.search(page)
    assert section is not None and sum(bool(each[2]) for each in BLOCK.finditer(section[0])) >= 6
    assert page == fresh(page, tmp_path), "make them again: python -m tests.docs.outputs"
