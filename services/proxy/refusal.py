"""Refusals: what a harness is told instead of an answer. A dialect turns one into its own status, JSON or stream event.

Statuses are 400 and 413 (the same request will not succeed), 401, 404, 500, and 529 (ask again).
"""

from __future__ import annotations

from schemas.errors import GyreError

PROMPT_TOO_LONG = "context_length_exceeded"
"""Code of the refusal after which a harness compacts its history."""


class Refused(GyreError):
    """A request that gets no answer. `what` goes to the harness word for word."""

    def __init__(self, status: int, what: str, *, code: str = "", where: str = "", remedy: str = "") -> None:
        super().__init__(what, where=where, remedy=remedy)
        self.status, self.code = status, code


def prompt_too_long(tokens: int, maximum: int) -> Refused:
    """Tokens of the rendered prompt, and of the context. Claude Code compacts its history when it reads these words."""
    return Refused(400, f"prompt is too long: {tokens} tokens > {maximum} maximum", code=PROMPT_TOO_LONG)
