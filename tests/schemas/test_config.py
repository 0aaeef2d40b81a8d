"""A configuration is refused before anything starts, whatever is wrong in it, and the message names the key."""

from __future__ import annotations

import math
import typing
from pathlib import Path
from typing import Any

import pytest

from schemas import config as schema
from schemas import config_checks
from schemas.config import Config
from schemas.config_file import load
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
        ("steps=0", "not in 1..2147483647"),
    ],
)
def test_what_is_wrong_is_named(override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace(".", r"\.")):
        load(QUICKSTART, [override])


def test_an_unknown_key_is_where_it_was_said() -> None:
    with pytest.raises(ConfigError) as caught:
        load(QUICKSTART, ["seed=1", "scheduler.n=4"])
    assert caught.value.where == "--set scheduler.n=4"


@pytest.mark.parametrize("name", ["", "absent.toml", "binary.toml", "open.toml"])
def test_a_file_that_is_none_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "open.toml").write_text("[cells\ncount = 3")
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / name)
    assert caught.value.where == str(tmp_path / name) and caught.value.remedy
