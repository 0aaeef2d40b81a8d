"""A harness is installed once, and what cannot be had says why."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from tests.harnesses import install as installer
from tests.harnesses.install import Harness, NotInstalled, harnesses, install

NPM = """#!/bin/sh
echo "$@" >> "$(dirname "$0")/asked"
case "$*" in *absent*) echo "404 Not Found" >&2; exit 1 ;; esac
mkdir -p "$3/bin" && touch "$3/bin/agent"
"""


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Harness:
    """Of a registry that knows one package."""
    monkeypatch.setattr(installer, "FOLDER", tmp_path / "harnesses")
    (tmp_path / "npm").write_text(NPM)
    (tmp_path / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return Harness(registry="npm", package="@some/agent", version="1.2.3", program="bin/agent", automatic=True)


def test_once_and_by_its_version(harness: Harness, tmp_path: Path) -> None:
    assert not harness.installed
    assert install(harness) == install(harness) == tmp_path / "harnesses" / "some-agent-1.2.3" / "bin" / "agent"
    (asked,) = (tmp_path / "asked").read_text().splitlines()
    assert asked.endswith(" @some/agent@1.2.3") and harness.installed


def test_a_reason_for_what_is_not_installed(harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotInstalled, match="npm ended with 1: 404 Not Found"):
        install(msgspec.structs.replace(harness, package="absent"))
    with pytest.raises(NotInstalled, match="has no bin/other on this platform"):
        install(msgspec.structs.replace(harness, program="bin/other"))
    assert not harness.installed
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with pytest.raises(NotInstalled, match=r"npm is not on the PATH: install Node\.js"):
        install(harness)


def test_every_version_is_pinned() -> None:
    known = harnesses()
    assert len({harness.folder for harness in known.values()}) == len(known) == 6
    assert all(harness.version.count(".") == 2 for harness in known.values())
    assert all("@" in each for harness in known.values() for each in harness.needs)
