"""What every differentiable dialect op must satisfy, and small makers of inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from moec.compiler.cost import node_flops
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
    check_chosen_gradients(name, args)
    assert definition.flops_of(args, {}) > 0
    assert backward_cost(name, args) == float(definition.backward_flops_of(args, {})) > 0


def backward_cost(name: str, args: Args) -> float:
    """FLOPs of the backward op as a graph that calls it tells them."""
    graph, definition = fx.Graph(), DEFINITIONS[name]

    def placeholder(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [placeholder(item) for item in value]
        if not isinstance(value, Tensor):
            return value
        node = graph.placeholder("value")
        node.meta["val"] = value
        return node

    given = backward_args(name, args)
    call = graph.call_function(definition.backward, tuple(map(placeholder, given)))  # type: ignore[arg-type]
    call.meta["val"] = definition.backward(*given)  # type: ignore[misc]
    return node_flops(call)


def backward_args(name: str, args: Args) -> tuple[Any, ...]:
    """Arguments of the backward op: random result gradients, and forward arguments and results by name."""
    definition = DEFINITIONS[name]
    assert definition.backward is not None
    plain = [_detached(value) for value in args]
    arguments = definition.op._schema.arguments
    values = {
        argument.name: argument.default_value for argument in (*arguments, *definition.backward._schema.arguments)
    }
    values |= dict(zip((argument.name for argument in arguments), plain, strict=False))
    for result, value in zip(definition.op._schema.returns, _tuple(definition.op(*plain)), strict=True):
        values[result.name] = value
        values[f"grad_{result.name}"] = torch.randn_like(value)
    return tuple(values[argument.name] for argument in definition.backward._schema.arguments)


def check_chosen_gradients(name: str, args: Args) -> None:
    """Each gradient on its own, and each left out, is what it is with all of them; the others are empty.

    The same through autograd, where the arguments that want no gradient are frozen.
    """
    definition = DEFINITIONS[name]
    assert definition.backward is not None
    schema = definition.backward._schema
    if schema.arguments[-1].name != "needed":
        return
    given = dict(zip((argument.name for argument in schema.arguments), backward_args(name, args), strict=True))
    everything = definition.backward(*given.values())
    names = [result.name.removeprefix("grad_") for result in schema.returns]
    for chosen in {*((one,) for one in names), *(tuple(n for n in names if n != one) for one in names)}:
        flags = [n in chosen for n in names]
        unread = {x for x, readers in definition.only_for.items() if not set(readers) & set(chosen)}
        call = tuple(None if argument in unread else value for argument, value in given.items())[:-1]
        torch.library.opcheck(definition.backward, (*call, flags), test_utils=("test_faketensor",))
        for value, wanted, flag in zip(definition.backward(*call, flags), everything, flags, strict=True):
            if flag:
                assert all(torch.equal(one, two) for one, two in zip(_list(value), _list(wanted), strict=True))
            assert flag or sum(one.numel() for one in _list(value)) == 0
        _check_frozen(name, args, chosen, names)


def _check_frozen(name: str, args: Args, chosen: Sequence[str], returned: Sequence[str]) -> None:
    """Gradients of `chosen` with every other argument frozen; the backward op is asked for these and what is absent."""
    definition = DEFINITIONS[name]
    named = dict(zip((argument.name for argument in definition.op._schema.arguments), args, strict=False))
    wanted = {n for n in chosen if leaves_of([named.get(n)])}
    if not wanted:
        return
    asked: list[list[bool] | None] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is definition.backward:
                asked.append(args[-1] if len(args) == len(function._schema.arguments) else None)
            return function(*args, **(kwargs or {}))

    frozen = [value if n in wanted else _detached(value) for n, value in named.items()]
    everything = dict(zip(map(id, leaves_of(args)), run(definition.op, args, _wave)[1], strict=True))
    with Watch():
        _, grads = run(definition.op, frozen, _wave)
    for leaf, grad in zip(leaves_of(frozen), grads, strict=True):
        assert torch.equal(grad, everything[id(leaf)])
    flags = [n in wanted or named.get(n) is None for n in returned]
    assert asked == [None if all(flags) else flags]


def _list(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, list | tuple) else [value]


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
