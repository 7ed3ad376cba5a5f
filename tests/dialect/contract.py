"""What every differentiable dialect op must satisfy, and small makers of inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moec.compiler.dialect import DEFINITIONS

Args = Sequence[Any]


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal values that require a gradient."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, dtype=dtype, generator=generator).requires_grad_()


def documents(*rows: Sequence[int]) -> Tensor:
    """document_ids [B, T] for rows of documents of the given lengths."""
    return torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in rows])


def check_op(name: str, args: Args) -> None:
    """Schema, fake, autograd and AOT consistency of the forward and backward ops, gradients, layouts and costs.

    args: float64 arguments of the op, tensors to differentiate requiring gradients.
    """
    definition = DEFINITIONS[name]
    torch.library.opcheck(definition.op, tuple(args))
    assert definition.backward is not None
    torch.library.opcheck(definition.backward, backward_args(name, args))
    check_gradients(definition.op, args)
    check_layouts(definition.op, args)
    assert definition.flops_of(args, {}) > 0
    assert definition.backward_flops_of(args, {}) > 0


def backward_args(name: str, args: Args) -> tuple[Any, ...]:
    """Arguments of the backward op: random result gradients, and forward arguments and results by name."""
    definition = DEFINITIONS[name]
    assert definition.backward is not None
    plain = [_detached(value) for value in args]
    arguments = definition.op._schema.arguments
    values = {argument.name: argument.default_value for argument in arguments}
    values |= dict(zip(values, plain, strict=False))
    for result, value in zip(definition.op._schema.returns, _tuple(definition.op(*plain)), strict=True):
        values[result.name] = value
        values[f"grad_{result.name}"] = torch.randn_like(value)
    return tuple(values[argument.name] for argument in definition.backward._schema.arguments)


def check_gradients(function: Callable[..., Any], args: Args) -> None:
    """Compare the gradients with finite differences."""

    def call(*leaves: Tensor) -> tuple[Tensor, ...]:
        given = iter(leaves)
        return _tuple(function(*replaced(args, lambda _: next(given))))

    assert torch.autograd.gradcheck(call, leaves_of(args), atol=1e-7, rtol=1e-5)


def check_layouts(function: Callable[..., Any], args: Args) -> None:
    """Strided arguments and expanded or strided incoming gradients give the numbers of contiguous ones, contiguous."""
    expected = run(function, args, torch.ones_like)
    expanded = run(function, replaced(args, strided), lambda out: out.new_ones(()).expand(out.shape))
    torch.testing.assert_close(expanded, expected)
    torch.testing.assert_close(run(function, args, lambda out: strided(torch.ones_like(out))), expected)
    assert all(value.is_contiguous() for values in (*expected, *expanded) for value in values)


def assert_as_accurate(function: Callable[..., Any], eager: Callable[..., Any], args: Args) -> None:
    """Outputs and gradients err at most 1.5 times as much as those of an eager composition of the same numbers.

    args: low precision arguments for both; the truth is the eager composition in float64.
    """
    truth = run(eager, replaced(args, lambda value: value.detach().double().requires_grad_()), _wave)
    found, base = run(function, args, _wave), run(eager, args, _wave)
    for kind, *values in zip(("output", "gradient"), found, base, truth, strict=True):
        for index, (value, other, exact) in enumerate(zip(*values, strict=True)):
            assert value.dtype == other.dtype
            error, allowed = relative_rms(value, exact), relative_rms(other, exact)
            assert error <= 1.5 * allowed + 1e-6, f"{kind} {index}: relative error {error:.2e}, eager {allowed:.2e}"


def relative_rms(value: Tensor, truth: Tensor) -> float:
    """Root mean square of the error over that of the truth."""
    value, truth = value.detach().double(), truth.detach().double()
    return float((value - truth).norm() / truth.norm().clamp_min(1e-300))


def run(
    function: Callable[..., Any], args: Args, grad_of: Callable[[Tensor], Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and gradients of the arguments that require them, for incoming gradients grad_of(output)."""
    out = list(_tuple(function(*args)))
    wanted = [value for value in out if value.requires_grad]
    grads = torch.autograd.grad(wanted, leaves_of(args), [grad_of(value) for value in wanted])
    return [value.detach() for value in out], list(grads)


def leaves_of(args: Args) -> tuple[Tensor, ...]:
    """The tensors that require gradients, in order."""
    flat = [item for value in args for item in (value if isinstance(value, list | tuple) else [value])]
    return tuple(value for value in flat if isinstance(value, Tensor) and value.requires_grad)


def replaced(args: Args, function: Callable[[Tensor], Tensor]) -> list[Any]:
    """The arguments with function applied to the tensors that require gradients."""

    def visit(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [visit(item) for item in value]
        return function(value) if isinstance(value, Tensor) and value.requires_grad else value

    return [visit(value) for value in args]


def strided(value: Tensor) -> Tensor:
    """The same values, two elements apart, the last two dimensions stored the other way round."""
    base = torch.stack((value.detach(), torch.full_like(value.detach(), float("nan"))), -1)
    if value.dim() > 1:
        base = base.transpose(-2, -3).contiguous().transpose(-2, -3)
    return base[..., 0].requires_grad_(value.requires_grad)


def _wave(value: Tensor) -> Tensor:
    """A deterministic incoming gradient, exact in bfloat16."""
    return (torch.arange(value.numel()) % 17 - 8).div(8).reshape(value.shape).to(value.dtype)


def _detached(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_detached(item) for item in value]
    return value.detach() if isinstance(value, Tensor) else value


def _tuple(value: Any) -> tuple[Tensor, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)
