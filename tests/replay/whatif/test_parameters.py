"""Which parameters can be asked about, and how they are written."""

from __future__ import annotations

import pytest

from replay.whatif.parameters import changed, differences, key_of, parse, points
from schemas.errors import ConfigError
from tests.replay.whatif.simulated import configured


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("scheduler.rho_min=0.3", ("scheduler.rho_min", 0.3)),
        ("rho_min=0.3", ("scheduler.rho_min", 0.3)),
        ("strategy=colocate", ("scheduler.strategy", "colocate")),
        ("cells.count = 5", ("cells.count", 5)),
        ("streaming=false", ("scheduler.streaming", False)),
        ("steps=9", ("steps", 9)),
    ],
)
def test_the_last_word_stands_for_the_key(text: str, found: tuple[str, object]) -> None:
    assert parse(text) == found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rho_mn=0.3", "did you mean scheduler.rho_min"),
        ("scheduler.rhomin=0.3", "did you mean scheduler.rho_min"),
        ("trainer.lr=0.1", "can't be told from a recording"),
        ("seed=4", "can't be told from a recording"),
        ("colour=red", "choose from steps"),
        ("rho_min", "has no '='"),
        ("rho_min=", "has no '='"),
    ],
)
def test_what_can_not_be_asked_is_said(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(text)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("phi=0.3", "whole number of groups"),
        ("strategy=eager", "elastic"),
        ("rho_min=2", "not in (0, 1]"),
        ("steps=7", "multiple"),
        ("mu=" + "9" * 5000, "scheduler.mu"),
    ],
)
def test_values_are_checked_as_those_of_a_run(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        changed(configured(), [parse(text)])
    assert said in str(raised.value)


def test_what_differs_is_named() -> None:
    config = configured()
    found = differences(config, changed(config, [("scheduler.mu", 2), ("scheduler.tau_s", config.scheduler.tau_s)]))
    assert [(each.key, each.was, each.now) for each in found] == [("scheduler.mu", 3, 2)]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("rho_min=0.1:0.5:0.1", [0.1, 0.2, 0.3, 0.4, 0.5]),
        ("mu=1:6:2", [1, 3, 5]),
        ("phi=0:1:0.5", [0.0, 0.5, 1.0]),
        ("strategy=elastic,colocate", ["elastic", "colocate"]),
        ("tau_s=10", [10]),
    ],
)
def test_a_sweep_has_its_points(text: str, found: list[object]) -> None:
    assert points(text) == (key_of(text.partition("=")[0]), found)


@pytest.mark.parametrize(
    "text",
    [
        "rho_min=1:0:0.1",
        "rho_min=0:1:0",
        "rho_min=0:1",
        "rho_min=a:b:c",
        "rho_min=0:1:0.001",
        "rho_min=",
        "rho_min=0:nan:0.1",
        "rho_min=nan:1:0.1",
        "rho_min=0:1:nan",
        "rho_min=inf:inf:1",
        "rho_min=1e999999999:1e999999999:1",
        "rho_min=0:1:1e-999999999",
    ],
)
def test_a_sweep_that_leads_nowhere_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--sweep"):
        points(text)
