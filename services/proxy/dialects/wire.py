"""What all wire formats have in common: JSON as harnesses write it, fields that must be there, texts for what isn't text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from services.proxy.refusal import Refused

T = TypeVar("T")

NO_GRAMMAR = "answers are sampled freely, so that their log-probabilities are the policy's"
TEXT_ONLY = "not shown: the policy reads text only"
_compact = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_UNSEEN = ("cache_control", "citations", "annotations")
"""Keys of a block that are not part of what it says."""


def decode(data: bytes, kind: type[T], where: str = "") -> T:
    """JSON as a value of this kind. Raises Refused (400) with the place; DecodeError for what is no JSON."""
    try:
        return msgspec.json.decode(data, type=kind, strict=False)
    except msgspec.ValidationError as error:
        raise Refused(400, _placed(error, where)) from None


def convert(tree: Any, kind: type[T], where: str = "") -> T:
    """`tree` as a value of this kind. Raises Refused (400) with the place."""
    try:
        return msgspec.convert(tree, kind, strict=False)
    except msgspec.ValidationError as error:
        raise Refused(400, _placed(error, where)) from None


def _placed(error: msgspec.ValidationError, where: str) -> str:
    """The place is the body's, not that of the part which was read."""
    said = str(error)
    if not where:
        return said
    return said.replace("`$", f"`{where}") if "`$" in said else f"{where}: {said}"


def field(block: Mapping[str, Any], name: str, kind: type[T], where: str) -> T:
    """A field that must be there, of this kind."""
    value = block.get(name)
    if not isinstance(value, kind):
        raise Refused(400, f"{where}.{name}: expected {'an object' if kind is dict else 'a string'}")
    return value


def shown(block: Mapping[str, Any]) -> str:
    """A block of an unknown kind, as the text of its JSON without what says nothing."""
    kept = {key: value for key, value in block.items() if key not in _UNSEEN}
    return msgspec.json.encode(kept, order="deterministic").decode()


def compact(value: Any) -> str:
    """JSON as it goes out."""
    return _compact.encode(value)


def numbers(**values: float | None) -> dict[str, float]:
    """Sampling that was asked for, without what was left open. Raises Refused for what no double holds."""
    try:
        return {name: float(value) for name, value in values.items() if value is not None}
    except OverflowError:
        huge = next(name for name, value in values.items() if isinstance(value, int) and value.bit_length() > 1023)
        raise Refused(400, f"{huge}: the number is too large") from None


def stops(values: Sequence[str] | None, name: str) -> tuple[str, ...]:
    """Stop sequences. Raises Refused for blanks: an answer's text has none at its ends, so nobody could see them cut."""
    for value in values or ():
        if not value.strip():
            raise Refused(400, f"{name}: {value!r} says nothing; a stop sequence needs a character that is no blank")
    return tuple(values or ())
