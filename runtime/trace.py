"""Find where a program's forward first goes wrong: the layer whose output is not finite."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from moec.runtime.control import gathered_texts
from moec.runtime.state import StepState

_NOWHERE = "every layer's output is finite: the head or the loss itself overflows, or the update of this step did"


def first_non_finite(program: ModuleType, state: StepState, batches: Sequence[Mapping[str, Tensor]]) -> str:
    """'layers.3.attention gives nan' for the first layer call with a non-finite result, found by a second forward.

    It writes buffers and draws random numbers as the first one did; the caller puts them back, before and after.

    On several ranks all call it together, and get the place that the first rank with one has found.
    """
    own = _own_non_finite(program, state, batches)
    if state.world == 1:
        return own or _NOWHERE
    places = gathered_texts(own, state.world, program.DEVICE)
    return next((f"{place} (rank {rank})" for rank, place in enumerate(places) if place), _NOWHERE)


def _own_non_finite(program: ModuleType, state: StepState, batches: Sequence[Mapping[str, Tensor]]) -> str:
    found: list[str] = []
    scopes: list[str] = []
    forward, watched = _watched_forward(program, scopes, found), _ScopeWatcher(state, scopes)
    with torch.no_grad():
        for batch in batches:
            forward(watched, batch)
            # Other ranks may have found nothing yet, and need this one in every collective.
            if found and state.world == 1:
                break
    if found:
        return found[0]
    bad = [path for path, weight in state.weights.items() if not bool(torch.isfinite(weight).all())]
    return f"the weight {bad[0]} is not finite" if bad else ""


def _watched_forward(program: ModuleType, scopes: list[str], found: list[str]) -> Callable[..., Any]:
    """The program's forward, in which every layer's results are looked at; the program itself is left alone, since
    simulated ranks share it."""
    names: dict[str, Any] = dict(vars(program))
    for name, value in vars(program).items():
        if isinstance(value, FunctionType) and value.__globals__ is vars(program):
            own = FunctionType(value.__code__, names, name, value.__defaults__, value.__closure__)
            is_layer = name.endswith("_forward") and not name.startswith("_")
            names[name] = _checked(own, scopes, found) if is_layer else own
    return names["forward"]


def _checked(function: Callable[..., Any], scopes: list[str], found: list[str]) -> Callable[..., Any]:
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
    """A state that notes which layer's weights were asked for last."""

    def __init__(self, state: StepState, scopes: list[str]) -> None:
        self._state = state
        self._scopes = scopes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    def scope(self, path: str) -> Mapping[str, Tensor]:
        self._scopes.append(path)
        return self._state.scope(path)
