"""Where this process listens, and by which name others reach it: one value, so that what is announced is what is bound.

`127.0.0.1` unless GYRE_HOST says otherwise: then a name or an address of this machine (in a container, its host name).
What a process starts inherits it; an engine behind its gate stays on loopback all the same.
"""

from __future__ import annotations

import os

LOOPBACK = "127.0.0.1"
VARIABLE = "GYRE_HOST"


def own_host() -> str:
    """The name or address to bind and to announce."""
    return os.environ.get(VARIABLE) or LOOPBACK


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it."""
    return host in ("localhost", "::1") or host.startswith("127.")
