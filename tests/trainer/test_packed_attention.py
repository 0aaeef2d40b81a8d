"""Rows of a packed sequence don't see each other, in value and in gradient."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from services.trainer.cpu_shim import has_accelerator, megatron_device, megatron_import
from services.trainer.mcore import HAVE_TE
from services.trainer.packed_attention import PackedDotProductAttention, RowBounds, layer_spec, row_attention

LENGTHS = [7, 1, 12, 4]
SCALE = 8**-0.5


def heads(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(sum(LENGTHS), 4, 8), (sum(LENGTHS), 2, 8), (sum(LENGTHS), 2, 8)]
    query, key, value = (torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes)
    return query, key, value


def relative(left: Tensor, right: Tensor) -> float:
    return float((left - right).norm() / right.norm())


def one_row(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention written out, `[S, heads, d]`."""
    key, value = key.repeat_interleave(2, dim=1), value.repeat_interleave(2, dim=1)
    scores = torch.einsum("ihd,jhd->hij", query, key) * SCALE
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(future, -torch.inf).softmax(-1), value)


def test_packed_equals_separate_rows_in_value_and_gradient() -> None:
    packed_inputs, separate_inputs = heads(0), heads(0)
    packed = row_attention(*packed_inputs, LENGTHS, SCALE)
    separate = torch.cat([one_row(*parts) for parts in zip(*(x.split(LENGTHS) for x in separate_inputs), strict=True)])
    pull = torch.randn(packed.shape, generator=torch.Generator().manual_seed(1))
    (packed * pull).sum().backward()
    (separate * pull).sum().backward()
    assert relative(packed.detach(), separate.detach()) < 1e-6
    for mine, other in zip(packed_inputs, separate_inputs, strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        assert relative(mine.grad, other.grad) < 1e-6


def test_plain_causal_attention_would_leak() -> None:
    query, key, value = (part.detach() for part in heads(0))
    packed = row_attention(query, key, value, LENGTHS, SCALE)
    wide = [part.repeat_interleave(4 // part.shape[1], dim=1).transpose(0, 1)[None] for part in (query, key, value)]
    plain = scaled_dot_product_attention(*wide, is_causal=True)[0].transpose(0, 1)
    first = LENGTHS[0]
    assert torch.allclose(plain[:first], packed[:first], atol=1e-6)
    assert float((plain[first:] - packed[first:]).abs().max()) > 0.1


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    query, key, value = (part.detach() for part in heads(0))
    before = row_attention(query, key, value, LENGTHS, SCALE)
    for part in (query, key, value):
        part[: LENGTHS[0]] += 1.0
    after = row_attention(query, key, value, LENGTHS, SCALE)
    assert torch.equal(before[LENGTHS[0] :], after[LENGTHS[0] :])
    assert not torch.allclose(before[: LENGTHS[0]], after[: LENGTHS[0]])


def test_the_layer_takes_row_bounds() -> None:
    attention = layer_spec().submodules.self_attention.submodules.core_attention
    if not (HAVE_TE and has_accelerator()):
        assert attention is PackedDotProductAttention
    bounds = RowBounds(torch.tensor([0, 7, 8, 20, 24], dtype=torch.int32), LENGTHS)
    assert (bounds.qkv_format, bounds.max_seqlen_q, bounds.row_lengths) == ("thd", 12, (7, 1, 12, 4))


def test_the_shim_leaves_torch_as_it_was() -> None:
    before = (torch.cuda.current_device, torch.Tensor.cuda, torch.compile)
    with megatron_import(), megatron_device() as device, megatron_device():
        if not has_accelerator():
            assert device.type == "cpu"
            assert torch.zeros(1, device="cuda").device.type == "cpu"
            assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
            assert not torch.cuda.is_available()
    assert (torch.cuda.current_device, torch.Tensor.cuda, torch.compile) == before
    assert torch.zeros(1).type() == "torch.FloatTensor" or has_accelerator()
