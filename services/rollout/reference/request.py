"""One generation request from admission to its answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from schemas.errors import EngineError
from services.rollout.reference.kv import Lease
from services.rollout.reference.sampling import seed_of, uniforms


class RequestRefused(EngineError):
    """The request cannot be served as it is; `str(error)` says why. The server answers 400."""


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Output tokens `start .. end - 1` were sampled with weights `version`."""

    version: str
    start: int
    end: int


class Finish(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a generation ended, in SGLang's words; `type` is always present on the wire."""

    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    """`stop`: the id that ended it, which is also the last output id, or the text that this id completed."""
    length: int | None = None
    message: str | None = None
    status_code: int | None = None


class StopTexts:
    """Texts that end an answer, for an engine that otherwise sees ids only."""

    def __init__(self, texts: Sequence[str], decode: Callable[[list[int]], str]) -> None:
        self._texts, self._decode = tuple(texts), decode
        # Every token is at least a byte, so a text that the last one completes is in so many of them.
        self._window = max(len(text.encode()) for text in texts)

    def matched(self, tokens: Sequence[int], sampled: int) -> str | None:
        """The text that the last of `sampled` output tokens completed."""
        said = self._decode(list(tokens[-min(self._window, sampled) :]))
        return next((text for text in self._texts if text in said), None)


class Request:
    """A request and how far it is.

    `tokens` is the prompt and everything sampled so far; keys and values of its first `computed` tokens are in the
    blocks of `lease`. The batcher owns every field; `finish` is set exactly once, and then nothing changes any more.
    """

    def __init__(
        self,
        *,
        rid: str,
        input_ids: Sequence[int],
        max_new_tokens: int,
        temperature: float = 1.0,
        stop_ids: frozenset[int] = frozenset(),
        stop_texts: StopTexts | None = None,
        seed: int | None = None,
    ) -> None:
        self.rid = rid
        self.tokens = list(input_ids)
        self.prompt_tokens = len(self.tokens)
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self.stop_ids = stop_ids
        self.stop_texts = stop_texts
        self.draws: npt.NDArray[np.float64] = uniforms(seed_of(rid) if seed is None else seed, max_new_tokens)
        self.logprobs: list[float] = []
        self.spans: list[Span] = []
        self.computed = 0
        self.cached_tokens: int | None = None
        self.retractions = 0
        self.lease = Lease()
        self.row = -1
        self.weight_version = ""
        self.finish: Finish | None = None

    def __repr__(self) -> str:
        state = self.finish.type if self.finish else ("waiting" if self.row < 0 else "running")
        return f"<Request {self.rid} {state}: {self.prompt_tokens} + {self.sampled} of {self.max_new_tokens}>"

    @property
    def sampled(self) -> int:
        """Number of output tokens so far."""
        return len(self.logprobs)

    @property
    def pending(self) -> int:
        """Tokens whose keys and values have to be computed before the next one can be sampled."""
        return len(self.tokens) - self.computed

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]

    def close_span(self, version: str) -> None:
        """Everything sampled since the last span came from `version`."""
        start = self.spans[-1].end if self.spans else 0
        if self.sampled == start:
            return
        if self.spans and self.spans[-1].version == version:
            start = self.spans.pop().start
        self.spans.append(Span(version=version, start=start, end=self.sampled))

    def answer(self, *, return_logprob: bool) -> dict[str, Any]:
        """SGLang's reply to `/generate`, without text: the engine has no tokenizer."""
        if self.finish is None:
            raise RuntimeError(f"{self!r} has no answer yet")
        output_ids = self.output_ids
        meta: dict[str, Any] = {
            "id": self.rid,
            "finish_reason": {"type": self.finish.type, **msgspec.to_builtins(self.finish)},
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.sampled,
            "cached_tokens": self.cached_tokens or 0,
            "num_retractions": self.retractions,
            "weight_version": self.weight_version,
            "weight_versions": msgspec.to_builtins(self.spans),
        }
        if return_logprob:
            meta["output_token_logprobs"] = [
                [logprob, token, None] for logprob, token in zip(self.logprobs, output_ids, strict=True)
            ]
        return {"output_ids": output_ids, "meta_info": meta}
