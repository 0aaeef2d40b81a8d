"""A conversation as it is keyed and rendered, put together message by message in any dialect.

Rules
- a user's message that says nothing is left out, and so is text of the assistant that is white space only;
- neighbouring assistant messages are one turn;
- tool results stand in the order of their calls and before other text of their message; results that follow each other
  are one message;
- instructions before anything else are the system text, later ones are reminders where they stand: moved to the front
  they would rewrite every prefix, and Qwen stops calling tools after a system turn in the middle.

Adding changes the last message at most, so a mark is small and rewinding to it costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from services.proxy.conversation import Block, Message, Result, Text


class Mark(NamedTuple):
    """How far a transcript was, as `Transcript.mark` returned it."""

    system: int
    messages: int
    last: Message | None
    begun: bool


START = Mark(0, 0, None, False)


class Transcript:
    def __init__(self) -> None:
        self.system: list[str] = []
        self.messages: list[Message] = []
        self._begun = False
        """Whether somebody has said something, be it nothing."""

    def mark(self) -> Mark:
        """Where this is now."""
        return Mark(len(self.system), len(self.messages), self.messages[-1] if self.messages else None, self._begun)

    def rewind(self, mark: Mark) -> None:
        """Forget what was added since. Marks taken after `mark` are void."""
        del self.system[mark.system :]
        del self.messages[mark.messages :]
        if mark.last is not None:
            self.messages[-1] = mark.last
        self._begun = mark.begun

    def instruct(self, text: str) -> None:
        """A system or developer message."""
        if self._begun:
            self.remind([text])
        else:
            self.system.append(text)

    def remind(self, texts: Sequence[str]) -> None:
        """Instructions in the middle of a conversation."""
        said = "\n".join(texts)
        self.user([Text(text=f"<system-reminder>\n{said}\n</system-reminder>")])

    def user(self, blocks: Sequence[Block]) -> None:
        """A user's message; several texts are lines of one."""
        self._begun = True
        if blocks:
            self.messages.append(Message(role="user", blocks=self._ordered(blocks, before=len(self.messages))))

    def assistant(self, blocks: Sequence[Block]) -> None:
        """A part of the assistant's turn."""
        self._begun = True
        kept = [block for block in blocks if not (isinstance(block, Text) and not block.text.strip())]
        if self.messages and self.messages[-1].role == "assistant":
            self.messages[-1] = Message(role="assistant", blocks=self.messages[-1].blocks + kept)
        else:
            self.messages.append(Message(role="assistant", blocks=kept))

    def result(self, result: Result) -> None:
        """What a call gave, where every result is a message of its own."""
        last = self.messages[-1] if self.messages else None
        if last and last.role == "user" and all(isinstance(block, Result) for block in last.blocks):
            joined = self._ordered([*last.blocks, result], before=len(self.messages) - 1)
            self.messages[-1] = Message(role="user", blocks=joined)
        else:
            self.user([result])

    def news(self) -> list[str]:
        """Texts since the last answer, the newest first: what a request is for may stand before a reminder that the harness
        adds."""
        texts: list[str] = []
        for message in reversed(self.messages):
            if message.role == "assistant":
                break
            texts += [block.text for block in message.blocks if isinstance(block, Text)]
        return texts

    def _ordered(self, blocks: Sequence[Block], *, before: int) -> list[Block]:
        """Blocks of the message that follows the first `before` ones."""
        called = self.messages[before - 1].call_ids if before else []
        order = {call: index for index, call in enumerate(called)}

        def place(block: Block) -> int:
            return order.get(block.tool_use_id, len(order)) if isinstance(block, Result) else len(order) + 1

        return sorted(blocks, key=place)
