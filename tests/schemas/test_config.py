"""A configuration is refused before anything starts, whatever is wrong in it, and the message names the key."""

from __future__ import annotations

import math
import re
import typing
from pathlib import Path
from typing import Any

import pytest

from schemas import config as schema
from schemas import config_checks
from schemas.config import Config
from schemas.config_file import load
from schemas.config_types import hints_of, sections_in
from schemas.errors import ConfigError

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.toml"
CHECKED_BY_THEMSELVES = {"scheduler.rho_min", "cells.trainable", "proxy.ping_s", "trainer.betas"}


def numbers(kind: type = Config, prefix: str = "") -> dict[str, type]:
    found: dict[str, type] = {}
    for name, hint in typing.get_type_hints(kind).items():
        if isinstance(hint, type) and issubclass(hint, schema.Section):
            found |= numbers(hint, f"{prefix}{name}.")
        elif hint in (int, float, tuple[float, float]):
            found[prefix + name] = hint
        elif hint == float | None:
            found[prefix + name] = float
    return found


def toml(value: Any) -> str:
    return str(value) if isinstance(value, int) or math.isnan(value) or math.isinf(value) else repr(float(value))


def test_the_quickstart_is_right() -> None:
    assert load(QUICKSTART).name == "quickstart"


def test_every_number_has_bounds() -> None:
    assert set(numbers()) == set(config_checks.BOUNDS) | CHECKED_BY_THEMSELVES


@pytest.mark.parametrize("key", sorted(numbers()))
def test_a_number_beyond_all_reason_is_refused_by_name(key: str) -> None:
    kind = numbers()[key]
    values: list[Any] = [-7, 2**80] if kind is int else [-7.5, math.nan, math.inf, -math.inf]
    for value in values:
        text = f"[0.9, {toml(value)}]" if kind not in (int, float) else toml(value)
        with pytest.raises(ConfigError) as caught:
            load(QUICKSTART, [f"{key}={text}"])
        assert key.rpartition(".")[2] in str(caught.value)
        assert str(QUICKSTART) in caught.value.where and caught.value.remedy


