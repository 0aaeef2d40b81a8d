"""Keys see what is rendered, and nothing of what harnesses rewrite on the way back."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from services.proxy.conversation import (
    Call,
    Conversation,
    Message,
    Result,
    Text,
    Thinking,
    canonical,
    decode_blocks,
    encode_blocks,
)
from services.proxy.dialects.anthropic import parse
from services.proxy.transcript import Transcript
from tests.proxy.bodies import body_of

numbers = st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False))
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.text()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.text() | st.from_regex(r"[0-9]{1,3}", fullmatch=True), inner, max_size=4),
    ),
    max_leaves=12,
)
arguments = st.dictionaries(st.text() | st.from_regex(r"[0-9]{1,3}", fullmatch=True), values, max_size=5)


def javascript(value: Any) -> Any:
    """What `JSON.stringify(JSON.parse(x))` makes of a value: doubles, whole ones without a fraction, integer-like keys
    first and ascending."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, dict):
        whole = sorted((key for key in value if key.isascii() and key.isdigit() and str(int(key)) == key), key=int)
        rest = [key for key in value if key not in whole]
        return {key: javascript(value[key]) for key in [*whole, *rest]}
    if isinstance(value, list):
        return [javascript(item) for item in value]
    try:
        number = float(value)
    except OverflowError:
        return None
    # Shortest digits that give the double back, then zeros, as JavaScript prints whole numbers.
    if number.is_integer() and abs(number) < 1e21:
        digits, _, exponent = f"{number!r}".partition("e")
        whole = digits.replace(".", "").removesuffix("0") if exponent else digits.removesuffix(".0")
        if exponent:
            places = int(exponent) - (len(digits.partition(".")[2]) if digits.partition(".")[2] != "0" else 0)
            return int(whole) * 10**places if places >= 0 else int(number)
        return int(whole)
    return number


@given(arguments)
def test_an_echo_by_javascript_has_the_key_of_the_original(value: dict[str, Any]) -> None:
    def key(given: dict[str, Any]) -> bytes:
        return Message(role="assistant", blocks=[Call(id="t", name="f", input=given)]).key()

    assert key(javascript(value)) == key(value)
    assert canonical(javascript(value)) == canonical(value)


def test_the_rewrites_that_were_seen() -> None:
    before = json.loads('{"subject":"s","10":1e3,"2":5000.0,"big":12345678901234567890}')
    after = json.loads('{"2":5000,"10":1000,"subject":"s","big":12345678901234567000}')
    assert canonical(before) == canonical(after)
    assert canonical(True) is True and canonical(10**400) is None and canonical(1.5) == 1.5


def told(messages: list[Message]) -> list[Message]:
    transcript = Transcript()
    for message in messages:
        (transcript.user if message.role == "user" else transcript.assistant)(message.blocks)
    return transcript.messages


@given(st.lists(st.text(), max_size=4), st.lists(st.sampled_from(["", " ", "\n\n", "\t"]), max_size=3), st.randoms())
def test_white_space_text_of_the_assistant_is_nothing(texts: list[str], blank: list[str], draw: Any) -> None:
    kept = [Text(text=text) for text in texts if text.strip()]
    mixed = list(kept)
    for text in blank:
        mixed.insert(draw.randint(0, len(mixed)), Text(text=text))
    user = Message(role="user", blocks=[Text(text="u")])
    plain, spoiled = (told([user, Message(role="assistant", blocks=list(b))]) for b in (kept, mixed))
    assert plain == spoiled


@given(st.permutations(range(4)))
def test_results_come_in_the_order_of_their_calls(order: list[int]) -> None:
    calls = [Call(id=f"t{i}", name="f", input={}) for i in range(4)]
    results = [Result(tool_use_id=f"t{i}", content=str(i)) for i in order]
    messages = told(
        [
            Message(role="user", blocks=[Text(text="go")]),
            Message(role="assistant", blocks=list(calls)),
            Message(role="user", blocks=[results[0], Text(text="and"), *results[1:]]),
        ]
    )
    assert [b.content for b in messages[2].blocks if isinstance(b, Result)] == ["0", "1", "2", "3"]
    assert messages[2].blocks[-1] == Text(text="and")


def conversation(*messages: Any, **more: Any) -> Conversation:
    return parse(json.dumps(body_of(*messages, **more)).encode(), {}).conversation


def keys(told: Conversation) -> list[bytes]:
    return [told.key(), *(message.key() for message in told.messages)]


def test_strings_blocks_markers_and_the_billing_block_make_no_difference() -> None:
    marked = [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}, "citations": []}]
    plain = conversation("hi", "yes", [{"type": "tool_result", "tool_use_id": "t", "content": "r"}])
    other = conversation(
        marked,
        [{"type": "text", "text": "yes", "citations": None}],
        [
            {
                "type": "tool_result",
                "tool_use_id": "t",
                "is_error": False,
                "content": [{"type": "text", "text": "r", "cache_control": {}}],
                "cache_control": {"type": "ephemeral"},
            }
        ],
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.220.abc; cc_entrypoint=sdk-cli;"},
            {"type": "text", "text": "You are.", "cache_control": {"type": "ephemeral"}},
        ],
    )
    assert keys(plain) == keys(other)


def test_what_is_rendered_makes_a_difference() -> None:
    base = conversation("hi")
    assert keys(conversation("ho"))[1] != keys(base)[1]
    assert conversation("hi", system="Another.").key() != base.key()
    assert conversation("hi", tools=[]).key() != base.key()
    agent = parse(json.dumps(body_of("hi")).encode(), {"x-claude-code-agent-id": "a1"}).conversation
    assert agent.key() != base.key() and keys(agent)[1] == keys(base)[1]


def test_neighbouring_assistant_messages_are_one() -> None:
    a, b = ({"role": "assistant", "content": text} for text in ("one ", "two"))
    told = conversation("hi", a, b, {"role": "user", "content": "go"})
    assert [message.role for message in told.messages] == ["user", "assistant", "user"]
    assert told.messages[1].blocks == [Text(text="one "), Text(text="two")]


def test_recorded_answers_come_back_as_they_were() -> None:
    blocks = [Thinking(thinking="hm"), Text(text="é"), Call(id="t", name="f", input={"2": 1.0, "1": [None, "x"]})]
    assert decode_blocks(encode_blocks(blocks)) == blocks
