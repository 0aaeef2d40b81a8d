"""Bearer tokens of executions: made and checked from the run's secret alone, so no token is ever stored or sent in an event.

{execution}~{attempt}~{HMAC-SHA256 of both, hex}
"""

from __future__ import annotations

import functools
import hmac

SECRET_BYTES = 32


def make_token(secret: bytes, execution: str, attempt: int) -> str:
    return f"{execution}~{attempt}~{_mac(secret, execution, attempt)}"


def read_token(secret: bytes, token: str) -> tuple[str, int] | None:
    """The execution and attempt that a token stands for, or None when it is not one of ours."""
    execution, _, rest = token.partition("~")
    number, _, mac = rest.partition("~")
    if not number.isdecimal():
        return None
    attempt = int(number)
    return (execution, attempt) if hmac.compare_digest(mac, _mac(secret, execution, attempt)) else None


@functools.lru_cache(maxsize=4096)
def _mac(secret: bytes, execution: str, attempt: int) -> str:
    return hmac.digest(secret, f"{execution}~{attempt}".encode(), "sha256").hex()
