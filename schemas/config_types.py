"""Values of a configuration against the types of its keys: what is wrong is said in words of the file, not of the decoder."""

from __future__ import annotations

import functools
import json
import types
import typing
from typing import Any

import msgspec

from schemas.config import Section
from schemas.errors import ConfigError

_SHOWN = 80
"""Most characters of a value that are repeated."""
_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
_MANY = {int: "whole numbers", float: "numbers", str: "texts"}

hints_of = functools.cache(typing.get_type_hints)
"""Fields of a section and their types."""


def sections_in(hint: Any) -> list[type]:
    """The sections that a type holds: itself, or those of its arguments."""
    if isinstance(hint, type) and not isinstance(hint, types.GenericAlias) and issubclass(hint, Section):
        return [hint]
    return [inner for arg in typing.get_args(hint) for inner in sections_in(arg)]


def check_types(tree: dict[str, Any], kind: type, *, where: str, prefix: str = "") -> None:
    """Every value that is there has its key's type; keys may be missing, and are known. Raises ConfigError."""
    for key, value in tree.items():
        hint = hints_of(kind)[key]
        if sections_in(hint) == [hint] and isinstance(value, dict):
            check_types(value, hint, where=where, prefix=f"{prefix}{key}.")
            continue
        try:
            msgspec.convert(value, hint)
        except msgspec.ValidationError as error:
            if (missing := missing_in(error, prefix + key)) is not None:
                raise ConfigError(f"{missing} is missing", where=where, remedy="give it a value") from None
            raise ConfigError(
                f"{prefix}{key} = {_shown(value)}, expected {_expected(hint)}",
                where=where,
                remedy=_remedy(prefix + key, value, hint),
            ) from None


def missing_in(error: msgspec.ValidationError, prefix: str = "") -> str | None:
    """The key that is not there, where that is what the error says."""
    said, _, place = str(error).partition(" - at `$")
    if not said.startswith("Object missing required field `"):
        return None
    return f"{prefix}{place.rstrip('`')}.{said.split('`')[1]}".lstrip(".")


def _expected(hint: Any) -> str:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint in _WORDS:
        return _WORDS[hint]
    if origin is typing.Literal:
        return f"one of {', '.join(map(str, inner))}"
    if origin is tuple:
        return f"a list of {len(inner)} {_MANY[inner[0]]}"
    if origin is list:
        return f"a list of {_MANY.get(inner[0], 'tables')}"
    if origin is dict:
        return f"a table of {_MANY[inner[1]]}"
    if origin is types.UnionType:
        return " or ".join(_expected(each) for each in inner if each is not types.NoneType)
    return "a section with keys of its own"


def _remedy(key: str, value: Any, hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return f"choose from {', '.join(map(str, typing.get_args(hint)))}"
    if hint is str:
        return f"""write text in quotes: {key} = "{value}\""""
    if sections_in(hint) == [hint]:
        return f"name a key of it: {key}.{next(iter(hints_of(hint)))}"
    return f"correct the value; schemas/config.py documents {key}"


def _shown(value: Any) -> str:
    """As it stands in a file, or near to it."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
