"""Two real SGLang servers for all tests of this folder, the policies that they serve, and the figures that were measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from tests.sglang.install import installed
from tests.sglang.policies import shaken, taught, wide
from tests.sglang.scoring import Gap
from tests.sglang.server import Server

CONTEXT = 1024

_FIGURES = pytest.StashKey[dict[str, Gap]]()
Report = Callable[[str, Gap], None]


class Policies(msgspec.Struct, frozen=True):
    """Folders of one architecture and tokenizer."""

    taught: Path
    shaken: Path
    wide: Path
    other: Path
    """As wide, of another seed."""


@pytest.fixture(scope="session")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Policies:
    if not installed():
        pytest.skip("SGLang is not installed, or of other pins: run make sglang")
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("policies")
    first = taught(folder / "taught")
    return Policies(
        first,
        shaken(folder / "shaken", first, seed=3),
        wide(folder / "wide", first, seed=1),
        wide(folder / "other", first, seed=2),
    )


@pytest.fixture(scope="module")
def servers(policies: Policies, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """What they serve is each test's business. They end with the module: an idle server keeps half a core busy."""
    folder = tmp_path_factory.mktemp("servers")
    with (
        Server(policies.taught, version=1, context_length=CONTEXT, folder=folder) as first,
        Server(policies.taught, version=2, context_length=CONTEXT, folder=folder) as second,
    ):
        first.wait_ready()
        second.wait_ready()
        yield first, second


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Report:
    """Takes a figure for the end of the test run."""
    figures = request.config.stash.setdefault(_FIGURES, {})

    def take(name: str, gap: Gap) -> None:
        figures[name] = figures.get(name, Gap()) + gap

    return take


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    figures = config.stash.get(_FIGURES, {})
    if figures:
        terminalreporter.section("log-probabilities: recorded beside scored afresh")
        for name, gap in figures.items():
            line = f"{name}: {gap.tokens} tokens, max |d| {gap.largest:.1e}, mean |d| {gap.mean:.1e}"
            terminalreporter.write_line(line)
