"""The documents against the code: commands parse, targets and files exist, generated pages are current."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from schemas.config_file import load
from services.cli.app import app
from services.cli.schema_command import events_page

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#]+)\)")
SOURCE = re.compile(r"`((?:services|schemas|replay|tests|examples|deploy|docs)/[\w./-]+)`")


def commands() -> list[str]:
    lines = []
    for page in PAGES:
        for language, body in BLOCK.findall(page.read_text()):
            if language == "sh":
                lines += [line.partition(" #")[0].strip() for line in body.splitlines() if line.strip()]
    return lines


@pytest.mark.parametrize("line", [line for line in commands() if line.startswith("gyre ")])
def test_a_command_in_the_documents_parses(line: str) -> None:
    words = shlex.split(line)[1:]
    # Raises on an unknown command or option.
    app.parse_args(words, exit_on_error=False, print_error=False)


@pytest.mark.parametrize("line", [line for line in commands() if line.startswith("make ")])
def test_a_target_in_the_documents_exists(line: str) -> None:
    target = shlex.split(line)[1]
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), line


def test_every_command_in_the_documents_is_tested() -> None:
    assert commands()
    assert [line for line in commands() if line.split()[0] not in ("gyre", "make")] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_named_files_exist(page: Path) -> None:
    text = page.read_text()
    for target in LINK.findall(text):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
    for source in SOURCE.findall(text):
        path = source.replace("NAME", "scheduler")
        assert (ROOT / path).exists(), f"{page.name} names {source}"


def test_the_page_of_events_is_current() -> None:
    assert (ROOT / "docs" / "events.md").read_text() == events_page() + "\n", (
        "make it again: gyre schema --markdown > docs/events.md"
    )


def test_functions_named_in_the_page_on_scheduling_exist() -> None:
    code = "".join(path.read_text() for path in (ROOT / "services" / "scheduler" / "core").glob("*.py"))
    for row in re.findall(r"^\| .*\|$", (ROOT / "docs" / "scheduling.md").read_text(), re.MULTILINE)[2:]:
        for name in re.findall(r"`(\w+)`", row.split("|")[2]):
            assert f"def {name}(" in code, name


def test_python_in_the_documents_compiles() -> None:
    for page in PAGES:
        for language, body in BLOCK.findall(page.read_text()):
            if language == "python":
                compile(body, str(page), "exec")


def test_overrides_named_in_the_quickstart_page_are_accepted() -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text()
    rows = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    overrides = [found for row in rows for found in re.findall(r"`([\w.]+=[^`]+)`", row)]
    assert len(overrides) >= 5
    load(ROOT / "examples" / "quickstart.toml", [each for each in overrides if not each.startswith("scheduler.")])
    load(ROOT / "examples" / "quickstart.toml", [each for each in overrides if each.startswith("scheduler.")])


def test_make_help_lists_every_target_of_the_documents() -> None:
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for line in commands():
        if line.startswith("make "):
            assert f"make {shlex.split(line)[1]} " in shown
