"""The outputs in docs/replay.md: each `text` block is what the commands in the `sh` block above it print.

Make them again with `python -m tests.docs.outputs`. A command ends with 0, unless `# exit code N` says otherwise. What the
page's commands find is made here: a run in the state folder, a log of another version of the code, a folder of logs.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import io
import re
import shlex
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import zstandard

from replay.debugging.fields import CELL_FIELDS, FIELDS
from replay.simulator.scenario import Scenario, load
from services.cli.app import app
from tests.replay.planting import Change, planted
from tests.replay.published import stopped

PAGE = Path(__file__).parents[2] / "docs" / "replay.md"
SECTION = re.compile(r"\A.*?(?=^## In tests of your own)", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"```sh\n(.*?)```(\n\n```text\n)?(?:(?<=```text\n)(.*?)```)?", re.DOTALL)
TABLE = re.compile(r"^(?:FIELDS|\| field \| meaning \|\n(?:\|.*\n)*)", re.MULTILINE)


EARLIER = Change(
    path="services/scheduler/core/equations.py",
    old='check(WATERLEVEL, w, "<=", C_R - C_e)',
    new='check(WATERLEVEL, w, "<", C_R - C_e)',
)
"""What `other.gyre` was recorded with."""


def prepare(folder: Path) -> None:
    """What the commands find in `folder`."""
    asyncio.run(stopped(folder / "state"))
    scenario = load("small", ["run.steps=6"])
    (folder / "logs").mkdir()
    simulated(folder / "logs" / "a.gyre", scenario)
    with planted(EARLIER):
        simulated(folder / "other.gyre", scenario)
    cut(folder / "logs" / "a.gyre", folder / "logs" / "b.gyre", lines=2001)


def cut(path: Path, to: Path, *, lines: int) -> None:
    """The first lines of a log file. The page must not tell how well the compression did, so the cut is in what is compressed."""
    with path.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True) as data:
        text = data.read()
    to.write_bytes(zstandard.ZstdCompressor().compress(b"".join(text.splitlines(keepends=True)[:lines])))


def simulated(path: Path, scenario: Scenario) -> None:
    run = importlib.import_module("replay.simulator.run").Simulation(scenario, keep=True)
    run.run()
    run.write(path)


def fresh(text: str, folder: Path) -> str:
    """The page with what its commands print now; they run in `folder`."""
    found = SECTION.search(text)
    assert found is not None
    section = TABLE.sub(lambda _: fields(), found[0], count=1)
    prepare(folder)
    # The identity of the code has a commit in it.
    with contextlib.chdir(folder), mock.patch("services.cli.replay_command.code_identity", lambda: "0.2.0"):
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
            command, _, code = line.partition("  # exit code ")
            assert app(shlex.split(command)[1:]) == int(code or 0), line
    said = "\n".join(line.rstrip() for line in out.getvalue().splitlines())
    return f"```sh\n{block[1]}```" + (f"{block[2]}{said}\n```" if block[2] else "")


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        PAGE.write_text(fresh(PAGE.read_text(), Path(folder)))
