"""Executions of the quickstart's agent with a policy in the same process: the measure of a starting policy.

Contexts are kept as the proxy keeps them: what was sampled stays as it was sampled, and only what is new is rendered.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch

from services.mesh.chat import ChatTokenizer, chat_messages, chat_tools
from services.rollout.policy.demonstrations import TALLY, Exchange, continues
from services.rollout.policy.quickstart import Card, Quickstart, Workspace
from services.rollout.policy.sampling import Sampled, sample
from services.rollout.reference.model import Qwen3


class Context:
    """A rendered context: all its ids and, for each, the log-probability with which it was sampled here (else None)."""

    def __init__(self, prompt: list[int]) -> None:
        self.ids = list(prompt)
        self.logprobs: list[float | None] = [None] * len(prompt)
        self.said = 0

    def extend(self, prompt: list[int]) -> None:
        """Go on with a longer prompt that starts with these ids."""
        self.logprobs += [None] * (len(prompt) - len(self.ids))
        self.ids = list(prompt)

    def add(self, sampled: Sampled) -> None:
        """Append a completion."""
        self.said = len(sampled.ids)
        self.ids += sampled.ids
        self.logprobs += sampled.logprobs


class Execution:
    """One execution in progress and, when it has ended, what came out of it."""

    def __init__(self, quickstart: Quickstart, card: Card, seed: str) -> None:
        self.workspace = Workspace(card)
        self.tally = dict.fromkeys(TALLY, 0)
        plan = quickstart.conversation.Plan(seed)
        instruction = quickstart.tasks.INSTRUCTION
        self.requests: Generator[tuple[dict[str, Any], str | None], Any, None] = quickstart.conversation.conversation(
            instruction, plan, self.workspace.run_tool, self.tally
        )
        self.contexts: list[Context] = []
        self.exchange: Exchange | None = None
        self.calls = 0
        self.malformed = 0
        self.asked: tuple[dict[str, Any], str | None] | None = next(self.requests)

    @property
    def reward(self) -> float:
        """In [0, 1], as the task's tests would give it now."""
        return self.workspace.reward()

    @property
    def generated(self) -> int:
        """Tokens sampled in all contexts."""
        return sum(logprob is not None for context in self.contexts for logprob in context.logprobs)

    def prompt(self, renderer: Any) -> list[int]:
        """The ids of the pending request, going on with the last context where it continues it."""
        assert self.asked is not None
        body, agent_id = self.asked
        chat, tools = chat_messages(body["system"], body["messages"]), chat_tools(body["tools"])
        if self.exchange is not None and continues(self.exchange, body, agent_id):
            context = self.contexts[-1]
            known = len(chat_messages(body["system"], self.exchange.messages))
            at = len(context.ids) - context.said
            bridged = renderer.bridge_to_next_turn(context.ids[:at], context.ids[at:], chat[known:], tools=tools)
            context.extend(bridged.token_ids)
        else:
            rendered = renderer.render(chat, tools=tools, add_generation_prompt=True)
            self.contexts.append(Context(rendered.token_ids))
        return self.contexts[-1].ids

    def take(self, sampled: Sampled, renderer: Any, tokenizer: ChatTokenizer) -> None:
        """Give the agent what was sampled; it acts and asks again, or ends."""
        assert self.asked is not None
        self.contexts[-1].add(sampled)
        answer = self._answer(sampled, renderer, tokenizer)
        self.exchange = Exchange(*self.asked, answer)
        try:
            self.asked = self.requests.send(answer)
        except StopIteration:
            self.asked = None

    def _answer(self, sampled: Sampled, renderer: Any, tokenizer: ChatTokenizer) -> dict[str, Any]:
        parsed = renderer.parse_response(sampled.ids)
        blocks: list[dict[str, Any]] = [{"type": "text", "text": parsed.content}] if parsed.content else []
        for call in parsed.tool_calls:
            self.calls += 1
            if call.status.name == "OK" and isinstance(call.arguments, dict):
                name, given = call.name, call.arguments
                blocks.append({"type": "tool_use", "id": f"toolu_{self.calls}", "name": name, "input": given})
            else:
                self.malformed += 1
                blocks.append({"type": "text", "text": call.raw})
        return {"role": "assistant", "content": blocks}


def play(
    model: Qwen3,
    renderer: Any,
    tokenizer: ChatTokenizer,
    quickstart: Quickstart,
    draws: Sequence[tuple[Card, str]],
    generator: torch.Generator,
) -> list[Execution]:
    """Run one execution for each (card, seed), in step with one another, to their ends."""
    executions = [Execution(quickstart, card, seed) for card, seed in draws]
    stops = set(renderer.get_stop_token_ids())
    most = quickstart.conversation.MAX_TOKENS
    while pending := [execution for execution in executions if execution.asked is not None]:
        prompts = [execution.prompt(renderer) for execution in pending]
        for execution, sampled in zip(
            pending, sample(model, prompts, most=most, stops=stops, generator=generator), strict=True
        ):
            execution.take(sampled, renderer, tokenizer)
    return executions
