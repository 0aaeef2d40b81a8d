"""What fills one micro-step: bundles of the groups in the window, the oldest group first.

First-fit decreasing, group by group. The largest bundle of the oldest group always goes in, so a group of n executions
is packed after at most n micro-steps: nothing starves however badly its bundles fit.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.packer.core.state import Bundle

GOOD_FILL = 0.85
"""Share of T from which on a micro-step isn't kept back for a better one."""


def by_size(bundles: list[Bundle]) -> list[Bundle]:
    """Largest first; equal ones in the order of their executions."""
    return sorted(bundles, key=lambda bundle: (-bundle.tokens, bundle.execution))


def fill(window: Sequence[Sequence[Bundle]], capacity: int) -> list[Bundle]:
    """Bundles of one micro-step of at most `capacity` (T) tokens; a bundle above T comes alone.

    `window` has the bundles of each group, largest first, the oldest group first, none empty.
    """
    chosen = [window[0][0]]
    room = capacity - chosen[0].tokens
    if room < 0:
        return chosen
    for bundle in (bundle for bundles in window for bundle in bundles):
        if bundle is not chosen[0] and bundle.tokens <= room:
            chosen.append(bundle)
            room -= bundle.tokens
    return chosen
