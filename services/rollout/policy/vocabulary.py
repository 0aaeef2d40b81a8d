"""The starting policy's tokenizer: byte-level BPE trained on demonstrations, with Qwen3's control and markup tokens.

- The split pattern keeps the two characters of a JSON-escaped newline, real newlines, and digits as tokens of their
  own, so a value is the same token wherever it stands, and copying it is copying one id.
- Every long line that the template or the agent always writes alike is one token. It keeps a full Qwen3 tool preamble
  at some forty tokens, which is what training on two cores can afford.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from services.mesh.chat import CONTROL_TOKENS, MARKUP_TOKENS

SPLIT = r"\\n|\n|\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}\\]+|\\|\s+(?!\S)|\s+"
PHRASE_CHARS = 20
"""A fixed line of at least so many characters becomes a token."""
PRIVATE = 0xE000


class CharTokenizer:
    """Every character is its own id, and markers are private characters: what a renderer gives with it is text."""

    name_or_path = "characters"
    unk_token_id = None
    eos_token_id = PRIVATE + CONTROL_TOKENS.index("<|im_end|>")

    def encode(self, text: str, **_: Any) -> list[int]:
        """Code points."""
        return [ord(character) for character in text]

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        """The text; a marker comes out as a line break, since it separates what may become one token."""
        return "".join("\n" if token >= PRIVATE else chr(token) for token in token_ids)

    def convert_tokens_to_ids(self, token: str) -> int:
        """The private code point of a marker."""
        return PRIVATE + (*CONTROL_TOKENS, *MARKUP_TOKENS).index(token)


def phrases(texts: Iterable[str]) -> list[str]:
    """The distinct long lines of texts that never change, in order of appearance."""
    lines = (line for text in texts for line in text.split("\n"))
    return list(dict.fromkeys(line for line in lines if len(line) >= PHRASE_CHARS))


def train_tokenizer(texts: Iterable[str], fixed: Sequence[str], size: int) -> Tokenizer:
    """A tokenizer of at most `size` ids learned from `texts`; `fixed` are the phrases. The same arguments give the same."""
    added = [*CONTROL_TOKENS, *MARKUP_TOKENS, *fixed]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(added),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    cut = re.compile("|".join(re.escape(text) for text in sorted(added, key=len, reverse=True)))
    tokenizer.train_from_iterator((piece for text in texts for piece in cut.split(text) if piece), trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in [*MARKUP_TOKENS, *fixed]])
    return tokenizer
