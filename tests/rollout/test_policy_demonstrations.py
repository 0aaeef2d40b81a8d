"""Demonstrations have the shape of what the quickstart's agent sends, and rows hold just what a policy would sample."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.mesh.chat import ChatTokenizer, chat_messages, chat_tools, load_tokenizer, make_renderer
from services.rollout.policy.demonstrations import (
    EMPTY_THOUGHT,
    Row,
    corpus,
    demonstrate,
    encode,
    executions,
    paths,
    rows,
)
from services.rollout.policy.demonstrations import Path as Said
from services.rollout.policy.demonstrator import CAREFUL, SLOPPY
from services.rollout.policy.quickstart import Card, Workspace, load_quickstart
from services.rollout.policy.rollouts import Execution
from services.rollout.policy.sampling import Sampled
from services.rollout.policy.vocabulary import phrases, train_tokenizer
from tests.examples.scripted import Act, Endpoint, Link, say
from tests.examples.test_agent import run, seed

QUICKSTART = load_quickstart()
TALK = QUICKSTART.conversation
CARD = Card("ada", "lime", "5")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    path = tmp_path_factory.mktemp("tokenizer")
    texts, fixed = corpus(QUICKSTART, count=60, seed="t")
    train_tokenizer(texts, phrases(fixed), 640).save(str(path / "tokenizer.json"))
    return load_tokenizer(path)


@pytest.mark.parametrize("manner", [CAREFUL, SLOPPY])
@pytest.mark.parametrize("branches", [(False, False), (True, False), (False, True), (True, True)])
def test_the_agent_sends_over_the_wire_what_demonstrations_hold(
    tmp_path: Path, manner: Any, branches: tuple[bool, bool]
) -> None:
    plan = seed(helper=branches[0], compaction=branches[1])
    exchanges = demonstrate(QUICKSTART, CARD, manner, plan)
    acts: list[Act] = [say(*exchange.answer["content"]) for exchange in exchanges]

    def surplus(link: Link) -> None:
        raise AssertionError(f"the agent asked once more: {link.asked.body}")

    with Endpoint(*acts, surplus) as endpoint:
        ran = run(endpoint, tmp_path, plan, instruction=QUICKSTART.tasks.INSTRUCTION)
    assert ran.code == 0 and len(endpoint.asked) == len(exchanges)
    for asked, exchange in zip(endpoint.asked, exchanges, strict=True):
        assert {key: asked.body[key] for key in exchange.body} == exchange.body
        assert ("x-claude-code-agent-id" in asked.headers) == (exchange.agent_id is not None)


def targets(row: Row, tokenizer: ChatTokenizer) -> list[str]:
    """The text of each run of targets."""
    runs: list[list[int]] = []
    for place, (token, wanted) in enumerate(zip(row.ids, row.target, strict=True)):
        if wanted and (place == 0 or not row.target[place - 1]):
            runs.append([])
        if wanted:
            runs[-1].append(token)
    return [tokenizer.decode(ids) for ids in runs]


def said(call: dict[str, Any]) -> str:
    (block,) = call["content"]
    if block["type"] == "text":
        return block["text"] + "<|im_end|>"
    function = json.dumps({"name": block["name"], "arguments": block["input"]})
    return f"<tool_call>\n{function}\n</tool_call><|im_end|>"


def test_targets_are_what_was_said_in_that_context(tokenizer: ChatTokenizer) -> None:
    exchanges = demonstrate(QUICKSTART, CARD, CAREFUL, seed(helper=True, compaction=True))
    found = paths(exchanges)
    (encoded,) = rows([found], make_renderer(tokenizer), tokenizer)
    told = [part for row in encoded for part in targets(row, tokenizer)]
    assert told == [said(exchange.answer) for exchange in exchanges]  # each once, the kept turn not again
    assert [path.sampled for path in found] == [2, 2, len(exchanges) - 4]
    assert tokenizer.decode(encoded[2].ids).count("cat in.txt") == 1


def test_a_row_is_what_a_proxy_would_have_built_turn_by_turn(tokenizer: ChatTokenizer) -> None:
    renderer = make_renderer(tokenizer)
    thought = len(tokenizer.encode(EMPTY_THOUGHT))
    for plan in (seed(), seed(helper=True), seed(compaction=True)):
        exchanges = demonstrate(QUICKSTART, CARD, SLOPPY, plan)
        execution = Execution(QUICKSTART, CARD, plan)
        for exchange in exchanges:
            prompt = list(execution.prompt(renderer))
            chat = chat_messages(exchange.body["system"], exchange.body["messages"])
            tools = chat_tools(exchange.body["tools"])
            assert prompt == renderer.render(chat, tools=tools, add_generation_prompt=True).token_ids
            row = encode(Said(exchange, 1), renderer, thought)
            assert row.ids[: len(prompt)] == prompt
            answer = row.ids[len(prompt) :]
            execution.take(Sampled(answer, [0.0] * len(answer)), renderer, tokenizer)
        assert execution.asked is None and execution.malformed == 0
        (encoded,) = rows([paths(exchanges)], renderer, tokenizer)
        assert [row.ids for row in encoded] == [context.ids for context in execution.contexts]
        assert [row.target for row in encoded] == [
            [logprob is not None for logprob in context.logprobs] for context in execution.contexts
        ]


def test_executions_are_a_function_of_the_seed() -> None:
    def texts(name: str) -> list[Any]:
        return [[path.exchange.messages for path in one] for one in executions(QUICKSTART, SLOPPY, count=20, seed=name)]

    assert texts("a") == texts("a") != texts("b")


def test_the_workspace_answers_like_the_agent(tmp_path: Path) -> None:
    workspace = Workspace(CARD)
    blocks = [
        {"type": "tool_use", "id": f"t{number}", "name": name, "input": given}
        for number, (name, given) in enumerate(
            [
                ("bash", {"command": "cat in.txt"}),
                ("bash", {"command": "cat out.txt"}),
                ("write_file", {"path": "out.txt", "content": "name=ada\ncolor"}),
                ("bash", {"command": "cat in.txt out.txt"}),
                ("bash", {"command": "nosuch 'x'"}),
                ("bash", {}),
                ("nothing", {}),
            ]
        )
    ]
    with Endpoint(say(*blocks), say({"type": "text", "text": "Done."})) as endpoint:
        run(endpoint, tmp_path, seed())
    answers = endpoint.asked[1].body["messages"][-1]["content"]
    assert answers == [workspace.run_tool(block, TALK.MAIN_TOOLS) for block in blocks]
    assert workspace.reward() == 0.25
