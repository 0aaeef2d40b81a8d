"""Token ids are the renderer's own, however little of the conversation it is shown."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from services.mesh.chat import CONTROL_TOKENS, MARKUP_TOKENS, ChatTokenizer, make_renderer
from services.proxy.encoder import _TAIL, Encoder

texts = st.one_of(
    st.text(max_size=80), st.lists(st.sampled_from([*CONTROL_TOKENS, *MARKUP_TOKENS, "\n", " a", "{"])).map("".join)
).map(lambda text: text.encode("utf-8", "replace").decode())
said = st.one_of(
    texts, texts.map(lambda text: f'<tool_call>\n{{"name": "f", "arguments": {{"x": "{text}"}}}}\n</tool_call>')
)
following = st.lists(
    st.one_of(
        texts.map(lambda text: {"role": "user", "content": text}),
        texts.map(lambda text: {"role": "tool", "tool_call_id": "t", "content": text}),
    ),
    min_size=1,
    max_size=4,
)
turns = st.lists(st.tuples(following, said, st.integers(0, 2)), min_size=1, max_size=4)


class Spans(ChatTokenizer):
    """As `transformers` has it: with the characters of each token, encoded one text at a time."""

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        return list(self._inner.encode(text, add_special_tokens=add_special_tokens).ids)

    def __call__(self, text: str, add_special_tokens: bool = False, **_: Any) -> dict[str, list[Any]]:
        encoding = self._inner.encode(text, add_special_tokens=add_special_tokens)
        return {"input_ids": list(encoding.ids), "offset_mapping": list(encoding.offsets)}


@settings(max_examples=120, deadline=None)
@given(turns=turns)
def test_bridges_over_a_tail_are_those_over_the_whole(tokenizer: ChatTokenizer, turns: Any) -> None:
    renderer, encoder = make_renderer(tokenizer), Encoder(tokenizer, make_renderer(tokenizer))
    spanning = make_renderer(Spans(tokenizer._inner, "spans"))
    first, *others = turns
    prompt = list(renderer.render(first[0], add_generation_prompt=True).token_ids)
    assert prompt == spanning.render(first[0], add_generation_prompt=True).token_ids
    answer = tokenizer.encode(first[1]) + encoder.stop_ids[: first[2]][-1:]
    for messages, text, stop in others:
        new, trailing = encoder._bridge(prompt[-_TAIL:], answer, messages, None)
        assert (new, trailing) == encoder._bridge(prompt, answer, messages, None)
        whole = spanning.bridge_to_next_turn(prompt, answer, messages)
        assert whole is None or whole.token_ids == prompt + answer + new
        prompt += answer + new
        answer = tokenizer.encode(text) + encoder.stop_ids[:stop][-1:]
