"""Chat rendering: the one place where messages become token ids, for the proxy at run time and for the warm start.

`renderers` does the work (Qwen3's chat format, thinking disabled); here are its tokenizer, its construction and the
translation of Anthropic Messages into the messages that it takes. Invariants:

- text never becomes a control token: `<|im_end|>` in a user's or a tool's text is encoded as ordinary characters;
- the same system, tools and messages give the same ids in every process;
- `renderers` and `tokenizers` are imported on first use, because they take 1.5 s and only some processes need them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schemas.errors import ConfigError

if TYPE_CHECKING:
    from renderers import Renderer  # type: ignore[import-untyped]
    from tokenizers import Tokenizer

TOKENIZER_FILE = "tokenizer.json"
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Tokens that only a renderer or the policy itself writes; the last one ends a turn."""
MARKUP_TOKENS = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
"""Tokens that Qwen3's template writes as text, so they are matched in text too, exactly as Qwen3's own tokenizer does."""
BILLING = "x-anthropic-billing-header:"


_SHORT = 32
"""Characters of a text whose ids are remembered."""
_SHORT_KEPT = 1_000


class ChatTokenizer:
    """What `renderers` asks of a tokenizer, over the `tokenizers` library. It tells no character spans: a renderer that
    finds none leaves out which tokens are content, which nobody here asks for, and which costs more than the ids."""

    unk_token_id = None

    def __init__(self, inner: Tokenizer, name: str) -> None:
        inner.encode_special_tokens = True
        inner.no_padding()
        inner.no_truncation()
        self._inner = inner
        self._short: dict[tuple[str, bool], tuple[int, ...]] = {}
        """What stands around every message, a dozen times a turn."""
        self.name_or_path = name
        self.eos_token_id: int = self.convert_tokens_to_ids(CONTROL_TOKENS[-1])
        self.pad_token_id: int = self.convert_tokens_to_ids(CONTROL_TOKENS[0])

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self._inner.get_vocab_size()

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        """Ids of `text`; never a control token."""
        if len(text) > _SHORT:
            return self._ids(text, add_special_tokens)
        known = self._short.get((text, add_special_tokens))
        if known is None:
            known = tuple(self._ids(text, add_special_tokens))
            if len(self._short) < _SHORT_KEPT:
                self._short[text, add_special_tokens] = known
        return list(known)

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        # In a batch, because only there the library doesn't count characters, which nobody asks for.
        (encoding,) = self._inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def decode(
        self,
        token_ids: int | Sequence[int],
        skip_special_tokens: bool = False,
        **_: Any,
    ) -> str:
        """Text of one id or of a sequence; control tokens are kept unless `skip_special_tokens`."""
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self._inner.decode(ids, skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """The id of a token (None if there is none such), or the list of ids of a list of tokens."""
        if isinstance(tokens, str):
            return self._inner.token_to_id(tokens)
        return [self._inner.token_to_id(token) for token in tokens]


def load_tokenizer(folder: str | Path) -> ChatTokenizer:
    """The tokenizer of a checkpoint folder. Raises ConfigError if it is absent, unreadable or lacks a token we need."""
    from tokenizers import Tokenizer

    path = Path(folder) / TOKENIZER_FILE
    remedy = "give a checkpoint folder of a Qwen3 model, or make one with: python -m services.rollout.policy --out DIR"
    if not path.is_file():
        raise ConfigError(f"there is no {TOKENIZER_FILE}", where=str(folder), remedy=remedy)
    try:
        inner = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"not a tokenizer: {error}", where=str(path), remedy=remedy) from error
    missing = [token for token in CONTROL_TOKENS + MARKUP_TOKENS if inner.token_to_id(token) is None]
    if missing:
        raise ConfigError(
            f"tokens of Qwen3's chat format are missing: {missing}",
            where=str(path),
            remedy=remedy,
        )
    return ChatTokenizer(inner, str(folder))


def make_renderer(tokenizer: ChatTokenizer) -> Renderer:
    """Qwen3's chat format with thinking disabled: every assistant turn starts with an empty thought in the prompt."""
    from renderers import Qwen3RendererConfig
    from renderers.qwen3 import Qwen3Renderer  # type: ignore[import-untyped]

    renderer: Renderer = Qwen3Renderer(tokenizer, Qwen3RendererConfig(enable_thinking=False))
    return renderer


def chat_tools(tools: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tools of Anthropic Messages as the function specifications that Qwen3's template shows to the policy."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool.get("description", ""),
                "parameters": tool.get("input_schema", {}),
            },
        }
        for tool in tools
    ]


def block_text(content: str | Sequence[Mapping[str, Any]]) -> str:
    """The text of a string or of a list of blocks, one block a line; blocks that aren't text say their type."""
    if isinstance(content, str):
        return content
    return "\n".join(block["text"] if block["type"] == "text" else f"[{block['type']}]" for block in content)


def chat_messages(
    system: str | Sequence[Mapping[str, Any]] | None,
    messages: Iterable[Mapping[str, Any]],
) -> list[Any]:
    """Anthropic `system` and `messages` as chat messages with roles system, user, assistant and tool.

    One user message with tool results and text becomes tool messages, in the order of the calls, and then a user
    message. The billing block that Claude Code puts first into `system` is left out: it changes between requests.
    """
    chat: list[dict[str, Any]] = []
    if isinstance(system, str):
        system = [{"type": "text", "text": system}]
    told = block_text([block for block in system or () if not block["text"].startswith(BILLING)])
    if told:
        chat.append({"role": "system", "content": told})
    order: dict[str, int] = {}
    for message in messages:
        content = message["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if message["role"] == "assistant":
            calls = [block for block in blocks if block["type"] == "tool_use"]
            order = {call["id"]: index for index, call in enumerate(calls)}
            chat.append(_assistant(blocks, calls))
            continue
        results = [block for block in blocks if block["type"] == "tool_result"]
        for result in sorted(results, key=lambda block: order.get(block["tool_use_id"], len(order))):
            text = block_text(result.get("content", ""))
            chat.append({"role": "tool", "tool_call_id": result["tool_use_id"], "content": text})
        rest = [block for block in blocks if block["type"] != "tool_result"]
        if rest:
            chat.append({"role": message["role"], "content": block_text(rest)})
    return chat


def _assistant(blocks: Sequence[Mapping[str, Any]], calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    thoughts = "".join(block["thinking"] for block in blocks if block["type"] == "thinking")
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thoughts:
        message["reasoning_content"] = thoughts
    if calls:
        message["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": call["input"]},
            }
            for call in calls
        ]
    return message
