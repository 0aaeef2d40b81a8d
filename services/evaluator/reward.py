"""Reading a task's reward: a number in [0, 1], as the task's tests left it in their log folder."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from services.evaluator.refusal import Refusal
from services.mesh.workspace import WorkspaceError, read_plain

_BYTES = 4096
"""Most bytes of a reward file."""


def read_reward(logs: Path) -> float:
    """The number in `reward.txt`, else `reward` of the object in `reward.json`.

    Raises Refusal: `no_reward`, `bad_reward` (not a number, or NaN) or `reward_out_of_range`."""
    try:
        text = read_plain(logs / "reward.txt", _BYTES)
        tree = read_plain(logs / "reward.json", _BYTES) if text is None else None
    except WorkspaceError as error:
        raise Refusal("bad_reward") from error
    return reward_of(text, tree)


def reward_of(text: bytes | None, tree: bytes | None) -> float:
    """The reward in the content of `reward.txt`, else of `reward.json`. Raises Refusal as `read_reward` does."""
    try:
        if text is not None:
            value = float(text.decode("ascii"))
        elif tree is not None:
            value = msgspec.json.decode(tree, type=_Json).reward
        else:
            raise Refusal("no_reward")
    except (ValueError, msgspec.MsgspecError) as error:
        raise Refusal("bad_reward") from error
    if math.isnan(value):
        raise Refusal("bad_reward")
    if not 0.0 <= value <= 1.0:
        raise Refusal("reward_out_of_range")
    return value


class _Json(msgspec.Struct):
    reward: float
