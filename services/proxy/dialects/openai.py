"""What Chat Completions and Responses share: how a conversation of separate items becomes turns, arguments as text, errors.

One policy for instructions in both: system and developer messages before anything else are the system text, later ones
are reminders where they stand.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from services.proxy.conversation import Conversation, Request
from services.proxy.dialects.dialect import OVERLOADED
from services.proxy.dialects.pictures import unreadable
from services.proxy.dialects.wire import TEXT_ONLY, field, shown
from services.proxy.memory import Memory
from services.proxy.refusal import Refused
from services.proxy.roles import Asker, classify
from services.proxy.transcript import Transcript

PING = b": ping\n\n"
STATUSES = {OVERLOADED: 503}
RETRY_AFTER_S = 5
"""The vendor's clients ask twice more after half a second if they aren't told when; a cell changes hands in seconds."""
UNPARSED = "__unparsedToolInput"
"""Where arguments that are no JSON object stand, word for word; Claude Code's own name for it."""
_TYPES = {401: "authentication_error", 500: "server_error", OVERLOADED: "server_error"}
_CODES = {401: "invalid_api_key", 404: "not_found", OVERLOADED: "server_overloaded"}
_TEXTS = ("text", "input_text", "output_text")
_UNREADABLE = (
    *("image", "image_url", "input_image", "computer_screenshot", "computer_call_output", "image_generation_call"),
    *("input_audio", "input_file", "file", "input_video", "video_url"),
)


def conversation(
    told: Transcript,
    headers: Mapping[str, str],
    tools: list[dict[str, Any]],
    memory: Memory,
    instructions: str | None = None,
) -> Conversation:
    """Everything together. Raises Refused where nobody has said anything yet."""
    messages = list(told.messages)
    if not messages or messages[0].role != "user":
        raise Refused(400, "the first message after the instructions must be the user's and say something")
    system = "\n".join([*([instructions] if instructions else []), *told.system])
    role, agent = classify(Asker(headers=headers, system=system, last_texts=told.news()))
    root = memory.root(agent, system, tools)
    return Conversation(agent=agent, role=role, system=system, tools=tools, messages=messages, root=root)


def texts_of(content: Any, where: str) -> list[str]:
    """The texts of a string, of nothing, or of a list of parts. Raises Refused for what cannot be read."""
    if content is None or isinstance(content, str):
        return [content] if content else []
    if not isinstance(content, list):
        raise Refused(400, f"{where}: expected a string or a list of parts")
    return [text_of(part, f"{where}.{index}") for index, part in enumerate(content)]


def text_of(part: Any, where: str) -> str:
    """The text of a part, which of an unknown kind is that of its JSON. Raises Refused for what cannot be read."""
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise Refused(400, f"{where}: expected a part")
    kind = part.get("type")
    if kind in _TEXTS:
        return field(part, "text", str, where)
    if kind == "refusal":
        return field(part, "refusal", str, where)
    if kind in _UNREADABLE or unreadable(part):
        raise Refused(400, f"{where}: {kind}: {TEXT_ONLY}")
    return shown(part)


def arguments_of(text: str) -> dict[str, Any]:
    """Arguments of a call from their text; what is no JSON object is kept word for word."""
    if not text.strip():
        return {}
    try:
        value = json.loads(text)
        # What JSON can't hold (NaN, half a character) comes out of json.loads all the same.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {UNPARSED: {"raw": text, "len": len(text)}}


def error(refused: Refused, request_id: str) -> dict[str, Any]:
    """The body of a refusal."""
    return {
        "error": {
            "message": refused.what,
            "type": _TYPES.get(refused.status, "invalid_request_error"),
            "param": None,
            "code": error_code(refused),
        }
    }


def error_code(refused: Refused) -> str | None:
    return refused.code or _CODES.get(refused.status)


def wire_id(kind: str, request: Request, index: int | None = None) -> str:
    """An id that is the same for every repetition and differs between requests, and between parts of one answer."""
    return f"{kind}_{request.digest[:24]}" + ("" if index is None else f"_{index}")
