from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moec.compiler import dialect
from tests.dialect.contract import assert_as_accurate, check_op, rand


def mix_eager(sources: list[Tensor], norm_weight: Tensor, proj_weight: Tensor, eps: float = 1e-5) -> Tensor:
    stacked = torch.stack(sources).to(torch.promote_types(sources[0].dtype, torch.float32))
    unit = stacked * torch.rsqrt(stacked.pow(2).mean(-1, keepdim=True) + eps)
    share = torch.softmax(((unit * norm_weight) * proj_weight).sum(-1), 0)
    return (share.unsqueeze(-1) * stacked).sum(0).to(sources[0].dtype)


def sources_of(count: int, *shape: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [rand(*shape, seed=seed, dtype=dtype) for seed in range(count)]


@pytest.mark.parametrize("count", [1, 2, 9])
def test_op(count: int) -> None:
    args = (sources_of(count, 2, 3, 4), rand(4), rand(4, seed=1), 1e-5)
    check_op("depth_mix", args)
    torch.testing.assert_close(dialect.depth_mix(*args), mix_eager(*args))


def test_one_tensor_as_several_sources() -> None:
    x, weights = rand(3, 4), (rand(4), rand(4, seed=1))
    found = torch.autograd.grad(dialect.depth_mix([x, x, x], *weights, 1e-5).sum(), x)
    torch.testing.assert_close(found[0], torch.ones_like(x))


def test_zero_projection_is_the_mean() -> None:
    sources = sources_of(3, 2, 4)
    found = dialect.depth_mix(sources, rand(4), torch.zeros(4, dtype=torch.float64), 1e-5)
    torch.testing.assert_close(found, torch.stack(sources).mean(0))


def test_large_scores_stay_finite() -> None:
    x = sources_of(2, 4, 8, dtype=torch.float32)
    weights = [torch.full((8,), 1e4, requires_grad=True) for _ in range(2)]
    out = dialect.depth_mix(x, *weights, 1e-5)
    assert bool(out.isfinite().all())
    assert all(bool(grad.isfinite().all()) for grad in torch.autograd.grad(out.sum(), [*x, *weights]))


def test_low_precision() -> None:
    low = torch.bfloat16
    args = (sources_of(4, 32, 64, dtype=low), rand(64, dtype=low), rand(64, seed=1, dtype=low))
    assert_as_accurate(lambda s, n, p: dialect.depth_mix(s, n, p, 1e-5), mix_eager, args)


def test_no_tokens() -> None:
    sources, weight = sources_of(2, 0, 4), rand(4)
    out = dialect.depth_mix(sources, weight, weight, 1e-5)
    assert out.shape == (0, 4)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), weight)[0], torch.zeros(4, dtype=torch.float64))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dialect.depth_mix([], rand(4), rand(4), 1e-5), "sources is empty"),
        (lambda: dialect.depth_mix([rand(2, 4), rand(3, 4)], rand(4), rand(4), 1e-5), r"sources\[1\] has shape"),
        (lambda: dialect.depth_mix([rand(2, 4)], rand(3), rand(4), 1e-5), "norm_weight has shape"),
        (lambda: dialect.depth_mix([rand(2, 4)], rand(4), rand(4, 1), 1e-5), "proj_weight has shape"),
    ],
)
def test_mistakes_name_op_and_argument(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"moec::depth_mix: {message}"):
        call()
