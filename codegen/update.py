"""The parts of a step program that come from the plan: its docstring and the body of update()."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moec.compiler.capture import Capture
from moec.compiler.plan import Plan
from moec.compiler.text import quoted


def header_text(model: str, plan: Plan, captured: Capture) -> str:
    """The module docstring of step.py: what it computes, for which shapes, and how to run it."""
    shape = f"{plan.accumulation} x [{plan.batch}, {_length(plan)}]"
    layers = [f"  {t.name}: {len(t.calls)} x ({t.paths[0]}, ...)" for t in captured.templates.values()]
    lines = [
        f"One training step of {model}, written by moec for batches of {shape} tokens.",
        "",
        "Read it from the bottom: step() runs forward() and backward() per microbatch, then update().",
        "It can be edited: `moec.load(folder)` runs this file as it stands.",
        *(["", "Layers that share one function:", *layers] if layers else []),
        "",
        f"torch {torch.__version__.split('+')[0]}",
    ]
    return "\n".join(lines)


def update_text(plan: Plan, routers: Sequence[tuple[str, str, int]], joined: Sequence[str] = ()) -> str:
    """Statements of update(state, lr); returns the gradient norm before clipping.

    joined: buffers that the forwards of several ranks have written apart.
    """
    optimizer = plan.optimizer
    common = f"lr=lr, betas={optimizer.betas}, eps={optimizer.eps!r}"
    bound = optimizer.clip_norm if optimizer.clip_norm > 0 else None
    refuses = plan.mesh.capacity > 0 and plan.mesh.overflow == "refuse"
    lines = [
        *(["runtime.refuse_overflow(state)"] if refuses else []),
        *([f"runtime.join_buffers(state, [{', '.join(map(quoted, joined))}])"] if joined else []),
        "groups = runtime.parameter_groups(state)",
        f"norm = runtime.clip_gradients(state, max_norm={bound})",
        f'runtime.adamw(state, groups["decay"], {common}, weight_decay={optimizer.weight_decay!r})',
        f'runtime.adamw(state, groups["no_decay"], {common}, weight_decay=0.0)',
    ]
    if routers:
        entries = [f"    ({quoted(bias)}, {quoted(histogram)}, {top_k})," for bias, histogram, top_k in routers]
        lines += ["routers = [", *entries, "]", "runtime.update_balance(state, routers)"]
    return "\n".join([*lines, "return norm"])


def _length(plan: Plan) -> str:
    return f"{plan.shortest}..{plan.length}" if plan.dynamic == "length" else str(plan.length)
