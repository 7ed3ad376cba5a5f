"""The loss kernels in Triton's interpreter against the reference in float64; run by test_loss_interpreted.py."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moec.codegen.triton import loss_launch
from moec.codegen.triton.loss_launch import Launch, TritonKernels
from moec.compiler.dialect import head, log_probs, loss, loss_shards
from moec.compiler.dialect.head import REFERENCE

# A row is several blocks, the last one cut short.
KERNELS = TritonKernels(Launch(block=32, warps=4))
ROWS, WIDTH, CLASSES = 7, 12, 77
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one block": {"classes": 16},
    "chunks of classes": {"columns": 40},
    "bias and soft cap": {"bias": True, "softcap": 3.0, "logit_scale": 0.7},
    "all": {
        "bias": True, "class_weights": True, "softcap": 3.0, "logit_scale": 0.7, "smoothing": 0.1, "z": True,
    },
    "all, chunks of classes": {
        "bias": True, "class_weights": True, "softcap": 3.0, "logit_scale": 0.7, "smoothing": 0.1, "z": True,
        "columns": 40,
    },
    "smoothing": {"smoothing": 0.2, "columns": 40},
    "negative scale": {"logit_scale": -0.6, "bias": True, "columns": 64},
    "no label": {"ignored": "all", "smoothing": 0.1},
    "wrong label": {"wrong": True},
}  # fmt: skip


def main(dtype: torch.dtype, names: Sequence[str]) -> None:
    for name in names:
        for what, error, bound in compare(dtype, **FORMS[name]):
            assert error <= bound, (name, what, error, bound)
    if dtype == torch.float32:
        far_apart()
    print("checked", len(names))


def compare(
    dtype: torch.dtype,
    classes: int = CLASSES,
    columns: int = 1000,
    bias: bool = False,
    class_weights: bool = False,
    softcap: float = 0.0,
    logit_scale: float = 1.0,
    smoothing: float = 0.0,
    z: bool = False,
    ignored: str = "some",
    wrong: bool = False,
) -> list[tuple[str, float, float]]:
    """Name, relative error and bound of every result of every op."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden, weight = random(ROWS, WIDTH).to(dtype), random(classes, WIDTH).to(dtype)
    offsets = random(classes).to(dtype) if bias else None
    weights = random(classes).abs().float() if class_weights else None
    labels = torch.randint(0, classes, (ROWS,), generator=generator)
    labels[2] = -100
    labels[5] = classes if wrong else labels[5]
    if ignored == "all":
        labels.fill_(-100)
    # So small that float16 would lose it: the kernels divide by the largest.
    tokens = random(ROWS).abs().float() * 1e-7
    operands = (hidden, weight, labels)
    form = (-100, logit_scale, softcap, smoothing, 3, columns)
    grads = [random(ROWS).float() * 1e-4 for _ in range(3)]
    found: list[tuple[str, float, float]] = []

    def both(name: str, function: Callable[..., Any], arguments: Sequence[Any], exact: Sequence[Any]) -> Any:
        got, truth = function(KERNELS, *arguments), function(REFERENCE, *exact)
        # Float16 keeps 11 bits, and fewer of values as small as these gradients.
        bounds = {torch.float32: 2e-6, torch.float16: 6e-3}
        for index, (one, two) in enumerate(zip(got, truth, strict=True)):
            found.append((f"{name} {index}", distance(one, two), bounds[dtype]))
        return got, truth

    plain = (*operands, offsets, weights, *form)
    got, truth = both("losses", loss.forward, plain, doubled(plain))
    both("their gradients", loss.backward, (grads[0], grads[1], *got[2:], *plain),
         (*doubled(grads[:2]), *truth[2:], *doubled(plain)))  # fmt: skip
    summed = (*operands, tokens, tokens * 0.1 if z else None, offsets, weights, *form, True, True, dtype)
    got, truth = both("sum", loss.sum_forward, summed, doubled(summed))
    upstream = torch.tensor(3e6)
    found.append(
        ("gradients of the sum", max(map(distance, _sum_backward(upstream, got, dtype), _exact(upstream, truth))), 6e-3)
    )
    picked = (*operands, offsets, -100, logit_scale, softcap, 3, columns)
    got, truth = both("log-probabilities", log_probs.forward, picked, doubled(picked))
    both("their gradients", log_probs.backward, (grads[0], *got[1:], *picked),
         (grads[0].double(), *truth[1:], *doubled(picked)))  # fmt: skip
    shard = (*operands, offsets, weights, 8, smoothing > 0, logit_scale, softcap, 3, columns)
    got, truth = both("shard", loss_shards.forward, shard, doubled(shard))
    both("its gradients", loss_shards.backward, (*grads, got[0], *shard), (*doubled(grads), truth[0], *doubled(shard)))
    return found


def _sum_backward(upstream: Tensor, got: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
    return loss_launch.sum_backward(upstream, *got[1:], dtype, Launch(copy_block=64))


def _exact(upstream: Tensor, truth: Sequence[Tensor]) -> Sequence[Tensor]:
    return loss.sum_backward(upstream.double(), *truth[1:], torch.float64)


def doubled(values: Sequence[Any]) -> list[Any]:
    return [v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for v in values]


def distance(found: Tensor, truth: Tensor) -> float:
    """|found - truth| / |truth|, infinite where NaN stands in one of the two only."""
    assert found.shape == truth.shape, (found.shape, truth.shape)
    if not torch.equal(found.isnan(), truth.isnan()):
        return float("inf")
    found, truth = found.double().nan_to_num(), truth.double().nan_to_num()
    scale = float(truth.norm())
    return float((found - truth).norm()) / (scale or 1.0)


def far_apart() -> None:
    """Rows whose offsets are beyond 2^31 elements: 32-bit arithmetic would leave the memory, or hit another row."""
    stride, classes = 2**30, 48
    memory = torch.empty(2 * stride + classes, dtype=torch.float16)  # only the pages that are touched exist
    product = memory.as_strided((3, classes), (stride, 1))
    values = torch.randn(3, classes, generator=torch.Generator().manual_seed(1)).half()
    product.copy_(values)
    labels, tokens = torch.tensor([4, 0, 47]), torch.ones(3)
    hidden, weight = values, torch.eye(classes).half()
    found = KERNELS.losses_and_gradient(head.Head(hidden, weight, labels), product, slice(0, 3), tokens, None)
    logits = values.double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    (wanted,) = torch.autograd.grad(expected.sum(), logits)
    assert distance(found[0], expected.detach()) < 1e-6
    assert distance(found[2], wanted) < 1e-3


if __name__ == "__main__":
    torch.set_num_threads(1)
    head.check = lambda given: None  # labels are not read on a GPU
    main(getattr(torch, sys.argv[1]), sys.argv[2].split(";"))
