"""What all wire formats have in common: JSON as harnesses write it, fields that must be there, texts for what isn't text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from services.proxy.refusal import Refused

T = TypeVar("T")

NO_GRAMMAR = "answers are sampled freely, so that their log-probabilities are the policy's"
TEXT_ONLY = "not shown: the policy reads text only"
_UNSEEN = ("cache_control", "citations", "annotations")
"""Keys of a block that are not part of what it says."""
_LARGEST = 1 << 63
"""Whole numbers are below this; whoever writes larger ones means a double."""


class Body(msgspec.Struct, frozen=True):
    """A request's body, taken apart but not read."""

    head: bytes
    """A JSON object of all fields but those apart, in the order of their names."""
    apart: dict[str, msgspec.Raw]

    def value(self, name: str, kind: type[T]) -> T | None:
        """A field that stands apart; None where it is absent or null. Raises Refused (400)."""
        raw = bytes(self.apart.get(name, b"null"))
        return None if raw == b"null" else decode(raw, kind, name)

    def items(self, name: str) -> list[bytes]:
        """The items of a list that stands apart. Raises Refused (400)."""
        if name not in self.apart:
            raise Refused(400, f"{name}: missing")
        return [bytes(raw) for raw in decode(bytes(self.apart[name]), list[msgspec.Raw], name)]


def read_body(data: bytes, apart: Sequence[str], read: Callable[[Body], T]) -> T:
    """What `read` makes of a JSON object, whose fields named `apart` it gets by themselves. Raises Refused (400)."""
    try:
        return read(_body(data, apart))
    except (msgspec.DecodeError, UnicodeDecodeError):
        # A harness that cuts text between the halves of a character sends a lone surrogate, which is JSON all the same.
        try:
            tree = _whole(json.loads(data, parse_constant=_no_number))
        except (ValueError, RecursionError) as error:
            raise Refused(400, f"the body is not valid JSON: {error}") from None
        return read(_body(msgspec.json.encode(tree), apart))
    except RecursionError:
        raise Refused(400, "the body is nested too deeply") from None


def _body(data: bytes, apart: Sequence[str]) -> Body:
    try:
        fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:
        raise Refused(400, "the body is not a JSON object") from None
    found = {name: fields.pop(name) for name in apart if name in fields}
    kept = [msgspec.json.encode(name) + b":" + bytes(fields[name]) for name in sorted(fields)]
    return Body(head=b"{" + b",".join(kept) + b"}", apart=found)


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
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


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
