"""Between conversations and token ids, through `renderers`. Sampled ids are never encoded again.

A root is rendered whole; a request that extends a node costs what is new: `bridge_to_next_turn` gets the last turn and
the new messages only. A recorded turn that comes back under another history (after a compaction) enters by its stored
ids, as context; a turn of somebody else is rendered. Text never becomes a control token (`services.mesh.chat`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from services.mesh.chat import ChatTokenizer, chat_messages, chat_tools
from services.proxy.conversation import Block, Call, Conversation, Message, Text, Thinking, encode_blocks, shaped
from services.proxy.tree import Place, Turn

if TYPE_CHECKING:
    from renderers import Renderer  # type: ignore[import-untyped]

_TAIL = 64
"""Prompt tokens that a bridge looks at: it only wants to know how the assistant's turn began."""
_ANYBODY = {"role": "user", "content": "."}


class PromptEncoder(Protocol):
    """What a proxy asks of it; `Encoder` here, a tiny vocabulary in a simulation."""

    stop_ids: list[int]

    def new_ids(self, conversation: Conversation, place: Place) -> list[int]: ...

    def parse(
        self, output_ids: list[int], prompt_tail: list[int], *, call: str, calls_allowed: bool
    ) -> list[Block]: ...

    def stopped(self, output_ids: list[int], stops: Sequence[str]) -> Stop | None: ...


class Stop(msgspec.Struct, frozen=True):
    """Where a stop sequence ended an answer."""

    text: str
    """The sequence."""
    tokens: int
    """Tokens up to the one that completed it, that one included."""


class Encoder:
    def __init__(self, tokenizer: ChatTokenizer, renderer: Renderer) -> None:
        self._tokenizer, self._renderer = tokenizer, renderer
        self.stop_ids: list[int] = list(renderer.get_stop_token_ids())
        """Tokens that end a turn, the usual one first."""

    def new_ids(self, conversation: Conversation, place: Place) -> list[int]:
        """Token ids that the request adds to its parent's, up to where the answer begins."""
        tools = chat_tools(conversation.tools) or None
        groups = _split(place.rest)
        lead = _chat(groups[0][1])
        if place.parent is None:
            head = chat_messages(conversation.system or None, []) + lead
            rendered = self._renderer.render(head, tools=tools, add_generation_prompt=True)
            ids, prompt = list(rendered.token_ids), _trailing(rendered.message_indices)
        else:
            parent = place.parent
            ids, prompt = self._bridge(parent.input_ids[-_TAIL:].tolist(), parent.output_ids.tolist(), lead, tools)
        for turn, following in groups[1:]:
            assert turn is not None
            if turn.node is not None:
                said = turn.node.output_ids.tolist()
            else:
                # A rendered turn brings its own beginning, in place of the generation prompt.
                ids = ids[: len(ids) - prompt]
                said = self._foreign(turn.message)
            if following:
                more, prompt = self._bridge(ids[-_TAIL:], said, _chat(following), tools)
                ids += said + more
            else:
                ids += self._open(said)
        return ids

    def parse(self, output_ids: list[int], prompt_tail: list[int], *, call: str, calls_allowed: bool) -> list[Block]:
        """Content blocks of an answer. A tool call that is malformed, or not allowed, is text as it was sampled.

        Call ids come from `call`, so they are unique over the execution.
        """
        try:
            parsed = self._renderer.parse_response(output_ids, prompt_ids=prompt_tail[-_TAIL:])
        except (ValueError, RecursionError):
            # Numbers of thousands of digits and the like: what json refuses without calling it a syntax error.
            return _texts(self._text(output_ids))
        blocks: list[Block] = []
        spoiled: list[str] = []
        for attempt in parsed.tool_calls:
            made = Call(id=f"toolu_{_plain(call)}_{len(blocks)}", name=attempt.name or "", input={})
            if calls_allowed and attempt.name and _is_call(attempt.name, attempt.arguments):
                blocks.append(Call(id=made.id, name=attempt.name, input=attempt.arguments))
            else:
                start, end = attempt.token_span
                spoiled.append(self._text(output_ids[start:end]))
        text = _texts("\n".join(part for part in [parsed.content, *spoiled] if part))
        thoughts: list[Block] = [Thinking(thinking=parsed.reasoning_content)] if parsed.reasoning_content else []
        return thoughts + text + blocks

    def stopped(self, output_ids: list[int], stops: Sequence[str]) -> Stop | None:
        """The stop sequence that was completed first, whoever of engine and proxy noticed it."""
        return first_stop(self._text, output_ids, stops)

    def _bridge(self, prompt: list[int], said: list[int], following: list[Any], tools: Any) -> tuple[list[int], int]:
        """Ids from the end of a turn to the next answer, and how many of them are the generation prompt."""
        for completion in (said, self.stop_ids[:1]):
            bridged = self._renderer.bridge_to_next_turn(prompt, completion, following, tools=tools)
            # None: the renderer would rather render all again (a thought that was never closed). The turn stays as it
            # was sampled, and what follows a closed turn doesn't depend on what was in it.
            if bridged is not None and bridged.token_ids[: len(prompt) + len(completion)] == prompt + completion:
                new = list(bridged.token_ids[len(prompt) + len(completion) :])
                if completion is not said and (not said or said[-1] not in self.stop_ids):
                    new.insert(0, self.stop_ids[0])
                return new, _trailing(bridged.message_indices)
        raise AssertionError(
            f"{type(self._renderer).__name__} cannot continue a turn with {[m['role'] for m in following]}"
        )

    def _foreign(self, message: Message) -> list[int]:
        """Ids of an assistant turn that we didn't sample, from its beginning to its end token."""
        rendered = self._renderer.render([_ANYBODY, *_chat([message])])
        ids = [token for token, index in zip(rendered.token_ids, rendered.message_indices, strict=True) if index == 1]
        while ids and ids[-1] not in self.stop_ids:
            ids.pop()
        return ids

    def _open(self, said: list[int]) -> list[int]:
        return said[:-1] if said and said[-1] in self.stop_ids else said

    def _text(self, ids: list[int]) -> str:
        return self._tokenizer.decode([token for token in ids if token not in self.stop_ids])


