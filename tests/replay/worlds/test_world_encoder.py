"""The tiny chat format, through the proxy's own conversation, tree and dialect."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from replay.worlds.encoder import ASSISTANT, CLOSE, END, OPEN, RESULT, SYSTEM, USER, WorldEncoder, words
from schemas.records import CallRecord, VersionSpan
from services.proxy.conversation import Message, Request, encode_blocks, link
from services.proxy.dialects import anthropic
from services.proxy.tree import Tree, answer_key

ENCODER = WorldEncoder()


def request(*messages: dict[str, Any]) -> Request:
    body = {"model": "m", "max_tokens": 8, "system": "be good", "messages": list(messages)}
    return anthropic.parse(msgspec.json.encode(body), {})


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def add(tree: Tree, asked: Request, output: list[int]) -> list[dict[str, Any]]:
    """Record an answer; its content as a client echoes it."""
    place = tree.place(asked.conversation)
    new_ids = ENCODER.new_ids(asked.conversation, place)
    call = f"c-000001.00-0-{tree.next_index:04d}"
    blocks = ENCODER.parse(output, new_ids, call=call, calls_allowed=True)
    answer = Message(role="assistant", blocks=blocks)
    record = CallRecord(
        call=call,
        execution="e-000001.00",
        attempt=0,
        index=tree.next_index,
        parent=place.parent.call if place.parent else None,
        input_ids=new_ids,
        output_ids=output,
        logprobs=[-1.0] * len(output),
        versions=[VersionSpan(version=0, start=0, end=len(output))],
        temperature=1.0,
        finish="stop",
        cell="cell-0",
        role="main",
        request=asked.digest,
        prefix=link(place.chain, answer_key(call, answer)).hex(),
        answer=encode_blocks(blocks),
    )
    tree.add(record, answer)
    content: list[dict[str, Any]] = msgspec.to_builtins(blocks)
    return content


def test_a_root_is_rendered_whole_and_a_child_by_what_is_new() -> None:
    tree = Tree()
    first = request(user("w20 w21"))
    place = tree.place(first.conversation)
    assert ENCODER.new_ids(first.conversation, place) == [SYSTEM, *words("be good"), END, USER, 20, 21, END, ASSISTANT]
    said = [30, OPEN, 31, 32, CLOSE, END]
    content = add(tree, first, said)
    assert [block["type"] for block in content] == ["text", "tool_use"]
    result = {"type": "tool_result", "tool_use_id": content[1]["id"], "content": "w40"}
    second = request(user("w20 w21"), {"role": "assistant", "content": content}, user([result]))
    place = tree.place(second.conversation)
    assert place.parent is tree.nodes[0]
    assert ENCODER.new_ids(second.conversation, place) == [RESULT, 40, END, ASSISTANT]


def test_a_recorded_turn_under_another_history_enters_by_its_ids() -> None:
    tree = Tree()
    content = add(tree, request(user("w20")), [30, OPEN, 31, 32, CLOSE, END])
    other = request(user("w22"), {"role": "assistant", "content": content}, user("w23"))
    place = tree.place(other.conversation)
    assert place.parent is None
    ids = ENCODER.new_ids(other.conversation, place)
    assert ids[-11:] == [ASSISTANT, 30, OPEN, 31, 32, CLOSE, END, USER, 23, END, ASSISTANT]


def test_a_foreign_turn_is_rendered_and_a_cut_one_closed() -> None:
    tree = Tree()
    other = request(user("w20"), {"role": "assistant", "content": "w33 hello"}, user("w23"))
    ids = ENCODER.new_ids(other.conversation, tree.place(other.conversation))
    assert ids[-8:] == [ASSISTANT, 33, *words("hello"), END, USER, 23, END, ASSISTANT]
    content = add(tree, request(user("w20")), [30, 31])
    more = request(user("w20"), {"role": "assistant", "content": content}, user("w23"))
    assert ENCODER.new_ids(more.conversation, tree.place(more.conversation)) == [END, USER, 23, END, ASSISTANT]


@pytest.mark.parametrize("ids", [[OPEN, 20, 21], [OPEN, 20, CLOSE, END], [OPEN, END, 20, CLOSE], [CLOSE, END]])
def test_a_malformed_call_is_text(ids: list[int]) -> None:
    (block,) = ENCODER.parse(ids, [], call="c-000001.00-0-0000", calls_allowed=True)
    assert msgspec.to_builtins(block)["type"] == "text"


def test_a_call_that_is_not_allowed_is_text() -> None:
    (block,) = ENCODER.parse([OPEN, 20, 21, CLOSE, END], [], call="c-000001.00-0-0000", calls_allowed=False)
    assert msgspec.to_builtins(block)["type"] == "text"
