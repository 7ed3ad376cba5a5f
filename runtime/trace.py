"""Find where a program's forward first goes wrong: the layer whose output is not finite."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from moec.runtime.state import StepState


def first_non_finite(program: ModuleType, state: StepState, batches: Sequence[Mapping[str, Tensor]]) -> str:
    """'layers.3.attention gives nan' for the first layer call with a non-finite result, found by a second forward."""
    found: list[str] = []
    scopes: list[str] = []
    originals = {
        name: value
        for name, value in vars(program).items()
        if name.endswith("_forward") and callable(value) and not name.startswith("_")
    }
    watched = _ScopeWatcher(state, scopes)
    try:
        for name, function in originals.items():
            setattr(program, name, _checked(function, scopes, found))
        with torch.no_grad():
            for batch in batches:
                program.forward(watched, batch)
                if found:
                    return found[0]
    finally:
        for name, function in originals.items():
            setattr(program, name, function)
    bad = [path for path, weight in state.weights.items() if not bool(torch.isfinite(weight).all())]
    if bad:
        return f"the weight {bad[0]} is not finite"
    return "every layer's output is finite: the head or the loss itself overflows, or the update of this step did"


def _checked(function: Callable[..., Any], scopes: list[str], found: list[str]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any) -> Any:
        path = scopes[-1]
        output = function(*args)
        results = output[0] if isinstance(output[0], tuple) else (output[0],)
        for result in results:
            if result.is_floating_point() and not bool(torch.isfinite(result).all()) and not found:
                kind = "nan" if bool(torch.isnan(result).any()) else "infinity"
                found.append(f"{path} is the first layer whose output holds {kind}")
        return output

    return run


class _ScopeWatcher:
    """A state that notes which layer's weights were asked for last, and lets nothing be written."""

    def __init__(self, state: StepState, scopes: list[str]) -> None:
        self._state = state
        self._scopes = scopes

    def scope(self, path: str) -> Mapping[str, Tensor]:
        self._scopes.append(path)
        weights = self._state.scope(path)
        if path:
            return weights
        buffers = self._state.buffers
        return {name: value.clone() if name in buffers else value for name, value in weights.items()}
