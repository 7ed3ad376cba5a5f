"""The ops of fused experts by the kernels, in Triton's interpreter, against the ops' references in float64.

Run by test_expert_ops.py, with TRITON_INTERPRET=1 set before Triton is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moec.codegen.triton.expert_ops import TABLE
from moec.compiler.dialect.registry import BODIES

OPS = torch.ops.moec
SWIGLU = "gate, up: silu(gate) * up"
INVENTED = "x0, x1: where(x0 > x1, tanh(x0), x0 / (abs(x0) + 1.0)) * rsqrt(x1 * x1 + 1.0) - minimum(x0, x1) / 4.0"
SQUARED = "x: (t := relu(x)) * t"
FORMS = {
    "swiglu": (SWIGLU, False, False, False, ""),
    "invented, bias, interleaved": (INVENTED, True, True, False, ""),
    "squared, transposed": (SQUARED, True, False, True, ""),
    "invented, bias, weights before": (INVENTED, True, False, False, "before"),
    "swiglu, transposed, weights of tokens": (SWIGLU, True, False, True, "tokens"),
}
N, K, E, D, I = 9, 2, 5, 24, 20  # noqa: E741

Run = Callable[..., Any]


def by_kernels(op: Any, *arguments: Any) -> Any:
    return TABLE[op](*arguments)


def by_reference(op: Any, *arguments: Any) -> Any:
    """In float64, from the same numbers."""
    wide = [v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for v in arguments]
    return BODIES[op](*wide)


def layer(run: Run, form: tuple[str, bool, bool, bool, str], ordered: bool) -> list[Tensor]:
    """Every result and gradient of one layer, and what the ops give where less is asked for."""
    activation, bias, interleaved, transposed, weigh = form
    parts = activation.partition(":")[0].count(",") + 1
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def matrix(rows: int, columns: int) -> Tensor:
        return normal(E, *((columns, rows) if transposed else (rows, columns))) / 5

    indices = torch.stack([torch.randperm(E - 1, generator=generator)[:K] for _ in range(N)])  # one expert stays empty
    order, position, offsets = run(OPS.expert_slots.default, indices, E)
    first, second = matrix(parts * I, D), matrix(D, I)
    one, two = (normal(E, parts * I), normal(E, D)) if bias else (None, None)
    weights = torch.rand(K, N, generator=generator).t() if ordered else None  # in any layout
    places = (order, position) if ordered else (None, None)
    x = normal(N if ordered else N * K + 3, D)
    grad_y = normal(x.shape[0], D)
    before = weigh == "before" and ordered
    layout = (activation, interleaved, transposed, before)
    of_tokens = weights if weigh == "tokens" else None
    given = (one, of_tokens, weights if before else None)
    up = (x, first, offsets, *places, *given, activation, K if ordered else 0, interleaved, transposed)
    pre, act = run(OPS.expert_up.default, *up)
    y = run(OPS.expert_down.default, None, act, second, offsets, *places, two, weights, *layout)
    down = (grad_y, pre, second, offsets, *places, two, weights, *layout)
    grad_pre, *rest = run(OPS.expert_down_backward.default, *down, None)
    up_backward = (grad_pre, x, first, offsets, *places, one, of_tokens, K if ordered else 0, transposed)
    found = [order, position, offsets, pre, act, y, grad_pre, *rest]
    found += run(OPS.expert_up_backward.default, *up_backward, None)
    for keep in ((False, True), (True, False)):
        found += run(OPS.expert_up.default, *up, *keep)
    found += run(OPS.expert_down_backward.default, *down, [True, False, True, True])
    frozen = (grad_pre, x if of_tokens is not None else None, *up_backward[2:])
    found += run(OPS.expert_up_backward.default, *frozen, [True, False, True, True])
    return found


def compare(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest relative error of a result."""
    errors = []
    for one, two in zip(found, wanted, strict=True):
        assert one.shape == two.shape, (one.shape, two.shape)
        scale = float(two.double().norm()) or 1.0
        errors.append(float((one.double() - two.double()).norm()) / scale)
    return max(errors)


def main() -> None:
    for name, form in FORMS.items():
        for ordered in (True, False) if not form[-1] else (True,):
            error = compare(layer(by_kernels, form, ordered), layer(by_reference, form, ordered))
            assert error <= 2e-6, (name, ordered, error)
    print("checked", len(FORMS))


if __name__ == "__main__":
    sys.exit(main())
