"""Why an evaluation has no score: a code for LOG, never a text that tests or workspace wrote."""

from __future__ import annotations

from typing import Literal

Reason = Literal[
    "no_workspace",
    "workspace_damaged",
    "workspace_refused",
    "no_task",
    "task_changed",
    "cannot_start",
    "timeout",
    "no_reward",
    "bad_reward",
    "reward_out_of_range",
    "local_failure",
]


class Refusal(Exception):
    """The evaluation failed; `reason` is what is said of it."""

    def __init__(self, reason: Reason) -> None:
        self.reason = reason
        super().__init__(reason)
