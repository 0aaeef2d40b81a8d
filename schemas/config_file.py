"""Reads a configuration: one TOML file, decoded strictly, with overrides `--set a.b=value` on top.

An unknown key is a ConfigError that names the nearest known one, a value of the wrong type one that says what is expected;
nothing is read that `config_checks.validate` refuses. What an override got wrong is said of the override, not of the file.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from schemas.config import Config
from schemas.config_checks import validate
from schemas.config_types import check_types, hints_of, missing_in, sections_in
from schemas.errors import ConfigError


def load(path: Path, overrides: list[str] | None = None) -> Config:
    """Decode `path`, apply overrides of the form `a.b=value` (value in TOML, else a string), validate.

    Raises ConfigError with the file or the override, the key and the remedy.
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
        check_types(alone, Config, where=f"--set {override}")
        _apply(tree, override)
    config = _decoded(tree, where=str(path))
    try:
        validate(config, where=str(path))
    except ConfigError as error:
        named = [override for override in overrides or [] if _names(error.what, override)]
        where = " ".join([str(path), *(f"--set {override}" for override in named)])
        raise ConfigError(error.what, where=where, remedy=error.remedy) from None
    return config


def from_tree(tree: dict[str, Any], *, where: str) -> Config:
    """Raises ConfigError."""
    config = _decoded(tree, where=where)
    validate(config, where=where)
    return config


def _decoded(tree: dict[str, Any], *, where: str) -> Config:
    _refuse_unknown(tree, Config, where, "")
    check_types(tree, Config, where=where)
    try:
        return msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        what = f"{missing} is missing" if (missing := missing_in(error)) else str(error)
        raise ConfigError(what, where=where, remedy="give it a value") from None


def _names(what: str, override: str) -> bool:
    """Whether an error speaks of the key of an override."""
    key = override.partition("=")[0].strip()
    return re.search(rf"(?<![\w.]){re.escape(key)}(?![\w])", what) is not None


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


def _refuse_unknown(tree: dict[str, Any], kind: type, where: str, prefix: str) -> None:
    hints = hints_of(kind)
    for key, value in tree.items():
        if key not in hints:
            alike = [known for known in hints if known.lower() == key.lower()]
            near = alike or difflib.get_close_matches(key, hints, 1) or _elsewhere(key)
            remedy = f"did you mean {prefix + near[0] if near[0] in hints else near[0]!r}?" if near else f"known here: {', '.join(hints)}"
            raise ConfigError(f"unknown key {prefix + key!r}", where=where, remedy=remedy)
        for inner in sections_in(hints[key]):
            rows = value if isinstance(value, list) else [value]
            for row in rows:
                if isinstance(row, dict):
                    _refuse_unknown(row, inner, where, f"{prefix}{key}.")


def _elsewhere(key: str) -> list[str]:
    """A key that is known in another section, written with its section."""
    for section, hint in hints_of(Config).items():
        for inner in sections_in(hint):
            if key in hints_of(inner):
                return [f"{section}.{key}"]
    return []
