"""Reads a configuration: one TOML file, decoded strictly, with overrides `--set a.b=value` on top.

An unknown key is a ConfigError that names the nearest known one; nothing is read that `config_checks.validate` refuses.
"""

from __future__ import annotations

import difflib
import functools
import tomllib
import types
import typing
from pathlib import Path
from typing import Any

import msgspec

from schemas.config import Config, Section
from schemas.config_checks import validate
from schemas.errors import ConfigError


def load(path: Path, overrides: list[str] | None = None) -> Config:
    """Decode `path`, apply overrides of the form `a.b=value` (value in TOML, else a string), validate.

    Raises ConfigError with the file, the key and the remedy.
    """
    try:
        tree = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError("no such file", where=str(path), remedy="give the path of a TOML configuration") from None
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=str(path), remedy="check the path") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"not valid TOML: {error}", where=str(path), remedy="correct the line named") from None
    for override in overrides or []:
        # By itself first: the file is not to blame for what it doesn't say.
        alone: dict[str, Any] = {}
        _apply(alone, override)
        _refuse_unknown(alone, Config, f"--set {override}", "")
        _apply(tree, override)
    return from_tree(tree, where=str(path))


def from_tree(tree: dict[str, Any], *, where: str) -> Config:
    _refuse_unknown(tree, Config, where, "")
    try:
        config = msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error), where=where, remedy=_correct(str(error))) from None
    validate(config, where=where)
    return config


def _apply(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"--set {override!r} has no '='", remedy="write --set section.key=value")
    try:
        value: Any = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text
    *path, last = key.strip().split(".")
    for part in path:
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"--set {key}: {part!r} is a value, not a section", remedy="check the key's path")
    tree[last] = value


_hints = functools.cache(typing.get_type_hints)
"""Fields of a section and their types."""


def _refuse_unknown(tree: dict[str, Any], kind: type, where: str, prefix: str) -> None:
    hints = _hints(kind)
    for key, value in tree.items():
        if key not in hints:
            alike = [known for known in hints if known.lower() == key.lower()]
            near = alike or difflib.get_close_matches(key, hints, 1) or _elsewhere(key)
            remedy = f"did you mean {prefix + near[0] if near[0] in hints else near[0]!r}?" if near else f"known here: {', '.join(hints)}"
            raise ConfigError(f"unknown key {prefix + key!r}", where=where, remedy=remedy)
        for inner in _structs(hints[key]):
            rows = value if isinstance(value, list) else [value]
            for row in rows:
                if isinstance(row, dict):
                    _refuse_unknown(row, inner, where, f"{prefix}{key}.")


def _correct(error: str) -> str:
    """What to do about a value of the wrong type; where only some words are allowed, which."""
    allowed: Any = Config
    for part in error.rpartition("`$.")[2].rstrip("`").split("."):
        kind = next(iter(_structs(allowed)), None)
        allowed = _hints(kind).get(part) if kind else None
    if typing.get_origin(allowed) is typing.Literal:
        return f"choose from {', '.join(map(str, typing.get_args(allowed)))}"
    return "correct the value; schemas/config.py documents every key"


def _structs(hint: Any) -> list[type]:
    if isinstance(hint, type) and not isinstance(hint, types.GenericAlias) and issubclass(hint, Section):
        return [hint]
    return [inner for arg in typing.get_args(hint) for inner in _structs(arg)]


def _elsewhere(key: str) -> list[str]:
    """A key that is known in another section, written with its section."""
    for section, hint in _hints(Config).items():
        for inner in _structs(hint):
            if key in _hints(inner):
                return [f"{section}.{key}"]
    return []
