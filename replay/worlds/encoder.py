"""A chat format over sixty-four tokens: conversations to ids and sampled ids to blocks, in microseconds.

    0 end of turn   1 system   2 user   3 assistant   4 tool result   5, 6 around a call   16.. words

A word `w17` is token 17, any other word falls on one of them. A call is `5 NAME ARGUMENT 6`. As with the real format, a
request that extends a node adds what is new, and recorded turns enter by their ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from zlib import crc32

from services.proxy.conversation import Block, Call, Conversation, Message, Result, Text, Thinking
from services.proxy.encoder import Stop, first_stop
from services.proxy.tree import Place

END, SYSTEM, USER, ASSISTANT, RESULT, OPEN, CLOSE = range(7)
FIRST_WORD, WORDS = 16, 48
TOOL = "run"


class WorldEncoder:
    """Implements `services.proxy.encoder.PromptEncoder`."""

    def __init__(self) -> None:
        self.stop_ids = [END]

    def new_ids(self, conversation: Conversation, place: Place) -> list[int]:
        parent = place.parent
        if parent is None:
            ids = [SYSTEM, *words(conversation.system), END]
        else:
            ids = [] if parent.output_ids and parent.output_ids[-1] == END else [END]
        for turn in place.rest:
            if turn.message.role == "user":
                ids += _told(turn.message)
                continue
            ids.append(ASSISTANT)
            ids += turn.node.output_ids.tolist() if turn.node is not None else _said(turn.message)
            if ids[-1] != END:
                ids.append(END)
        ids.append(ASSISTANT)
        return ids

    def parse(self, output_ids: list[int], prompt_tail: list[int], *, call: str, calls_allowed: bool) -> list[Block]:
        text: list[str] = []
        calls: list[Block] = []
        at = 0
        while at < len(output_ids):
            token = output_ids[at]
            whole = output_ids[at : at + 4]
            if (
                token == OPEN
                and len(whole) == 4
                and whole[3] == CLOSE
                and min(whole[1:3]) >= FIRST_WORD
                and calls_allowed
            ):
                name = f"toolu_{call[2:].replace('.', '_')}_{len(calls)}"
                calls.append(Call(id=name, name=TOOL, input={"do": f"w{whole[1]}", "with": f"w{whole[2]}"}))
                at += 4
                continue
            if token != END:
                text.append(f"w{token}")
            at += 1
        return ([Text(text=" ".join(text))] if text else []) + calls

    def stopped(self, output_ids: list[int], stops: Sequence[str]) -> Stop | None:
        return first_stop(lambda ids: " ".join(f"w{token}" for token in ids if token != END), output_ids, stops)


@lru_cache(4096)
def words(text: str) -> tuple[int, ...]:
    """Ids of a text, one a word."""
    return tuple(_word(word) for word in text.split())


def _word(word: str) -> int:
    if word[0] == "w" and word[1:].isdecimal() and FIRST_WORD <= int(word[1:]) < FIRST_WORD + WORDS:
        return int(word[1:])
    return FIRST_WORD + crc32(word.encode()) % WORDS


def _told(message: Message) -> list[int]:
    ids: list[int] = []
    for block in message.blocks:
        if isinstance(block, Result):
            ids += [RESULT, *words(block.content), END]
        elif isinstance(block, Text):
            ids += [USER, *words(block.text), END]
    return ids


def _said(message: Message) -> list[int]:
    ids: list[int] = []
    for block in message.blocks:
        if isinstance(block, Call):
            ids += [OPEN, *(_word(str(value)) for value in block.input.values()), CLOSE]
        else:
            ids += words(block.thinking if isinstance(block, Thinking) else getattr(block, "text", ""))
    return ids
