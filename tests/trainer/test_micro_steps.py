"""The micro-step codec and what `validate` refuses, field by field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from schemas.errors import TrainerError
from schemas.micro_steps import MicroStep, decode, encode, validate
from services.trainer.arrays import array_of, tensors_of


@pytest.fixture
def micro_step(make_row: Any, pack: Callable[..., MicroStep]) -> MicroStep:
    return pack(
        [
            make_row(execution="e-000001.00", tokens=[1, 2, 3, 4], targets=[2, 3], temperature=0.7, version=4),
            make_row(execution="e-000001.01", tokens=[5, 6], targets=[1], version=5),
            make_row(execution="e-000001.00", tokens=[1, 2, 9], targets=[2], version=5),
        ],
        {"e-000001.00": 0.5, "e-000001.01": -1.5},
    )


def test_the_codec_restores_an_equal_value(micro_step: MicroStep) -> None:
    assert decode(encode(micro_step)) == micro_step
    validate(micro_step, vocab_size=10)
    assert micro_step.token_count == 9


def test_other_bytes_are_an_error() -> None:
    with pytest.raises(TrainerError, match="cannot be decoded"):
        decode(b"\x81\xa1a\x01")


def test_tensors_hold_what_was_packed(micro_step: MicroStep) -> None:
    rows = tensors_of(micro_step)
    assert rows.tokens.tolist() == [1, 2, 3, 4, 5, 6, 1, 2, 9]
    assert rows.positions.tolist() == [0, 1, 2, 3, 0, 1, 0, 1, 2]
    assert rows.row_lengths == (4, 2, 3)
    assert rows.target_positions.tolist() == [2, 3, 5, 8]
    assert rows.target_execution.tolist() == [0, 0, 1, 0]
    assert rows.token_version.tolist() == [4, 4, 5, 5]
    assert rows.temperature.tolist() == pytest.approx([0.7, 0.7, 1.0, 1.0])
    assert rows.target_counts.tolist() == [3, 1]
    assert array_of(micro_step, "cu_seqlens").tolist() == [0, 4, 6, 9]


def _set(field: str, index: int, value: float) -> Callable[[MicroStep], MicroStep]:
    def change(micro_step: MicroStep) -> MicroStep:
        values = array_of(micro_step, field).copy()
        values[index] = value
        return msgspec.structs.replace(micro_step, **{field: values.tobytes()})

    return change


def _replace(**changes: Any) -> Callable[[MicroStep], MicroStep]:
    return lambda micro_step: msgspec.structs.replace(micro_step, **changes)


def _shorten(field: str) -> Callable[[MicroStep], MicroStep]:
    return lambda micro_step: msgspec.structs.replace(micro_step, **{field: array_of(micro_step, field)[:-1].tobytes()})


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("tokens", _set("tokens", 3, 10)),
        ("tokens", _set("tokens", 3, -1)),
        ("tokens", lambda m: msgspec.structs.replace(m, tokens=m.tokens + b"\x00")),
        ("cu_seqlens", _shorten("tokens")),
        ("cu_seqlens", _set("cu_seqlens", 0, 1)),
        ("cu_seqlens", _set("cu_seqlens", 1, 6)),
        ("cu_seqlens", _shorten("cu_seqlens")),
        ("row_execution", _replace(row_execution=b"")),
        ("row_execution", _set("row_execution", 0, 2)),
        ("row_execution", _set("row_execution", 0, -1)),
        ("targets", _set("targets", 4, 1)),
        ("targets", _set("targets", 1, 2)),
        ("targets", _shorten("targets")),
        ("behaviour_logprob", _shorten("behaviour_logprob")),
        ("behaviour_logprob", _set("behaviour_logprob", 3, float("nan"))),
        ("behaviour_logprob", _set("behaviour_logprob", 3, -np.inf)),
        ("behaviour_logprob", _set("behaviour_logprob", 3, 0.5)),
        ("temperature", _shorten("temperature")),
        ("temperature", _set("temperature", 5, 0.0)),
        ("token_version", _shorten("token_version")),
        ("token_version", _set("token_version", 5, -1)),
        ("executions", _replace(executions=("e-000001.00", "e-000001.00"))),
        ("advantages", _replace(advantages=(1.0,))),
        ("advantages", _replace(advantages=(1.0, float("inf")))),
        ("target_counts", _replace(target_counts=(3,))),
        ("target_counts", _replace(target_counts=(2, 1))),
        ("target_counts", _set("targets", 1, 1)),
    ],
)
def test_validate_names_the_field(micro_step: MicroStep, field: str, change: Callable[[MicroStep], MicroStep]) -> None:
    with pytest.raises(TrainerError) as caught:
        validate(change(micro_step), vocab_size=10)
    assert caught.value.where == f"micro-step m-000001.000, field {field}"
    assert caught.value.remedy


def test_what_lies_at_no_target_means_nothing(micro_step: MicroStep) -> None:
    validate(_set("behaviour_logprob", 0, float("nan"))(micro_step))
    validate(_set("temperature", 0, 0.0)(micro_step))
    validate(_set("token_version", 0, -1)(micro_step))
