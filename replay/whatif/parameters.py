"""Which parameters a recorded run can be asked about, and how they are named: `scheduler.rho_min=0.3`, or `rho_min=0.3`."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

import msgspec

from schemas.config import Cells, Config, Scheduler
from schemas.config_file import from_tree
from schemas.errors import ConfigError

TOLD = (
    "steps",
    *(f"scheduler.{name}" for name in Scheduler.__struct_fields__),
    *(f"cells.{name}" for name in Cells.__struct_fields__),
    "packer.T",
    "packer.reorder_groups",
    "packer.ahead",
    "trajectories.J_max",
    "eval.every",
)
"""Keys that the deciders read. What another key changes (a learning rate, a time-out, an engine's memory) shows in the world,
and a recording holds one world."""
_SHORT = {key.rpartition(".")[2]: key for key in TOLD}
_POINTS = 200
"""Of a sweep, at most."""
_DIGITS = 30


class Change(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    was: Any
    now: Any


def parse(text: str, *, option: str = "--with") -> tuple[str, Any]:
    """The whole key and the value of `key=value`, the value in TOML, else a string. Raises ConfigError."""
    name, separator, value = text.partition("=")
    if not separator or not value:
        raise ConfigError(f"{text!r} has no '='", where=option, remedy=f"write {option} scheduler.rho_min=0.3")
    return key_of(name.strip(), option=option), _value(value.strip())


def key_of(name: str, *, option: str = "--with") -> str:
    """The whole key of one that may be shortened to its last word. Raises ConfigError that names what is near."""
    if name in TOLD or name in _SHORT:
        return _SHORT.get(name, name)
    if _known(name):
        raise ConfigError(
            f"what {name} changes can't be told from a recording",
            where=option,
            remedy=f"it holds one world, and only decisions can be taken again; choose from {', '.join(TOLD)}",
        )
    near = difflib.get_close_matches(name, [*TOLD, *_SHORT], 3) or difflib.get_close_matches(
        name.rpartition(".")[2], _SHORT, 3
    )
    whole = list(dict.fromkeys(_SHORT.get(each, each) for each in near))
    remedy = f"did you mean {' or '.join(whole)}?" if whole else f"choose from {', '.join(TOLD)}"
    raise ConfigError(f"unknown key {name!r}", where=option, remedy=remedy)


def changed(config: Config, changes: Sequence[tuple[str, Any]], *, option: str = "--with") -> Config:
    """The run's configuration with these values. Raises ConfigError when they don't go together."""
    tree = msgspec.to_builtins(config)
    for key, value in changes:
        section, _, last = key.rpartition(".")
        (tree[section] if section else tree)[last] = value
    return from_tree(tree, where=option)


def differences(was: Config, now: Config) -> list[Change]:
    """Every parameter that isn't the recorded one."""
    pairs = [(key, _get(was, key), _get(now, key)) for key in TOLD]
    return [Change(key=key, was=before, now=after) for key, before, after in pairs if before != after]


def points(text: str) -> tuple[str, list[Any]]:
    """The key and the values of `key=from:to:step`, the end included, or of `key=a,b,c`. Raises ConfigError."""
    name, _, values = text.partition("=")
    key = key_of(name.strip(), option="--sweep")
    if ":" not in values:
        found = [_value(each.strip()) for each in values.split(",") if each.strip()]
    else:
        found = _range(text, values)
    if not 0 < len(found) <= _POINTS:
        raise _no_range(text, f"{len(found)} points")
    return key, found


def _range(text: str, values: str) -> list[Any]:
    try:
        first, last, step = (Decimal(each.strip()) for each in values.split(":"))
    except (InvalidOperation, ValueError):
        raise _no_range(text, "three numbers are needed") from None
    if not all(each.is_finite() and abs(each.adjusted()) < _DIGITS for each in (first, last, step)):
        raise _no_range(text, f"numbers of less than {_DIGITS} digits are needed")
    if step <= 0 or last < first or (last - first) / step > _POINTS:
        raise _no_range(text, "it leads nowhere" if step <= 0 or last < first else f"more than {_POINTS} points")
    decimals = [first + index * step for index in range(int((last - first) / step) + 1)]
    whole = all(each == each.to_integral_value() for each in decimals) and "." not in values
    return [int(each) if whole else float(each) for each in decimals]


def _no_range(text: str, why: str) -> ConfigError:
    return ConfigError(
        f"{text!r}: {why}", where="--sweep", remedy="write --sweep rho_min=0.1:0.9:0.1, or strategy=elastic,colocate"
    )


def _known(name: str) -> bool:
    """Whether it is a key of a run's configuration."""
    section, _, last = name.rpartition(".")
    if not section:
        return last in Config.__struct_fields__
    found = next((each for each in msgspec.structs.fields(Config) if each.name == section), None)
    return found is not None and last in getattr(found.type, "__struct_fields__", ())


def _get(config: Config, key: str) -> Any:
    section, _, last = key.rpartition(".")
    return getattr(getattr(config, section) if section else config, last)


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except ValueError:
        return text
