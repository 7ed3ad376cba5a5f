"""TARGET of the command line: a preset's name, `module:factory`, or a Hugging Face config.json, as a model.

A factory takes no arguments and returns an nn.Module; its module is imported with the current folder on the path.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moec.arguments import check_target, is_config, not_importable
from moec.compiler.deferred import deferred_init, make_buffers
from moec.compiler.errors import DeferredInitError, UnsupportedModelError
from moec.models.build import build
from moec.models.presets import preset
from moec.weights import load_weights


def build_target(
    target: str,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
    weights: Path | None = None,
) -> nn.Module:
    """The model of a target in training mode, initialised from `seed` or, where given, with weights from files.

    dtype: of the matrices; None takes the target's own (float32 for presets). weights: see moec/weights.py.
    Raises PresetError or UnsupportedModelError for a target that is none, CheckpointError for weights of another model.
    """
    torch.manual_seed(seed)
    model = _build(target, dtype, device)
    if weights is not None:
        load_weights(model, weights)
    return model


def fake_target(
    target: str, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu", seed: int = 0
) -> nn.Module:
    """The model of a target without memory for its parameters; buffers have their values.

    A step over it makes the weights that `build_target` gives, one at a time (compiler/deferred.py). A model that
    cannot be initialised so has its weights at once.
    """
    torch.manual_seed(seed)
    try:
        with deferred_init():
            model = _build(target, dtype, device)
    except DeferredInitError:
        return build_target(target, dtype=dtype, device=device, seed=seed)
    make_buffers(model)
    return model


def _build(target: str, dtype: torch.dtype | None, device: torch.device | str) -> nn.Module:
    check_target(target)
    if is_config(target):
        from moec.models.huggingface.adapter import from_config

        return from_config(target, dtype=dtype, device=device)
    if ":" in target:
        return _convert(_call_factory(target, device), dtype, device).train()
    return build(preset(target), dtype=dtype or torch.float32, device=device).train()


def _call_factory(target: str, device: torch.device | str) -> nn.Module:
    name, _, attribute = target.partition(":")
    factory = _find_factory(target, name, attribute)
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise UnsupportedModelError(
            f"{target} cannot be called without arguments",
            why=str(error),
            hint="wrap it: def factory(): return Model(...)",
        ) from error
    with torch.device(device):
        model = factory()
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(
            f"{target} returned {type(model).__name__}, not an nn.Module",
            hint="a factory returns the model to train",
        )
    return model


def _find_factory(target: str, name: str, attribute: str) -> Callable[[], Any]:
    with ExitStack() as stack:
        if "" not in sys.path:
            sys.path.insert(0, "")
            stack.callback(sys.path.remove, "")
        try:
            module = importlib.import_module(name)
        except (ImportError, ValueError) as error:
            raise not_importable(target, str(error)) from error
    factory = getattr(module, attribute, None)
    if factory is None:
        near = difflib.get_close_matches(attribute, dir(module), n=3)
        raise UnsupportedModelError(
            f"{name} has no {attribute!r}", where=target, hint=f"did you mean {', '.join(near)}?" if near else ""
        )
    if not callable(factory):
        raise UnsupportedModelError(
            f"{target} is a {type(factory).__name__}, not a function",
            hint="give a function without arguments that returns an nn.Module",
        )
    return factory


def _convert(model: nn.Module, dtype: torch.dtype | None, device: torch.device | str) -> nn.Module:
    """`model.to(device, dtype)`, which cannot exchange fake parameters."""
    converted: dict[int, Tensor] = {}
    for module in model.modules():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for name, value in table.items():
                if value is not None:
                    table[name] = converted.setdefault(id(value), _converted(value, dtype, device))
    return model


def _converted(value: Tensor, dtype: torch.dtype | None, device: torch.device | str) -> Tensor:
    new = value.detach().to(device, dtype if value.is_floating_point() else None)
    if new.dtype == value.dtype and new.device == value.device:
        return value
    return nn.Parameter(new, requires_grad=value.requires_grad) if isinstance(value, nn.Parameter) else new
