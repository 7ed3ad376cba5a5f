"""One call that registers a dialect op: forward, fake, backward op with its own fake, autograd, and the table entry.

Everything is wired by the names in the two schemas. With

    forward   "(Tensor x, Tensor? bias, float eps) -> (Tensor y, Tensor lse)"
    backward  "(Tensor grad_y, Tensor? grad_lse, Tensor x, Tensor lse) -> (Tensor grad_x, Tensor grad_bias)"

the backward op receives the gradients of the forward's results (`grad_` + result name), any forward arguments and any
forward results by name, and returns the gradients of the forward arguments it names. A result gradient declared
`Tensor?` is None when nothing depends on that result; declared `Tensor` it is then zeros. A result whose gradient the
backward does not take is not differentiable. The gradient of an optional argument that was None is an empty tensor,
which autograd turns into None.

A backward whose last argument is `bool[]? needed` makes only the gradients that are asked for, one flag for each in
order, and returns empty tensors for the others; None asks for all. Forward arguments that only some of the gradients
need (`only_for`) are declared `Tensor?`, and are None, and not kept for backward, when none of those is asked for.

An argument that the forward does not read at all (`for_backward`) is declared `Tensor?` in its schema: a differentiated
graph gives it to the backward alone. So the result of an op can be what the backward of a later one starts from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moec.compiler._torch_compat import OpOverload, parse_schema
from moec.compiler.dialect.registry import BODIES, Definition, define


def define_op(
    name: str,
    schema: str,
    forward: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    shapes: Mapping[str, str],
    flops: str,
    backward_schema: str = "",
    backward: Callable[..., Any] | None = None,
    backward_fake: Callable[..., Any] | None = None,
    backward_flops: str = "0",
    only_for: Mapping[str, Sequence[str]] | None = None,
    for_backward: Sequence[str] = (),
    recompute: bool = True,
    source: str = "",
    summary: str = "",
) -> Definition:
    """Register `moec::name` (and `moec::name_backward` if `backward` is given) and put it into the table.

    The four functions take the arguments of their schema in order; results must be fresh contiguous tensors.
    """
    if backward is not None:
        _check_names(_parse(name, schema), _parse(f"{name}_backward", backward_schema))
    operator = _register(name, schema, forward, fake)
    overload = operator._opoverload
    readers = {name: tuple(gradients) for name, gradients in (only_for or {}).items()}
    gradient = None
    if backward is not None and backward_fake is not None:
        gradient = _register(f"{name}_backward", backward_schema, backward, backward_fake)._opoverload
        setup, run = _autograd(overload._schema, gradient, readers)
        operator.register_autograd(run, setup_context=setup)
    return define(
        Definition(
            name=name,
            op=overload,
            shapes=shapes,
            flops=flops,
            backward=gradient,
            backward_flops=backward_flops,
            only_for=readers,
            for_backward=tuple(for_backward),
            recompute=recompute,
            source=source,
            summary=summary,
        )
    )


def math_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that the references compute in: float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def asked_for(needed: Sequence[bool] | None, count: int) -> tuple[bool, ...]:
    """Which of the `count` gradients of a backward op are asked for."""
    return tuple(needed) if needed is not None else (True,) * count


def only_asked_for(needed: Sequence[bool] | None, grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The gradients that are asked for, and empty ones in the place of the others."""
    flags = asked_for(needed, len(grads))
    return tuple(grad if flag else grad.new_empty(0) for grad, flag in zip(grads, flags, strict=True))


def _parse(name: str, schema: str) -> torch.FunctionSchema:
    return parse_schema(f"moec::{name}{schema}")


def _check_names(forward: torch.FunctionSchema, backward: torch.FunctionSchema) -> None:
    arguments, results = ({value.name for value in values} for values in (forward.arguments, forward.returns))
    allowed = arguments | results | {f"grad_{name}" for name in results} | {NEEDED}
    taken = {value.name for value in backward.arguments} - allowed
    given = {value.name for value in backward.returns} - {f"grad_{name}" for name in arguments}
    if taken or given:
        names = ", ".join(sorted(taken | given))
        raise ValueError(f"{backward.name}: {names}: neither an argument, a result nor a gradient of {forward.name}")


