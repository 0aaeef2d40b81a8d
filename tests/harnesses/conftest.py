"""Harness programs, installed while other tests run, and the tokenizer of the scripted policy."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harnesses.install import ROOT, NotInstalled, harnesses, install
from tests.proxy.conftest import encoder, policy, tokenizer  # noqa: F401

Program = Callable[[str], Path]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Tests of real harnesses are about to run: what they need is installed meanwhile."""
    wanted = any(item.get_closest_marker("harness") for item in session.items)
    names = [name for name, harness in harnesses().items() if harness.automatic and not harness.installed]
    if wanted and names and not session.config.option.collectonly:
        session.config.stash[_INSTALLING] = subprocess.Popen(
            [sys.executable, "-m", "tests.harnesses.install", *names],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


def pytest_sessionfinish(session: pytest.Session) -> None:
    if process := session.config.stash.get(_INSTALLING, None):
        process.terminate()
        process.wait()


_INSTALLING = pytest.StashKey[subprocess.Popen[bytes]]()


@pytest.fixture(scope="session")
def program() -> Program:
    """The path of a harness; a test that cannot have it is skipped with the reason."""

    def path(name: str) -> Path:
        harness = harnesses()[name]
        if not harness.automatic and not harness.installed:
            pytest.skip(f"{name} {harness.version} is not installed: run make harnesses")
        try:
            return install(harness)
        except NotInstalled as why:
            pytest.skip(f"{name} {harness.version} cannot be installed here: {why}")

    return path
