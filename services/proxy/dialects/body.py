"""A request's body, taken apart: the head, the messages, and what stands apart from both.

Invariant
- what comes out is what msgspec makes of the whole body. Of one that begins like an earlier one it is given less: a mark
  stands for the messages that are known. They are whole values of one list, so what follows them reads the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from services.proxy.dialects.wire import decode
from services.proxy.history import Known, Told, pieces
from services.proxy.memory import Memory
from services.proxy.refusal import Refused

T = TypeVar("T")

_LARGEST = 1 << 63
"""Whole numbers are below this; whoever writes larger ones means a double."""
_MARK = b'"messages that are known"'
_BEGINNING = 256
"""Bytes of a list by which it is found."""

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_values = msgspec.json.Decoder(list[msgspec.Raw])


class Body(msgspec.Struct, frozen=True):
    """A request's body, taken apart but not read."""

    data: bytes
    head: bytes
    """A JSON object of all fields but those apart, in the order of their names."""
    apart: dict[str, msgspec.Raw]
    continues: Told | None = None
    """The messages, where they continue known ones."""

    def value(self, name: str, kind: type[T]) -> T | None:
        """A field that stands apart; None where it is absent or null. Raises Refused (400)."""
        raw = bytes(self.apart.get(name, b"null"))
        return None if raw == b"null" else decode(raw, kind, name)

    def told(self, name: str) -> Told:
        """The messages: items of the list in this field. Raises Refused (400)."""
        if self.continues is not None:
            return self.continues
        if name not in self.apart:
            raise Refused(400, f"{name}: missing")
        whole = bytes(self.apart[name])
        items = [bytes(value) for value in decode(whole, list[msgspec.Raw], name)]
        start = _list_in(self.data, name, whole)
        found = None if start is None else pieces(self.data, items, start)
        return Told(items) if found is None else Told(found, self.data[:start])


def read_body(
    data: bytes, *, dialect: str, messages: str, apart: Sequence[str], memory: Memory, read: Callable[[Body], T]
) -> T:
    """What `read` makes of a JSON object, whose fields named `apart` it gets by themselves, and that of the messages.
    Raises Refused (400)."""
    names = (messages, *apart)
    try:
        return read(_body(data, dialect, names, memory))
    except (msgspec.DecodeError, UnicodeDecodeError):
        # A harness that cuts text between the halves of a character sends a lone surrogate, which is JSON all the same.
        try:
            tree = _whole(json.loads(data, parse_constant=_no_number))
        except (ValueError, RecursionError) as error:
            raise Refused(400, f"the body is not valid JSON: {error}") from None
        return read(_body(msgspec.json.encode(tree), dialect, names, memory))
    except RecursionError:
        raise Refused(400, "the body is nested too deeply") from None


def _body(data: bytes, dialect: str, names: Sequence[str], memory: Memory) -> Body:
    known = memory.known(dialect, data)
    body = known and _continued(data, known, names)
    if body:
        return body
    try:
        return _parted(data, _fields.decode(data), names)
    except msgspec.ValidationError:
        raise Refused(400, "the body is not a JSON object") from None


def _parted(data: bytes, fields: dict[str, msgspec.Raw], names: Sequence[str], continues: Told | None = None) -> Body:
    apart = {name: fields.pop(name) for name in names if name in fields}
    kept = [msgspec.json.encode(name) + b":" + bytes(fields[name]) for name in sorted(fields)]
    return Body(data, b"{" + b",".join(kept) + b"}", apart, continues)


def _continued(data: bytes, known: Known, names: Sequence[str]) -> Body | None:
    """A body that begins with known messages; None where it only seems so (another list of this name follows)."""
    fields = _marked(data, known.start, known.end)
    if fields is None or names[0] not in fields:
        return None
    try:
        first, *others = _values.decode(fields[names[0]])
    except (msgspec.DecodeError, ValueError):
        return None
    found = pieces(data, [bytes(value) for value in others], known.end)
    if bytes(first) != _MARK or found is None:
        return None
    return _parted(data, fields, names, Told(found, known=known))


def _list_in(data: bytes, name: str, whole: bytes) -> int | None:
    """Where the items of the list begin that is this field of a body; None where that isn't sure."""
    at = data.find(whole[:_BEGINNING])
    fields = _marked(data, at + 1, at + len(whole) - 1)
    return at + 1 if fields and bytes(fields.get(name, b"")) == b"[" + _MARK + b"]" else None


def _marked(data: bytes, start: int, end: int) -> dict[str, msgspec.Raw] | None:
    """The fields of a body with the mark in place of a part; None if that is no JSON or has the mark itself."""
    before, after = data[:start], data[end:]
    if _MARK in before or _MARK in after:
        return None
    try:
        return _fields.decode(before + _MARK + after)
    except msgspec.DecodeError:
        return None


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