def first_stop(text: Callable[[list[int]], str], ids: list[int], stops: Sequence[str]) -> Stop | None:
    """The stop sequence that `ids` completed first, of those that end at one token the one that begins first. A sequence
    that the first n tokens hold is in what any more of them hold, so n is found by halving."""

    def held(count: int) -> list[tuple[int, str]]:
        said = text(ids[:count])
        return sorted((at, stop) for stop in stops if (at := said.find(stop)) >= 0)

    if not stops or not held(len(ids)):
        return None
    none, some = 0, len(ids)
    while some - none > 1:
        half = (none + some) // 2
        none, some = (none, half) if held(half) else (half, some)
    return Stop(held(some)[0][1], some)


def cut_at(blocks: Sequence[Block], stop: str) -> list[Block]:
    """An answer without the stop sequence that ended it, and without what the last token brought after it. Blanks at
    the ends of a text are gone by now, also those of the sequence."""
    kept = list(blocks)
    for index in reversed(range(len(kept))):
        block = kept[index]
        if not isinstance(block, (Text, Thinking)):
            continue
        said = block.text if isinstance(block, Text) else block.thinking
        before, found, _ = said.partition(stop)
        if not found and said.endswith(stop.strip()):
            before = said.removesuffix(stop.strip())
        left = before.strip() if before != said else said
        if left:
            kept[index] = Text(text=left) if isinstance(block, Text) else Thinking(thinking=left)
        else:
            del kept[index]
        break
    return kept


def _split(rest: Sequence[Turn]) -> list[tuple[Turn | None, list[Message]]]:
    """(None, messages before the first assistant turn), then (assistant turn, messages after it) for each."""
    groups: list[tuple[Turn | None, list[Message]]] = [(None, [])]
    for turn in rest:
        if turn.message.role == "assistant":
            groups.append((turn, []))
        else:
            groups[-1][1].append(turn.message)
    return groups


def _chat(messages: Sequence[Message]) -> list[Any]:
    return chat_messages(None, shaped(messages))


def _trailing(indices: Sequence[int]) -> int:
    """Tokens at the end that belong to no message: the generation prompt."""
    count = 0
    while count < len(indices) and indices[-1 - count] == -1:
        count += 1
    return count


def _texts(text: str) -> list[Block]:
    """Without blanks at its ends, which some harnesses drop: what they send back is then what they got."""
    told = text.strip()
    return [Text(text=told)] if told else []


def _is_call(name: Any, arguments: Any) -> bool:
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return False
    try:
        encode_blocks([Call(id="", name=name, input=arguments)])
    except (ValueError, RecursionError):
        return False
    return True


def _plain(call: str) -> str:
    return call[2:].replace(".", "_")
