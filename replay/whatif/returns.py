"""Which cells waited for their weights when they came back to serve, and how long a publication took where no engine said so.

A satellite serves again once it has the weights that are being published, and a recording holds one time for both: its own
way back, and its waiting. They are told apart here, so that under other parameters it waits as long as it then has to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from replay.simulator.answers import Said

WAITED_US = 1_000
"""Satellites that serve again within this of each other, or of the publication, have waited for their weights."""
_MUCH = 1.5
"""So many times longer than all who came later takes only who waited."""
_NEVER = 1 << 62

Key = tuple[str, int, str]


class Return(msgspec.Struct, frozen=True, kw_only=True):
    """A cell that serves again."""

    key: Key
    """Cell, epoch, phase."""
    satellite: bool
    version: int
    after_us: int
    """Since its trainer let go."""
    since_us: int
    """Since the version's exposure for publication."""


class Waits(msgspec.Struct, frozen=True, kw_only=True):
    waited: list[Key]
    publication_us: dict[int, int]
    """Version to when satellites that waited for it had it, since its exposure."""
    early: bool
    """Whether a satellite came back with a version that had not been published yet."""


def waits_of(returns: Sequence[Return], published: Mapping[int, Mapping[str, Said]]) -> Waits:
    """Satellites that are back at the same moment, or when the weights were published, have waited; so has the first of a
    version that took much longer than those after it. `published`: version to engine to what it said."""
    first: dict[int, Return] = {}
    for each in returns:
        if each.satellite:
            first.setdefault(each.version, each)
    slow_us = _MUCH * max((each.after_us for each in returns if first.get(each.version) is not each), default=_NEVER)
    inferred: dict[int, int] = {}
    before: dict[int, Return] = {}
    waited: list[Key] = []

    def publication(version: int, unknown: int) -> int:
        said = published.get(version)
        return max(each.after_us for each in said.values()) if said else inferred.get(version, unknown)

    for each in returns:
        if not each.satellite:
            continue
        other = before.get(each.version)
        together = other is not None and each.since_us - other.since_us < WAITED_US
        if together or (first[each.version] is each and each.after_us > slow_us):
            inferred.setdefault(each.version, each.since_us)
            waited.append(each.key)
        elif abs(each.since_us - publication(each.version, -_NEVER)) < WAITED_US:
            waited.append(each.key)
        if other is not None and together:
            waited.append(other.key)
        before[each.version] = each
    early = any(
        each.since_us < publication(each.version, _NEVER) - WAITED_US
        for each in returns
        if each.satellite and each.key not in waited
    )
    return Waits(waited=waited, publication_us=inferred, early=early)
