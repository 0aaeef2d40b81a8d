"""What carries a picture is refused at its place whatever it is called; what is text stays."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.proxy.conversation import Request
from services.proxy.dialects import anthropic, chat_completions, responses
from services.proxy.dialects.pictures import unreadable
from services.proxy.refusal import Refused

PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(range(256))).decode()
SOUND = base64.b64encode(bytes(range(256))).decode()

PICTURES: dict[str, dict[str, Any]] = {
    "a source in base64": {"source": {"type": "base64", "data": SOUND}},
    "a data: URL": {"thumbnail": {"url": f"data:image/png;base64,{PNG}"}},
    "a data: URL of something": {"link": f"data:application/octet-stream;base64,{SOUND}"},
    "a data: URL in plain": {"link": "data:image/svg+xml,<svg/>"},
    "a media type": {"media_type": "image/webp", "url": "https://x"},
    "a media type in other letters": {"parts": [{"mimeType": "Audio/WAV", "data": SOUND}]},
    "data that are no text": {"file": {"mime_type": "application/pdf", "data": SOUND}},
    "a resource": {"resource": {"uri": "file:///a", "blob": SOUND}},
    "an image that was made": {"data": [{"b64_json": SOUND}]},
    "an encoding": {"content": SOUND, "encoding": "base64"},
    "a picture by its beginning": {"screenshot": PNG},
    "a media type as HTTP has it": {"file": {"content_type": "image/x", "content": SOUND}},
    "a media type and something encoded": {"file": {"mimeType": "image/x", "bytes": SOUND}},
    "a picture in another block": {"content": [{"type": "image", "source": {"type": "url", "url": "https://x"}}]},
    "a picture in another vendor's words": {"output": [{"type": "input_image", "image_url": "https://x"}]},
}
TEXTS: dict[str, dict[str, Any]] = {
    "nothing else": {},
    "an address": {"url": "https://x/picture.png", "title": "a picture"},
    "what is encrypted": {"content": [{"type": "web_search_result", "encrypted_content": SOUND * 9}]},
    "a text that names a data: URL": {"text": f"<img src='data:image/png;base64,{PNG}'>"},
    "a data: URL of plain text": {"link": "data:text/plain,hello"},
    "a document as text": {"source": {"type": "text", "media_type": "text/plain", "data": "all"}},
    "JSON as data": {"mimeType": "application/vnd.api+json; charset=utf-8", "data": "{}"},
    "the beginning of a picture as a word": {"name": "iVBORw0KGgo"},
    "a kind as a value": {"schema": {"type": "image", "description": "what it is"}},
    "a long word": {"digest": "0123456789abcdef" * 64},
    "a drawing as its source": {"resource": {"uri": "file:///a.svg", "mimeType": "image/svg+xml", "text": "<svg/>"}},
    "a link to a picture": {"links": [{"type": "resource_link", "uri": "file:///a.png", "mimeType": "image/png"}]},
    "a dependency": {"value": {"dependencies": {"base64": "^1.0.0"}}},
    "an object of git": {"value": {"path": "a.py", "blob": "3b18e512dba79e4c8300dd08aeb37f8e728b8dad"}},
    "an object of git with longer names": {"value": {"path": "a.py", "blob": "0123456789abcdef" * 4}},
    "a setting": {"value": {"transfer": {"encoding": "base64", "limit": 3}}},
    "a schema of what would be encoded": {"value": {"type": "base64", "description": "of the file"}},
    "a listing": {"assets": [{"name": "a.png", "url": "https://x/a.png", "content_type": "image/png", "size": 3}]},
    "a column of media types": {"value": [{"mime_type": "image/png", "count": 3}]},
    "source as data": {"resource": {"mime_type": "application/sql", "data": "select 1"}},
}

Ask = Callable[[dict[str, Any]], Request]


def _messages(content: Any) -> Request:
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": content}]}
    return anthropic.parse(json.dumps(body).encode(), {})


def _chat(content: Any, role: str = "user", **more: Any) -> Request:
    messages = [{"role": "user", "content": "hi"}, {"role": role, "content": content, **more}]
    return chat_completions.parse(json.dumps({"messages": messages}).encode(), {})


def _responses(*items: Any) -> Request:
    return responses.parse(json.dumps({"input": [{"role": "user", "content": "hi"}, *items]}).encode(), {})


def _result(block: Any) -> Request:
    return _messages([{"type": "tool_result", "tool_use_id": "t", "content": [block]}])


PLACES: dict[str, Ask] = {
    "messages.0.content.0.unheard_of": lambda block: _messages([block]),
    "messages.0.content.0.tool_result.content.0.unheard_of": _result,
    "messages.1.content.0: unheard_of": lambda block: _chat([block]),
    "messages.1.content.1: unheard_of": lambda block: _chat(["x", block], "tool", tool_call_id="t"),
    "input.1: unheard_of": _responses,
    "input.1.content.0: unheard_of": lambda block: _responses({"role": "user", "content": [block]}),
    "input.1.output.0: unheard_of": lambda block: _responses(
        {"type": "function_call_output", "call_id": "c", "output": [block]}
    ),
}


@pytest.mark.parametrize("carries", PICTURES)
@pytest.mark.parametrize("place", PLACES)
def test_a_picture_in_a_block_that_nobody_knows_is_refused_at_its_place(place: str, carries: str) -> None:
    with pytest.raises(Refused) as refused:
        PLACES[place]({"type": "unheard_of", **PICTURES[carries]})
    assert refused.value.status == 400
    assert refused.value.what == f"{place}: not shown: the policy reads text only"


@pytest.mark.parametrize("says", TEXTS)
@pytest.mark.parametrize("place", PLACES)
def test_a_block_that_nobody_knows_and_that_is_text_stays(place: str, says: str) -> None:
    request = PLACES[place]({"type": "unheard_of", **TEXTS[says]})
    assert "unheard_of" in repr(request.conversation.messages)


words = st.text("xyzé {", max_size=8)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(around=plain, path=st.lists(words | st.none(), max_size=6), carries=st.sampled_from(list(PICTURES)))
def test_it_is_found_at_any_depth_and_nothing_is_found_where_nothing_is(
    around: Any, path: list[str | None], carries: str
) -> None:
    """None stands for a list."""
    assert not unreadable(around)
    value: Any = PICTURES[carries]
    for name in path:
        value = [around, value] if name is None else {"around": around, name: value}
    assert unreadable(value)
