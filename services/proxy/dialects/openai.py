"""What Chat Completions and Responses share: how a conversation of separate items becomes turns, arguments as text, errors.

One policy for instructions in both: system and developer messages before anything else are the system text, later ones
are reminders where they stand.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from services.proxy.conversation import Block, Conversation, Message, Request, Result, Text, digest, news, normalise
from services.proxy.dialects.dialect import OVERLOADED
from services.proxy.dialects.wire import field, reminder, shown
from services.proxy.refusal import Refused
from services.proxy.roles import Asker, classify

PING = b": ping\n\n"
STATUSES = {OVERLOADED: 503}
RETRY_AFTER_S = 5
"""The vendor's clients ask twice more after half a second if they aren't told when; a cell changes hands in seconds."""
UNPARSED = "__unparsedToolInput"
"""Where arguments that are no JSON object stand, word for word; Claude Code's own name for it."""
_TYPES = {401: "authentication_error", 500: "server_error", OVERLOADED: "server_error"}
_CODES = {401: "invalid_api_key", 404: "not_found", OVERLOADED: "server_overloaded"}
_TEXTS = ("text", "input_text", "output_text")
_UNREADABLE = ("image", "image_url", "input_image", "input_audio", "input_file", "file")


class Transcript:
    """Collects the items of a request, in their order."""

    def __init__(self) -> None:
        self.system: list[str] = []
        self.messages: list[Message] = []

    def instruct(self, text: str) -> None:
        """A system or developer message."""
        if self.messages:
            self.messages.append(reminder([text]))
        else:
            self.system.append(text)

    def user(self, texts: list[str]) -> None:
        """A user's message; several texts are lines of one."""
        self.messages.append(Message(role="user", blocks=[Text(text=text) for text in texts]))

    def assistant(self, blocks: list[Block]) -> None:
        """A part of the assistant's turn; neighbouring parts are one turn."""
        self.messages.append(Message(role="assistant", blocks=blocks))

    def result(self, result: Result) -> None:
        """What a call gave. Results that follow each other are one message, so that the order of calls can be theirs."""
        last = self.messages[-1] if self.messages else None
        if last and last.role == "user" and last.blocks and all(isinstance(block, Result) for block in last.blocks):
            self.messages[-1] = Message(role="user", blocks=[*last.blocks, result])
        else:
            self.messages.append(Message(role="user", blocks=[result]))

    def conversation(self, headers: Mapping[str, str], tools: list[dict[str, Any]]) -> Conversation:
        """Everything together. Raises Refused where nobody has said anything yet."""
        messages = normalise(self.messages)
        if not messages or messages[0].role != "user":
            raise Refused(400, "the first message after the instructions must be the user's and say something")
        system = "\n".join(self.system)
        role, agent = classify(Asker(headers=headers, system=system, last_texts=news(messages)))
        return Conversation(agent=agent, role=role, system=system, tools=tools, messages=messages)


def texts_of(content: Any, where: str) -> list[str]:
    """The texts of a string, of nothing, or of a list of parts. Raises Refused for what cannot be read."""
    if content is None or isinstance(content, str):
        return [content] if content else []
    if not isinstance(content, list):
        raise Refused(400, f"{where}: expected a string or a list of parts")
    texts = []
    for index, part in enumerate(content):
        place = f"{where}.{index}"
        if isinstance(part, str):
            texts.append(part)
        elif not isinstance(part, dict):
            raise Refused(400, f"{place}: expected a part")
        elif part.get("type") in _TEXTS:
            texts.append(field(part, "text", str, place))
        elif part.get("type") == "refusal":
            texts.append(field(part, "refusal", str, place))
        elif part.get("type") in _UNREADABLE:
            raise Refused(400, f"{place}: the policy reads text only, so {part['type']} cannot be shown to it")
        else:
            texts.append(shown(part))
    return texts


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


def request_digest(name: str, conversation: Conversation, tree: dict[str, Any], *ignored: str) -> str:
    """Equal for every repetition of a request in one dialect, streaming or not."""
    kept = {key: value for key, value in tree.items() if key not in ("stream", *ignored)}
    return digest([name, conversation.agent, kept]).hex()


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
