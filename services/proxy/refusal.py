"""Refusals: what a harness is told instead of an answer. The dialect turns one into its own JSON or stream event."""

from __future__ import annotations

from schemas.errors import GyreError

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    529: "overloaded_error",
}
"""HTTP status to the Messages API's error type. A harness repeats 401, 500 and 529, never 400 and 413."""


class Refused(GyreError):
    """A request that gets no answer. `what` goes to the harness word for word."""

    def __init__(self, status: int, what: str, *, where: str = "", remedy: str = "") -> None:
        super().__init__(what, where=where, remedy=remedy)
        self.status = status

    @property
    def kind(self) -> str:
        return KINDS[self.status]


def prompt_too_long(tokens: int, maximum: int) -> Refused:
    """Tokens of the rendered prompt, and of the context. Claude Code compacts its history when it reads these words."""
    return Refused(400, f"prompt is too long: {tokens} tokens > {maximum} maximum")