def _register(
    name: str, schema: str, function: Callable[..., Any], fake: Callable[..., Any]
) -> torch.library.CustomOpDef:
    arguments = _parse(name, schema).arguments

    def complete(function: Callable[..., Any]) -> Callable[..., Any]:
        # The dispatcher drops trailing arguments that equal their defaults; the functions need not repeat those.
        return lambda *args: function(*args, *(argument.default_value for argument in arguments[len(args) :]))

    body = complete(function)
    operator = torch.library.custom_op(f"moec::{name}", body, mutates_args=(), schema=schema)
    operator.register_fake(complete(fake))
    BODIES[operator._opoverload] = body
    return operator


NEEDED = "needed"
"""The argument of a backward op that says which gradients are asked for."""


def _is_needed(flags: bool | Sequence[bool]) -> bool:
    return any(flags) if isinstance(flags, Sequence) else flags


class _Kept(NamedTuple):
    """Where an argument's tensors lie among the saved ones."""

    start: int
    stop: int
    is_list: bool


def _autograd(
    schema: torch.FunctionSchema, gradient: OpOverload, only_for: Mapping[str, Sequence[str]]
) -> tuple[Callable[..., None], Callable[..., Any]]:
    """The `setup_context` and `backward` functions that connect a forward schema with its backward op."""
    arguments = [argument.name for argument in schema.arguments]
    results = [result.name for result in schema.returns]
    wanted = [argument.name for argument in gradient._schema.arguments]
    optional = {a.name for a in gradient._schema.arguments if isinstance(a.type, torch.OptionalType)}
    returned = [result.name.removeprefix("grad_") for result in gradient._schema.returns]
    selective = NEEDED in wanted

    def setup(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        ctx.set_materialize_grads(False)
        outputs = output if isinstance(output, tuple) else (output,)
        values = dict(zip(results, outputs, strict=True)) | dict(zip(arguments, inputs, strict=True))
        ctx.metas = {f"grad_{n}": (v.shape, v.dtype, v.device) for n, v in zip(results, outputs, strict=True)}
        ctx.absent = {n for n in arguments if values[n] is None}
        ctx.nothing = {
            name: [None] * len(value)
            for name, value in zip(arguments, inputs, strict=True)
            if isinstance(value, list | tuple) and all(isinstance(item, Tensor) for item in value)
        }
        ctx.kept = {}
        tensors: list[Tensor] = []
        for name in (name for name in wanted if name in values):
            value = values[name]
            if name in only_for and not any(ctx.needs_input_grad[arguments.index(user)] for user in only_for[name]):
                value = None
            items = value if isinstance(value, list | tuple) else [value]
            if items and all(isinstance(item, Tensor) for item in items):
                ctx.kept[name] = _Kept(len(tensors), len(tensors) + len(items), not isinstance(value, Tensor))
                tensors += items
            else:
                ctx.kept[name] = value
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(
            *(value for name, value in zip(results, outputs, strict=True) if f"grad_{name}" not in wanted)
        )

    def run(ctx: Any, *grads: Tensor | None) -> Any:
        if all(grad is None for grad in grads):
            # Only results that their users do not differentiate were used.
            return tuple(ctx.nothing.get(name) for name in arguments)
        saved = ctx.saved_tensors
        given = {f"grad_{name}": grad for name, grad in zip(results, grads, strict=True)}
        flags = [name in ctx.absent or _is_needed(ctx.needs_input_grad[arguments.index(name)]) for name in returned]

        def value_of(name: str) -> Any:
            if name in given:
                if given[name] is None and name not in optional:
                    shape, dtype, device = ctx.metas[name]
                    return torch.zeros(shape, dtype=dtype, device=device)
                return given[name]
            kept = ctx.kept[name]
            if not isinstance(kept, _Kept):
                return kept
            return list(saved[kept.start : kept.stop]) if kept.is_list else saved[kept.start]

        chosen = [flags] if selective and not all(flags) else []
        out = gradient(*(value_of(name) for name in wanted if name != NEEDED), *chosen)
        out = out if isinstance(out, tuple) else (out,)
        by_name = {
            name: grad for name, grad, flag in zip(returned, out, flags, strict=True) if flag and name not in ctx.absent
        }
        return tuple(by_name.get(name, ctx.nothing.get(name)) for name in arguments)

    return setup, run
