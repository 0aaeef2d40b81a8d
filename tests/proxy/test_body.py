"""A body that continues an earlier one is taken apart from there, and gives what the whole gives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.proxy import history
from services.proxy.dialects import anthropic, chat_completions, responses
from services.proxy.dialects.body import _MARK
from services.proxy.dialects.dialect import Dialect
from services.proxy.history import History
from services.proxy.memory import Memory
from services.proxy.refusal import Refused

DIALECTS = [(anthropic.DIALECT, "messages"), (chat_completions.DIALECT, "messages"), (responses.DIALECT, "input")]
FIELDS = ['"model":"m"', '"stream":true', '"temperature":0.5', '"metadata":{"a":[{}],"b":"]}"}', '"tools":[]']
TEXTS = ["a", "b", "], [", '","', "\\", "{}", _MARK.decode(), "\N{SNOWMAN}", "\ud83d", "x" * 300]


def message(role: int, text: str, form: int) -> str:
    content: Any = [{"type": "text", "text": text}] if form % 2 else text
    said = {"role": ("user", "assistant")[role], "content": content}
    return json.dumps(said, indent=1 if form > 1 else None, ensure_ascii=form != 3).encode("utf-8", "replace").decode()


@pytest.fixture(autouse=True, scope="module")
def short() -> Iterator[None]:
    """What is kept is parted after few messages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(history, "_RECENT", 2)
        yield


messages = st.builds(message, st.integers(0, 1), st.sampled_from(TEXTS), st.integers(0, 3))
oddities = st.sampled_from(
    ["7", '"text"', "null", "[]", _MARK.decode(), '{"role":"user"', '],"input":[', '],"messages":[1', ""]
)
edits = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.lists(st.one_of(messages, messages, messages, oddities), max_size=3),
        st.sampled_from([[0], [0], [0], [], [3, 0]]),
        st.lists(st.integers(0, len(FIELDS) - 1), max_size=4),
        st.sampled_from([",", ",", ",", " , ", ",\n\t"]),
        st.sampled_from(["", " ", "}", '"messages":[', f'"x":{_MARK.decode()}', '"messages":[{}]', '"input":[{}]']),
    ),
    min_size=2,
    max_size=8,
)


def body(name: str, told: list[str], before: list[int], after: list[int], comma: str, more: str) -> bytes:
    fields = [*(FIELDS[each] for each in before), f'"{name}":[{comma.join(told)}]', *(FIELDS[each] for each in after)]
    return ("{" + comma.join([*fields, more] if more.strip() else fields) + "}" + more[:1].strip('"')).encode()


def outcome(dialect: Dialect, data: bytes, memory: Memory) -> Any:
    try:
        return dialect.parse(data, {}, memory)
    except Refused as refused:
        return refused.status, refused.what


@pytest.mark.parametrize(("dialect", "name"), DIALECTS, ids=[each.name for each, _ in DIALECTS])
@settings(max_examples=120, deadline=None)
@given(edits=edits)
def test_a_body_gives_the_same_whatever_came_before(dialect: Dialect, name: str, edits: Any) -> None:
    memory, told = Memory(), [message(0, "go", 0)]
    for dropped, more, *how in edits:
        told = told[: max(1, len(told) - dropped)] + more
        data = body(name, told, *how)
        assert outcome(dialect, data, memory) == outcome(dialect, data, Memory())


@pytest.mark.parametrize(("dialect", "name"), DIALECTS, ids=[each.name for each, _ in DIALECTS])
@settings(max_examples=120, deadline=None)
@given(at=st.integers(0, 400), new=st.binary(max_size=3), cut=st.integers(0, 3))
def test_a_body_with_other_bytes_gives_what_it_says(dialect: Dialect, name: str, at: int, new: bytes, cut: int) -> None:
    told = [message(index % 2, f"text {index}", index % 4) for index in range(5)]
    memory, data = Memory(), body(name, told, [0], [4], ",", "")
    dialect.parse(data, {}, memory)
    other = data[:at] + new + data[at + cut :]
    assert outcome(dialect, other, memory) == outcome(dialect, other, Memory())


@pytest.mark.parametrize(("dialect", "name"), DIALECTS, ids=[each.name for each, _ in DIALECTS])
@pytest.mark.parametrize("later", ["[{}]", "[]", f"[{_MARK.decode()}]", f"[{_MARK.decode()},1]", "7", '"text"'])
def test_of_two_lists_the_last_one_counts(dialect: Dialect, name: str, later: str) -> None:
    memory, told = Memory(), [message(0, "go", 0), message(1, "a", 0), message(0, "b", 0)]
    dialect.parse(body(name, told[:1], [0], [], ",", ""), {}, memory)
    other = body(name, told, [0], [], ",", f'"{name}":{later}')
    assert outcome(dialect, other, memory) == outcome(dialect, other, Memory())


@pytest.mark.parametrize(("dialect", "name"), DIALECTS, ids=[each.name for each, _ in DIALECTS])
def test_what_is_known_is_not_taken_apart_again(dialect: Dialect, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    known = History.known
    monkeypatch.setattr(History, "known", lambda self, data: found.append(known(self, data)) or found[-1])
    memory = Memory()
    told = [message(0, "go", 0)]
    for turn in range(7):
        # A mark is moved along with the last message, and what is said about the request differs each time.
        marked = told[-1][:-1] + ', "cache_control": {"type": "ephemeral"}}'
        about = [f'"metadata":{{"turn":"{turn}"}}', *FIELDS[3:]]
        data = f'{{"model":"m","{name}":[{",".join([*told[:-1], marked])}],{",".join(about)}}}'.encode()
        assert dialect.parse(data, {}, memory) == dialect.parse(data, {}, Memory())
        told += [message(1, f"answer {turn}", 1), message(0, f"result {turn}", 1)]
    # The last message of the body before has lost its mark, those before it are as they were.
    assert [each and each.messages for each in found] == [None, 2, 4, 6, 8, 10]
