"""The outputs in docs/replay.md: each `text` block is what the command in the `sh` block above it prints.

Make them again with `python -m tests.docs.outputs`.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path
from tempfile import TemporaryDirectory

from replay.debugging.fields import CELL_FIELDS, FIELDS
from services.cli.app import app

PAGE = Path(__file__).parents[2] / "docs" / "replay.md"
SECTION = re.compile(r"^## Debugging\n.*?(?=^## )", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"```sh\n(.*?)```(\n\n```text\n)?(?:(?<=```text\n)(.*?)```)?", re.DOTALL)
TABLE = re.compile(r"^(?:FIELDS|\| field \| meaning \|\n(?:\|.*\n)*)", re.MULTILINE)


def fresh(text: str, folder: Path) -> str:
    """The page with what its commands print now; they run in `folder`."""
    found = SECTION.search(text)
    assert found is not None
    section = TABLE.sub(lambda _: fields(), found[0], count=1)
    with contextlib.chdir(folder):
        section = BLOCK.sub(_run, section)
    return text[: found.start()] + section + text[found.end() :]


def fields() -> str:
    """The table of named fields."""
    rows = [(f"`{each.name}`", each.meaning) for each in FIELDS.values()]
    rows += [(f"`cells[I].{each.name}`, `pool[I].{each.name}`", each.meaning) for each in CELL_FIELDS.values()]
    told = [(name, meaning) for name, meaning in rows if meaning]
    plain = ", ".join(name for name, meaning in rows if not meaning)
    lines = ["| field | meaning |", "| --- | --- |", *(f"| {name} | {meaning} |" for name, meaning in told)]
    return "\n".join([*lines, f"| {plain} | as they are called |"]) + "\n"


def _run(block: re.Match[str]) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        for line in block[1].splitlines():
            assert app(shlex.split(line)[1:]) == 0, line
    said = "\n".join(line.rstrip() for line in out.getvalue().splitlines())
    return f"```sh\n{block[1]}```" + (f"{block[2]}{said}\n```" if block[2] else "")


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        PAGE.write_text(fresh(PAGE.read_text(), Path(folder)))
