"""Does deciding touch what a decider must not know? Watches one call, and shuffles what has no order.

A decider is pure: the same state and the same input give the same decisions. `touched` runs a call and names the first
clock, generator of random numbers, hash or file that it asked, with the line that did. `reordered` gives every set of a
state another order of iteration: who depends on it decides otherwise.
"""

from __future__ import annotations

import functools
import gc
import random
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import msgspec

_LIBRARY = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_CLOCKS = {
    *(("time", name) for name in ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns")),
    *(("time", name) for name in ("process_time", "process_time_ns", "localtime", "gmtime", "sleep")),
    *(("posix", name) for name in ("urandom", "getrandom", "getpid", "stat", "listdir", "open")),
    ("_io", "open"),
}
_UNSTABLE = {("builtins", "hash"), ("builtins", "id")}
_NOW = ("now", "utcnow", "today")


def touched(act: Callable[[], object]) -> str:
    """Runs it; returns what it touched first, such as `time.time at services/x/core/y.py:12`, or nothing. No garbage is
    collected meanwhile: who watches that (`gc.callbacks`) may read a clock in the middle of any call."""
    found: list[str] = []

    def look(frame: FrameType, what: str, called: Any) -> None:
        if what == "c_call" and not found:
            name = _forbidden(frame, called)
            if name:
                found.append(f"{name} at {_place(frame)}")

    before, collected = sys.getprofile(), gc.isenabled()
    gc.disable()
    sys.setprofile(look)
    try:
        act()
    finally:
        sys.setprofile(before)
        if collected:
            gc.enable()
    return found[0] if found else ""


def forget(package: str) -> None:
    """Empties the caches of functions in a package: what was computed before is computed again."""
    for name, module in list(sys.modules.items()):
        if name == package or name.startswith(f"{package}."):
            for value in vars(module).values():
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()


def reordered(state: Any, *, backwards: bool) -> Any:
    """The state, its sets iterated in the order of their members' texts, or backwards. Changes it in place."""
    kind = _Backwards if backwards else _Forwards
    if isinstance(state, set):
        return kind(state)
    if isinstance(state, msgspec.Struct):
        for field in state.__struct_fields__:
            value = getattr(state, field)
            if isinstance(value, (set, dict, list, msgspec.Struct)):
                msgspec.structs.force_setattr(state, field, reordered(value, backwards=backwards))
    elif isinstance(state, dict):
        for key, value in state.items():
            state[key] = reordered(value, backwards=backwards)
    elif isinstance(state, list):
        state[:] = [reordered(value, backwards=backwards) for value in state]
    return state


class _Forwards(set[Any]):
    """A set with an order of its own."""

    _descending = False

    def __iter__(self) -> Iterator[Any]:
        members: Iterable[Any] = super().__iter__()
        return iter(sorted(members, key=repr, reverse=self._descending))

    def copy(self) -> Any:
        return type(self)(super().copy())

    def __or__(self, other: Any) -> Any:
        return type(self)(super().__or__(other))

    def __and__(self, other: Any) -> Any:
        return type(self)(super().__and__(other))

    def __sub__(self, other: Any) -> Any:
        return type(self)(super().__sub__(other))

    def pop(self) -> Any:
        first = next(iter(self))
        self.remove(first)
        return first


class _Backwards(_Forwards):
    _descending = True


def _forbidden(frame: FrameType, called: Any) -> str:
    name, owner = getattr(called, "__name__", ""), getattr(called, "__self__", None)
    module = getattr(called, "__module__", None) or ""
    if (module, name) in _CLOCKS:
        return f"{'os' if module == 'posix' else module.lstrip('_')}.{name}"
    if (module, name) in _UNSTABLE and not frame.f_code.co_filename.startswith(_LIBRARY):
        return name
    if owner is random._inst:
        return f"random.{_asked(frame) or name}"
    if name == "seed" and isinstance(owner, random.Random) and frame.f_locals.get("a", "") is None:
        return "random.Random without a seed"
    if name in _NOW and isinstance(owner, type) and owner.__module__ == "datetime":
        return f"{owner.__name__}.{name}"
    return ""


def _asked(frame: FrameType) -> str:
    """The function of the library that our code called."""
    name = ""
    at: FrameType | None = frame
    while at is not None and at.f_code.co_filename.startswith(_LIBRARY):
        name, at = at.f_code.co_name, at.f_back
    return name


def _place(frame: FrameType) -> str:
    at: FrameType | None = frame
    while at is not None and at.f_code.co_filename.startswith(_LIBRARY):
        at = at.f_back
    if at is None:
        return "a library"
    parts = at.f_code.co_filename.split("/")
    roots = [index for index, part in enumerate(parts) if part in ("services", "tests")]
    path = "/".join(parts[roots[-1] if roots else -1 :])
    return f"{path}:{at.f_lineno}"
