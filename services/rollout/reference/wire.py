"""Bodies of the engine's HTTP face: SGLang's names, and a refusal for everything that the engine cannot honour.

Unknown keys are an error that names the key. Known keys whose meaning the engine does not have are accepted only with
the value that changes nothing; keys about text are accepted and have no effect, since the engine sees ids only, but for
`stop`, which is looked for with the tokenizer beside the model.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable
from typing import Literal, TypeVar

import msgspec

from services.mesh.weights.transport import WeightAddress
from services.rollout.reference.request import Request, RequestRefused, StopTexts

Body = TypeVar("Body")


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to sample. Log-probabilities are those of softmax(logits / temperature)."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    stop_token_ids: list[int] | None = None
    stop: str | list[str] | None = None
    """Needs `no_stop_trim`: ids stay as they were sampled, up to the one that completed a text."""
    sampling_seed: int | None = None
    ignore_eos: bool = False
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    n: int = 1
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False


class GenerateBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /generate`."""

    input_ids: list[int]
    sampling_params: SamplingParams = SamplingParams()
    rid: str | None = None
    return_logprob: bool = False
    logprob_start_len: int = -1
    stream: bool = False

    @property
    def stops(self) -> list[str]:
        """Texts that end the answer."""
        stop = self.sampling_params.stop
        return [stop] if isinstance(stop, str) else stop or []

    def request(self, eos_ids: tuple[int, ...], decode: Callable[[list[int]], str] | None = None) -> Request:
        """The request to queue; `decode` gives the text of ids, for `stops`. Raises RequestRefused for values that the
        engine cannot honour."""
        params = self.sampling_params
        if self.stops and not params.no_stop_trim:
            raise RequestRefused(
                "sampling_params.stop needs no_stop_trim: ids and log-probabilities are never cut here"
            )
        if self.stops and decode is None:
            raise RequestRefused("sampling_params.stop: there is no tokenizer beside the model, so no text is known")
        if "" in self.stops:
            raise RequestRefused("sampling_params.stop holds an empty text, which every answer holds")
        for name, value, neutral in (
            ("top_p", params.top_p, 1.0),
            ("top_k", params.top_k, -1),
            ("min_p", params.min_p, 0.0),
            ("n", params.n, 1),
        ):
            if value != neutral:
                raise RequestRefused(
                    f"sampling_params.{name} is {value}, only {neutral} is possible: the log-probabilities must be those "
                    "of the distribution that was sampled, whole and one answer a request"
                )
        if self.stream:
            raise RequestRefused("stream is true: this engine answers whole generations only")
        if self.logprob_start_len != -1:
            raise RequestRefused("logprob_start_len must be -1: this engine gives log-probabilities of output ids only")
        if params.max_new_tokens < 1:
            raise RequestRefused(f"sampling_params.max_new_tokens is {params.max_new_tokens}, at least 1 is needed")
        if not (math.isfinite(params.temperature) and params.temperature >= 0):
            raise RequestRefused(f"sampling_params.temperature is {params.temperature}, 0 or more is needed")
        if params.sampling_seed is not None and params.sampling_seed < 0:
            raise RequestRefused(f"sampling_params.sampling_seed is {params.sampling_seed}, 0 or more is needed")
        if self.rid == "":
            raise RequestRefused("rid is empty")
        return Request(
            rid=self.rid if self.rid is not None else uuid.uuid4().hex,
            input_ids=self.input_ids,
            max_new_tokens=params.max_new_tokens,
            temperature=params.temperature,
            stop_ids=frozenset(params.stop_token_ids or ())
            | (frozenset() if params.ignore_eos else frozenset(eos_ids)),
            stop_texts=StopTexts(self.stops, decode) if decode and self.stops else None,
            seed=params.sampling_seed,
        )


class AbortBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /abort_request`: every request whose rid begins with `rid`, or all."""

    rid: str = ""
    abort_all: bool = False


class PauseBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /pause_generation`."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class ContinueBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /continue_generation`; there is no accelerator cache to empty, so the key has no effect."""

    torch_empty_cache: bool = True


class MemoryBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /release_memory_occupation` and `/resume_memory_occupation`; null means all tags."""

    tags: list[str] | None = None


class TransferBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /update_weights_from_transfer`, a route of this engine's own."""

    address: WeightAddress
    weight_version: str | int | None = None
    """The version that answers will carry; null takes the address's."""
    flush_cache: bool = True


class DiskBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /update_weights_from_disk`: a folder with config.json and model.safetensors."""

    model_path: str
    weight_version: str | int | None = None
    """The version that answers will carry; null keeps the current one."""
    flush_cache: bool = True


def decode(raw: bytes, kind: type[Body]) -> Body:
    """The body; an empty one means all defaults. Raises RequestRefused that names what is wrong."""
    try:
        return msgspec.json.decode(raw or b"{}", type=kind)
    except msgspec.DecodeError as error:
        raise RequestRefused(str(error)) from error
