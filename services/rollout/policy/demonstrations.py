"""Demonstrations: executions of the quickstart's agent with a scripted policy, as token rows for supervised training.

An execution gives one row for each context in which something was said last: the main path, a helper's, a summary's.
Rows are rendered as the proxy renders them. Targets are the tokens that the policy would have sampled in that very
context: never a prompt, a tool result, or a turn that a compaction kept verbatim.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from services.mesh.chat import chat_messages, chat_tools, make_renderer
from services.rollout.policy.demonstrator import CAREFUL, SLOPPY, Demonstrator, Manner
from services.rollout.policy.quickstart import Card, Quickstart, Workspace
from services.rollout.policy.vocabulary import CharTokenizer

TALLY = ("turns", "subagents", "compactions")
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"


class Exchange(NamedTuple):
    """One model call: what the agent asked and what was answered."""

    body: dict[str, Any]
    agent_id: str | None
    answer: dict[str, Any]

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The context with the answer at its end, in Anthropic's form."""
        return [*self.body["messages"], {"role": "assistant", "content": self.answer["content"]}]


class Path(NamedTuple):
    """A context whose last `sampled` assistant turns were said by the policy in it."""

    exchange: Exchange
    sampled: int


class Row(NamedTuple):
    """Token ids of a path, and for each whether it is a target."""

    ids: list[int]
    target: list[bool]


def demonstrate(quickstart: Quickstart, card: Card, manner: Manner, seed: str) -> list[Exchange]:
    """One execution's model calls in order; the seed decides about helper, compaction and every choice."""
    rng = random.Random(seed)
    talk = quickstart.conversation
    demonstrator = Demonstrator(card, manner, rng, talk.COMPACT)
    workspace = Workspace(card)
    requests = talk.conversation(
        quickstart.tasks.INSTRUCTION, talk.Plan(seed), workspace.run_tool, dict.fromkeys(TALLY, 0)
    )
    exchanges: list[Exchange] = []
    reply: dict[str, Any] | None = None
    while True:
        try:
            body, agent_id = requests.send(reply)
        except StopIteration:
            return exchanges
        reply = demonstrator.answer(body, agent_id)
        exchanges.append(Exchange(body, agent_id, reply))


def paths(exchanges: Iterable[Exchange]) -> list[Path]:
    """The paths of one execution: each call either goes on with a context or opens a new one."""
    found: list[Path] = []
    for exchange in exchanges:
        before = found[-1] if found else None
        if before is not None and continues(before.exchange, exchange.body, exchange.agent_id):
            found[-1] = Path(exchange, before.sampled + 1)
        else:
            found.append(Path(exchange, 1))
    return found


def continues(before: Exchange, body: dict[str, Any], agent_id: str | None) -> bool:
    """Whether a request goes on with the context that `before` left, answer included."""
    said = before.messages
    return before.agent_id == agent_id and body["messages"][: len(said)] == said


def encode(path: Path, renderer: Any, thought: int) -> Row:
    """The row of a path; `thought` is the length in tokens of the empty thought that the prompt already holds."""
    body = path.exchange.body
    chat = chat_messages(body["system"], path.exchange.messages)
    turns = [index for index, message in enumerate(chat) if message["role"] == "assistant"]
    rendered = renderer.render(chat, tools=chat_tools(body["tools"]))
    target = [False] * len(rendered.token_ids)
    for turn in turns[-path.sampled :]:
        places = [
            place
            for place, (index, sampled) in enumerate(zip(rendered.message_indices, rendered.sampled_mask, strict=True))
            if sampled and index == turn
        ]
        for place in places[thought:]:
            target[place] = True
    end = max(place for place, is_target in enumerate(target) if is_target) + 1
    return Row(list(rendered.token_ids[:end]), target[:end])


def executions(quickstart: Quickstart, manner: Manner, *, count: int, seed: str) -> Iterator[list[Path]]:
    """The paths of `count` demonstrated executions, one after the other, over cards drawn by the seed."""
    rng = random.Random(seed)
    for index in range(count):
        yield paths(demonstrate(quickstart, rng.choice(quickstart.cards), manner, f"{seed}/{index}"))


def rows(found: Iterable[list[Path]], renderer: Any, tokenizer: Any) -> Iterator[list[Row]]:
    """The rows of each execution."""
    thought = len(tokenizer.encode(EMPTY_THOUGHT))
    for execution in found:
        yield [encode(path, renderer, thought) for path in execution]


def corpus(quickstart: Quickstart, *, count: int, seed: str) -> tuple[list[str], list[str]]:
    """The rendered text of `count` executions of each manner, and the fixed texts among it: training a tokenizer."""
    characters = CharTokenizer()
    renderer = make_renderer(characters)

    def text(path: Path) -> str:
        body = path.exchange.body
        chat = chat_messages(body["system"], path.exchange.messages)
        return characters.decode(renderer.render(chat, tools=chat_tools(body["tools"])).token_ids)

    talk = quickstart.conversation
    opening = [{"role": "user", "content": "\n".join((talk.COMPACT, talk.CONTINUED))}]
    preambles = (
        renderer.render(chat_messages(system, opening), tools=chat_tools(tools)).token_ids
        for system, tools in ((talk.MAIN_SYSTEM, talk.MAIN_TOOLS), (talk.HELPER_SYSTEM, talk.HELPER_TOOLS))
    )
    fixed = [characters.decode(ids) for ids in preambles]
    found = [
        path
        for manner in (CAREFUL, SLOPPY)
        for execution in executions(quickstart, manner, count=count, seed=seed)
        for path in execution
    ]
    return [text(path) for path in found], fixed
