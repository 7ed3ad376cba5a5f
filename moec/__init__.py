"""moec: a compiler for sparse-MoE training steps.

    step = moec.compile(model, plan)
    result = step(input_ids, labels)

Names load on first use, since importing any part of the package runs this file first.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moec.codegen.losses import linear_cross_entropy, token_log_probs
    from moec.compiler.deferred import deferred_init
    from moec.compiler.errors import MoecError
    from moec.compiler.plan import CachePlan, CacheRule, LossPlan, OptimizerPlan, Plan
    from moec.driver import compile
    from moec.loading import load
    from moec.op_timing import measure_ops
    from moec.step import CompiledStep
    from moec.verification import verify

__version__ = "0.1.0"

__all__ = [
    "CachePlan",
    "CacheRule",
    "CompiledStep",
    "LossPlan",
    "MoecError",
    "OptimizerPlan",
    "Plan",
    "__version__",
    "compile",
    "deferred_init",
    "linear_cross_entropy",
    "load",
    "measure_ops",
    "token_log_probs",
    "verify",
]

_HOME = {
    "CompiledStep": "moec.step",
    "CachePlan": "moec.compiler.plan",
    "CacheRule": "moec.compiler.plan",
    "LossPlan": "moec.compiler.plan",
    "MoecError": "moec.compiler.errors",
    "OptimizerPlan": "moec.compiler.plan",
    "Plan": "moec.compiler.plan",
    "compile": "moec.driver",
    "deferred_init": "moec.compiler.deferred",
    "linear_cross_entropy": "moec.codegen.losses",
    "load": "moec.loading",
    "measure_ops": "moec.op_timing",
    "token_log_probs": "moec.codegen.losses",
    "verify": "moec.verification",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'moec' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
