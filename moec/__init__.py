"""moec: a compiler for sparse-MoE training steps.

    step = moec.compile(model, plan)
    result = step(input_ids, labels)

Names load on first use, since importing any part of the package runs this file first.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moec.compiler.errors import MoecError
    from moec.compiler.plan import OptimizerPlan, Plan
    from moec.driver import compile
    from moec.loading import load
    from moec.step import CompiledStep
    from moec.verification import verify

__version__ = "0.1.0"

__all__ = ["CompiledStep", "MoecError", "OptimizerPlan", "Plan", "__version__", "compile", "load", "verify"]

_HOME = {
    "CompiledStep": "moec.step",
    "MoecError": "moec.compiler.errors",
    "OptimizerPlan": "moec.compiler.plan",
    "Plan": "moec.compiler.plan",
    "compile": "moec.driver",
    "load": "moec.loading",
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
