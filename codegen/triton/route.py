"""Routing on a GPU: kernels for `moec::route`, its gradient, and the counts for quantile balancing.

They run on CUDA tensors wherever the op is called.

Nothing here needs a GPU or Triton to be imported; the kernels are loaded at the first call.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from moec.codegen.triton.under_op import argument_names, refusal_by, register_under_ops, value_of
from moec.compiler import dialect  # noqa: F401  registers the ops
from moec.compiler.dialect.registry import size_hint
from moec.compiler.lower import argument_of

_OPS: Any = torch.ops.moec
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MOST = 4096
_MOST_BINS = 8192


def reason(op: Any, *arguments: Any) -> str:
    """Why the kernels do not fit a call of one of the ops; '' when they fit."""
    given = dict(zip(argument_names(op), arguments, strict=True))
    logits: Tensor = given["logits"]
    experts, groups = logits.shape[1], given.get("groups", 1)
    if not logits.is_cuda:
        return f"logits is on {logits.device.type}, the kernels need a CUDA device"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if logits.dtype not in _DTYPES:
        return f"logits is {str(logits.dtype).removeprefix('torch.')}, expected bfloat16, float16 or float32"
    if experts > _MOST:
        return f"{experts} experts, the kernels hold up to {_MOST} scores of a token"
    if groups > 1 and (experts & (experts - 1) or groups & (groups - 1)):
        return f"{experts} experts in {groups} groups, the kernels need powers of two"
    if given.get("bins", 1) > _MOST_BINS:
        return f"{given['bins']} bins, the kernels hold up to {_MOST_BINS} counts in a program"
    return ""


def _route(*arguments: Any) -> Any:
    from moec.codegen.triton import route_launch

    return route_launch.route(*arguments)


def _route_backward(*arguments: Any) -> Any:
    from moec.codegen.triton import route_launch

    return route_launch.route_backward(*arguments)


def _route_histogram(*arguments: Any) -> Any:
    from moec.codegen.triton import route_launch

    return route_launch.route_histogram(*arguments)


def workspace(node: fx.Node) -> int | None:
    """Bytes beyond inputs and results: a threshold for each token, where counts are taken."""
    if refusal(node):
        return None
    counted = node.target is _OPS.route_histogram.default
    return 4 * size_hint(value_of(argument_of(node, "logits")).shape[0]) if counted else 0


refusal = refusal_by(reason)
TABLE: dict[Any, Callable[..., Any]] = {
    _OPS.route.default: _route,
    _OPS.route_backward.default: _route_backward,
    _OPS.route_histogram.default: _route_histogram,
}
register_under_ops(TABLE, reason, workspace)
