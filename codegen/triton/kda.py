"""KDA on Hopper: `moec::kda_triton`, `moec::kda_with_state_triton` and their backwards, with the schemas of the
reference ops, and when they are chosen.

Nothing here needs a GPU or Triton to be imported; the kernels are loaded at the first call.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any

import torch
from torch import Tensor, fx

from moec.codegen.triton.kda_workspace import backward_workspace, forward_workspace
from moec.codegen.triton.under_op import value_of
from moec.compiler import dialect  # noqa: F401  registers the reference ops
from moec.compiler.dialect._define import only_asked_for
from moec.compiler.dialect.kda import backward_fake
from moec.compiler.dialect.kda_state import state_backward_fake, state_fake
from moec.compiler.dialect.registry import size_hint
from moec.compiler.lower import Implementation, argument_of, register_implementation
from moec.compiler.workspace import register_workspace

SAFE_PTXAS = (13, 3)

_OPS = torch.ops.moec
HEAD_DIMS = (16, 32, 64, 128, 256)
MOST_TAPS = 8


def _forward(*arguments: Any) -> Tensor:
    from moec.codegen.triton import kda_launch

    return kda_launch.forward(kda_launch.Inputs(*_checked(arguments, _OPS.kda.default)))


def _backward(*arguments: Any) -> tuple[Tensor, ...]:
    from moec.codegen.triton import kda_launch

    grad_y, *rest, needed = _checked(arguments, _OPS.kda_backward.default)
    return only_asked_for(needed, kda_launch.backward(grad_y, kda_launch.Inputs(*rest)))


def _forward_with_state(*arguments: Any) -> tuple[Tensor, Tensor]:
    from moec.codegen.triton import kda_launch

    return kda_launch.forward_with_state(kda_launch.Inputs(*_checked(arguments, _OPS.kda_with_state.default)))


def _backward_with_state(*arguments: Any) -> tuple[Tensor, ...]:
    from moec.codegen.triton import kda_launch

    grad_y, grad_final, *rest, needed = _checked(arguments, _OPS.kda_with_state_backward.default)
    return only_asked_for(needed, kda_launch.backward_with_state(grad_y, grad_final, kda_launch.Inputs(*rest)))


def _forward_fake(*arguments: Any) -> Tensor:
    return arguments[2].new_empty(arguments[2].shape)


def refusal(node: fx.Node) -> str:
    """Why the kernels do not fit a call of `moec::kda`, `moec::kda_with_state` or a backward; '' when they fit."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    values = {name: value_of(argument_of(node, name)) for name in names}
    if values["q"].device.type != "cuda":
        return f"q is on {values['q'].device.type}, the kernels need a CUDA device"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 9:
        return "the kernels are built for compute capability 9.0 and later"
    if any(values[name].dtype != torch.bfloat16 for name in ("q", "k", "v")):
        return f"q, k, v are {values['q'].dtype}, {values['k'].dtype}, {values['v'].dtype}, expected bfloat16"
    return shape_refusal(values) or assembler_refusal()


@functools.cache
def assembler_refusal() -> str:
    """Why the machine code cannot be trusted, '' when it can.

    ptxas before 13.3 may reuse the registers of a wgmma's left operand before they have been read. Triton 3.6 and 3.9
    carry 12.8 and 12.9; with 12.8 on an H200 these kernels gave wrong numbers and illegal accesses, with 13.4 neither.
    """
    from triton import knobs

    found = knobs.nvidia.ptxas
    if found is not None and tuple(map(int, found.version.split("."))) >= SAFE_PTXAS:
        return ""
    version = "no ptxas" if found is None else f"ptxas {found.version}"
    wanted = ".".join(map(str, SAFE_PTXAS))
    return f"Triton uses {version}, which miscompiles wgmma; set TRITON_PTXAS_PATH to ptxas {wanted} or later"


def shape_refusal(values: dict[str, Any]) -> str:
    """The part of `refusal` that no device decides; values by argument name."""
    width = values["q"].shape[2] // values["heads"]
    value_width = values["v"].shape[2] // values["value_heads"]
    for name, size in (("key", width), ("value", value_width)):
        if size not in HEAD_DIMS:
            # The rows of a tile are a power of two long, and every load and store would need a mask.
            return f"{name} head dimension {size}, expected 16, 32, 64, 128 or 256"
    if size_hint(values["q"].shape[1]) * max(values["q"].shape[2], values["v"].shape[2]) * values["value_heads"] >= (
        2**31 * values["heads"]
    ):
        return "2^31 elements or more in a batch row, the kernels count them in 32 bits"
    given = [values[name] is not None for name in ("conv_q", "conv_k", "conv_v")]
    if any(given) != all(given):
        return "only some of q, k and v have a convolution"
    if all(given):
        taps = {values[name].shape[1] for name in ("conv_q", "conv_k", "conv_v")}
        if len(taps) > 1 or max(taps) > MOST_TAPS:
            return f"convolutions of {sorted(taps)} taps, expected one width of at most {MOST_TAPS}"
    return ""


def _checked(arguments: tuple[Any, ...], op: torch._ops.OpOverload) -> tuple[Any, ...]:
    """All arguments, those that the dispatcher dropped as equal to their defaults included."""
    complete = _completed(arguments, op)
    values = {argument.name: value for argument, value in zip(op._schema.arguments, complete, strict=True)}
    q = values["q"]
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if q.device.type != "cuda" and not interpreted:
        raise RuntimeError(f"moec::kda_triton: q is on {q.device.type}; only Triton's interpreter runs there")
    dtypes = {values[name].dtype for name in ("q", "k", "v")}
    if dtypes != {torch.bfloat16} and dtypes != {torch.float32}:
        raise RuntimeError(
            f"moec::kda_triton: q, k, v are {sorted(map(str, dtypes))}, expected one of bfloat16, float32"
        )
    reason = shape_refusal(values) or ("" if interpreted else assembler_refusal())
    if reason:
        raise RuntimeError(f"moec::kda_triton: {reason}")
    return complete


def _completed(arguments: tuple[Any, ...], op: torch._ops.OpOverload) -> tuple[Any, ...]:
    return (*arguments, *(argument.default_value for argument in op._schema.arguments[len(arguments) :]))


def _with_kernels(reference: torch._ops.OpOverload, function: Any, fake: Any, workspace: Any) -> torch._ops.OpOverload:
    """The op that runs `function`, with the schema of `reference`, and its place among the implementations."""
    operator, _, signature = str(reference._schema).partition("(")
    name = operator.removeprefix("moec::")
    name = f"{name.removesuffix('_backward')}_triton{'_backward' if name.endswith('_backward') else ''}"
    made = torch.library.custom_op(f"moec::{name}", function, mutates_args=(), schema=f"({signature}")

    def complete_fake(*arguments: Any) -> Any:
        return fake(*_completed(arguments, reference))

    made.register_fake(complete_fake)
    overload = made._opoverload
    register_implementation(reference, Implementation("triton", overload, refusal))
    register_workspace(overload, workspace)
    return overload


FORWARD = _with_kernels(_OPS.kda.default, _forward, _forward_fake, forward_workspace)
BACKWARD = _with_kernels(_OPS.kda_backward.default, _backward, backward_fake, backward_workspace)
FORWARD_WITH_STATE = _with_kernels(_OPS.kda_with_state.default, _forward_with_state, state_fake, forward_workspace)
BACKWARD_WITH_STATE = _with_kernels(
    _OPS.kda_with_state_backward.default, _backward_with_state, state_backward_fake, backward_workspace
)
