"""Reading a task's reward: a number in [0, 1], as the task's tests left it in their log folder."""

from __future__ import annotations

import math
import os
from pathlib import Path

import msgspec

from services.evaluator.refusal import Refusal

_BYTES = 4096
"""Most bytes of a reward file."""


def read_reward(logs: Path) -> float:
    """The number in `reward.txt`, else `reward` of the object in `reward.json`.

    Raises Refusal: `no_reward`, `bad_reward` (not a number, or NaN) or `reward_out_of_range`."""
    text = _content(logs / "reward.txt")
    try:
        if text is not None:
            value = float(text.decode("ascii").strip())
        else:
            text = _content(logs / "reward.json")
            if text is None:
                raise Refusal("no_reward")
            value = float(msgspec.json.decode(text, type=_Json).reward)
    except (ValueError, msgspec.MsgspecError) as error:
        raise Refusal("bad_reward") from error
    if math.isnan(value):
        raise Refusal("bad_reward")
    if not 0.0 <= value <= 1.0:
        raise Refusal("reward_out_of_range")
    return value


class _Json(msgspec.Struct):
    reward: float


def _content(path: Path) -> bytes | None:
    """The file's bytes; None where there is none. A link or a pipe in its place is not followed or waited for."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Refusal("bad_reward") from error
    with open(descriptor, "rb") as file:
        try:
            content = file.read(_BYTES + 1)
        except OSError as error:
            raise Refusal("bad_reward") from error
    if content is None or len(content) > _BYTES:
        raise Refusal("bad_reward")
    return content
