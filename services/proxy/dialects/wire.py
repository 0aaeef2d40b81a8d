"""What all wire formats have in common: JSON as harnesses write it, fields that must be there, texts for what isn't text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from services.proxy.conversation import Message, Text
from services.proxy.refusal import Refused

T = TypeVar("T")

NO_GRAMMAR = "answers are sampled freely, so that their log-probabilities are the policy's"
_UNSEEN = ("cache_control", "citations", "annotations")
"""Keys of a block that are not part of what it says."""
_LARGEST = 1 << 63
"""Whole numbers are below this; whoever writes larger ones means a double."""


def decode_object(data: bytes) -> dict[str, Any]:
    """A JSON object. Raises Refused (400)."""
    try:
        tree = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        # A harness that cuts text between the halves of a character sends a lone surrogate, which is JSON all the same.
        try:
            tree = _whole(json.loads(data, parse_constant=_no_number))
        except (ValueError, RecursionError) as error:
            raise Refused(400, f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise Refused(400, "the body is nested too deeply") from None
    if not isinstance(tree, dict):
        raise Refused(400, "the body is not a JSON object")
    return tree


def convert(tree: Any, kind: type[T]) -> T:
    """`tree` as a Struct. Raises Refused (400) with the place."""
    try:
        return msgspec.convert(tree, kind, strict=False)
    except msgspec.ValidationError as error:
        raise Refused(400, str(error)) from None


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
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def numbers(**values: float | None) -> dict[str, float]:
    """Sampling that was asked for, without what was left open."""
    return {name: float(value) for name, value in values.items() if value is not None}


def stops(values: Sequence[str] | None, name: str) -> tuple[str, ...]:
    """Stop sequences. Raises Refused for blanks: an answer's text has none at its ends, so nobody could see them cut."""
    for value in values or ():
        if not value.strip():
            raise Refused(400, f"{name}: {value!r} says nothing; a stop sequence needs a character that is no blank")
    return tuple(values or ())


def reminder(texts: Sequence[str]) -> Message:
    """Instructions in the middle of a conversation. They stand where they are, marked as a reminder: moved to the front
    they would rewrite every prefix, and Qwen stops calling tools after a system turn in the middle."""
    said = "\n".join(texts)
    return Message(role="user", blocks=[Text(text=f"<system-reminder>\n{said}\n</system-reminder>")])


def _whole(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, int) and not isinstance(value, bool) and not -_LARGEST <= value < _LARGEST:
        value = float(value) if abs(value) < 10**308 else float("inf")
    if isinstance(value, float) and abs(value) == float("inf"):
        raise ValueError("a number is too large")
    if isinstance(value, dict):
        return {_whole(key): _whole(item) for key, item in value.items()}
    return [_whole(item) for item in value] if isinstance(value, list) else value


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number")
