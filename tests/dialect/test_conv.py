from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from moec.compiler import dialect
from tests.dialect.contract import assert_as_accurate, check_op, documents, rand


def conv_eager(x: Tensor, weight: Tensor, activation: str = "silu") -> Tensor:
    width = weight.shape[1]
    padded = functional.pad(x.transpose(1, 2), (width - 1, 0))
    out = functional.conv1d(padded, weight.to(x.dtype).unsqueeze(1), groups=x.shape[2]).transpose(1, 2)
    return functional.silu(out) if activation == "silu" else out


@pytest.mark.parametrize(
    "args",
    [
        (rand(2, 6, 3), rand(3, 4), None, "silu"),
        (rand(2, 6, 3), rand(3, 4), documents([3, 1, 2], [5, 1]), "silu"),
        (rand(1, 5, 2), rand(2, 2), documents([1, 1, 1, 1, 1]), "none"),
        (rand(2, 2, 3), rand(3, 4), None, "none"),
        (rand(2, 3, 2), rand(2, 1), None, "silu"),
    ],
    ids=["plain", "packed", "single-token-documents", "shorter-than-kernel", "one-tap"],
)
def test_op(args: tuple[object, ...]) -> None:
    check_op("short_conv", args)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2), st.integers(1, 9), st.integers(1, 4), st.integers(1, 5), st.sampled_from(["silu", "none"]))
def test_any_shape(batch: int, length: int, channels: int, width: int, activation: str) -> None:
    x, weight = rand(batch, length, channels), rand(channels, width)
    torch.testing.assert_close(
        dialect.short_conv(x, weight, None, activation), conv_eager(x, weight, activation), atol=1e-12, rtol=0
    )


def test_documents_are_separate_runs() -> None:
    lengths = [7, 1, 9]
    x, weight = rand(2, sum(lengths), 3), rand(3, 4)
    packed = dialect.short_conv(x, weight, documents(lengths, lengths))
    separate = torch.cat([dialect.short_conv(part, weight) for part in x.split(lengths, 1)], 1)
    torch.testing.assert_close(packed, separate, atol=1e-15, rtol=1e-14)
    grads = [torch.autograd.grad((out * out).sum(), (x, weight)) for out in (packed, separate)]
    torch.testing.assert_close(grads[0], grads[1])


def test_another_document_cannot_reach_across_the_start() -> None:
    x, weight = rand(1, 8, 2), rand(2, 4)
    ids = documents([4, 4])
    poisoned = x.detach().clone()
    poisoned[:, :4] = float("nan")
    assert bool(dialect.short_conv(poisoned, weight, ids)[:, 4:].isfinite().all())
    (grad,) = torch.autograd.grad(dialect.short_conv(x, weight, ids)[:, 4:].sum(), x)
    assert not bool(grad[:, :4].any())


def test_low_precision() -> None:
    x, weight = rand(2, 40, 16, dtype=torch.bfloat16), rand(16, 4, dtype=torch.float32)
    assert_as_accurate(dialect.short_conv, conv_eager, (x, weight))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dialect.short_conv(rand(2, 3), rand(3, 4)), "x has shape"),
        (lambda: dialect.short_conv(rand(1, 2, 3), rand(4, 4)), "weight has shape"),
        (lambda: dialect.short_conv(rand(1, 2, 3), rand(3, 1, 4)), "weight has shape"),
        (lambda: dialect.short_conv(rand(1, 2, 3), rand(3, 4), documents([3])), "document_ids has shape"),
        (lambda: dialect.short_conv(rand(1, 2, 3), rand(3, 4), None, "gelu"), "activation is 'gelu'"),
    ],
)
def test_mistakes_name_op_and_argument(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"moec::short_conv: {message}"):
        call()