def test_every_proxy_has_a_port_of_its_own() -> None:
    load(QUICKSTART, ["proxy.port=65535"])
    load(QUICKSTART, ["proxy.port=65534", "proxy.count=2"])
    with pytest.raises(ConfigError, match=r"proxy\.port = 65535 with proxy\.count = 2 goes past 65535"):
        load(QUICKSTART, ["proxy.port=65535", "proxy.count=2"])


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("scheduler.phi=0.3", "whole number of groups"),
        ("steps=3", "multiple of scheduler.mu"),
        ("scheduler.N=1", "at least 2"),
        ("scheduler.oversample=-1", "scheduler.oversample = -1 is not in 0.."),
        ("scheduler.oversample=41", "49 executions a group, but only 48 can be served at a time"),
        ("rollout.kv_tokens=64", "kv_tokens"),
        ('eval.path=""', "eval.path names no tasks"),
        ('eval.path="tasks"', "eval.path = tasks.path"),
        ("bus.url=localhost", "bus.url"),
        ('name=""', "name"),
        ('harness.command=[""]', "harness.command"),
        ("harness.overall_timeout_s=1", "overall_timeout_s"),
        ("sheduler.N=4", "sheduler"),
        ("scheduler.n=4", "scheduler.N"),
        ('prepare=[{makes="x",command=["{out}"],cache=true}]', "prepare.cache"),
        ("cells=3", "cells"),
        ("cells.count.x=3", "count"),
        ("cells.count=three", "cells.count"),
        ("rollout.transport=sharedmem", "choose from auto, mooncake, shared-memory"),
        ("harness={}", "harness.command is missing"),
        ('prepare=[{makes="x"}]', "prepare[0].command is missing"),
        ("steps=0", "not in 1..2147483647"),
    ],
)
def test_what_is_wrong_is_named(override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        load(QUICKSTART, [override])


def test_an_unknown_key_is_where_it_was_said() -> None:
    with pytest.raises(ConfigError) as caught:
        load(QUICKSTART, ["seed=1", "scheduler.n=4"])
    assert caught.value.where == "--set scheduler.n=4"


@pytest.mark.parametrize(
    ("override", "what", "remedy"),
    [
        ("proxy.port=abc", 'proxy.port = "abc", expected a whole number', "schemas/config.py documents proxy.port"),
        ("proxy.port=1.5", "proxy.port = 1.5, expected a whole number", "schemas/config.py"),
        ("steps=", 'steps = "", expected a whole number', "schemas/config.py"),
        ("steps=true", "steps = true, expected a whole number", "schemas/config.py"),
        ("proxy=3", "proxy = 3, expected a section with keys of its own", "proxy.count"),
        ("cells.count.x=3", 'cells.count = {"x": 3}, expected a whole number', "schemas/config.py"),
        ("rollout.transport=tcp", 'rollout.transport = "tcp", expected one of auto, mooncake, shared-memory', "choose"),
        ("harness.command=ls", 'harness.command = "ls", expected a list of texts', "schemas/config.py"),
        ("harness.command=[1]", "harness.command = [1], expected a list of texts", "schemas/config.py"),
        ("harness.env.A=3", 'harness.env = {"A": 3}, expected a table of texts', "schemas/config.py"),
        ("trainer.betas=[0.1]", "trainer.betas = [0.1], expected a list of 2 numbers", "schemas/config.py"),
        ("eval.temperature=warm", 'eval.temperature = "warm", expected a number', "schemas/config.py"),
        ("prepare=3", "prepare = 3, expected a list of tables", "schemas/config.py"),
        ("name=7", "name = 7, expected text", 'write text in quotes: name = "7"'),
    ],
)
def test_a_value_of_the_wrong_type_is_said_of_the_override(override: str, what: str, remedy: str) -> None:
    """In words of the configuration, not of its decoder."""
    with pytest.raises(ConfigError) as caught:
        load(QUICKSTART, ["seed=1", override])
    assert caught.value.where == f"--set {override}"
    assert caught.value.what == what and remedy in caught.value.remedy


def test_every_type_of_a_key_has_words() -> None:
    """Whatever is given: no error speaks of arrays and objects."""

    def keys(section: type, prefix: str = "") -> list[str]:
        found = []
        for name, hint in hints_of(section).items():
            found += [prefix + name, *(keys(hint, f"{prefix}{name}.") if sections_in(hint) == [hint] else [])]
        return found

    for key in keys(Config):
        for text in ("x", "3", "true", "[[1]]", "{x = [1]}", "1979-05-27"):
            try:
                load(QUICKSTART, [f"{key}={text}"])
            except ConfigError as error:
                assert error.remedy and "`" not in error.what, (key, text)


def test_a_file_with_a_value_of_the_wrong_type_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(QUICKSTART.read_text().replace("[proxy]", '[proxy]\ncount = "two"'))
    with pytest.raises(ConfigError) as caught:
        load(path, ["seed=1"])
    assert (caught.value.where, caught.value.what) == (str(path), 'proxy.count = "two", expected a whole number')


def test_a_rule_that_is_broken_names_the_overrides_that_it_is_about() -> None:
    with pytest.raises(ConfigError) as caught:
        load(QUICKSTART, ["seed=1", "proxy.port=65535", "proxy.count=2", "steps=2"])
    assert caught.value.where == f"{QUICKSTART} --set proxy.port=65535 --set proxy.count=2"


@pytest.mark.parametrize("name", ["", "absent.toml", "binary.toml", "open.toml"])
def test_a_file_that_is_none_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "open.toml").write_text("[cells\ncount = 3")
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / name)
    assert caught.value.where == str(tmp_path / name) and caught.value.remedy
