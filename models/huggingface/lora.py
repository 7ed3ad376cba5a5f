"""LoRA adapters of peft in a transformers model: how they are traced, and what they reach.

peft adapts a weight that is no layer's own, such as stacked experts, by a parametrization: every forward registers and
removes one, and writes the weight in place for that, which no graph can hold. While a step is traced the adapted
weight, W + scaling * B A, stands in the place of W instead. Adapters on linear layers are plain operators as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from moec.compiler.errors import UnsupportedModelError
from moec.models.huggingface.swaps import Notes, replaced, summary


def causal_model(model: nn.Module) -> nn.Module:
    """The transformers model inside one that peft has wrapped; any other model as it is."""
    return model.get_base_model() if _is_wrapped(model) else model  # type: ignore[operator, no-any-return]


def check_adapters(model: nn.Module) -> None:
    """Raise UnsupportedModelError for a wrapped model that trains something beside its modules."""
    config: Any = model.active_peft_config if _is_wrapped(model) else None
    if config is not None and config.is_prompt_learning:
        raise UnsupportedModelError(
            f"{type(config).__name__} trains a prompt",
            where=f"{type(model).__name__}.active_peft_config",
            why="moec trains the transformers model inside, which does not see it",
            hint="use adapters that are modules of the model, such as LoRA",
        )


@contextmanager
def plain_adapters(model: nn.Module, notes: Notes) -> Iterator[None]:
    """The swap: adapted weights are values; the notes say which experts are adapted, and which are not."""
    wrappers = [module for module in model.modules() if _is_adapted_weight(module)]
    _mention(model, wrappers, notes)
    with replaced((vars(wrapper), "forward", partial(_run, wrapper)) for wrapper in wrappers):
        yield


def adapted_weight(wrapper: Any) -> Tensor:
    """The weight with all active adapters of a wrapper, in the weight's dtype."""
    weight: Tensor = wrapper.get_param()
    if wrapper.disable_adapters or wrapper.merged:
        return weight
    for adapter in _adapters(wrapper):
        weight = weight + wrapper.get_delta_weight(adapter)
    return weight


def _run(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    # A value in the module's own table is found before the parameter of that name.
    with replaced([(vars(wrapper.get_base_layer()), wrapper.parameter_name, adapted_weight(wrapper))]):
        return wrapper.base_layer(*args, **kwargs)


def _is_wrapped(model: nn.Module) -> bool:
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def _is_adapted_weight(module: nn.Module) -> bool:
    layers = _lora_layers()
    return layers is not None and isinstance(module, layers.ParamWrapper)


def _lora_layers() -> Any:
    """peft's module of LoRA layers, None where nothing has loaded it."""
    return sys.modules.get("peft.tuners.lora.layer")


def _adapters(layer: Any) -> list[str]:
    return [adapter for adapter in layer.active_adapters if adapter in layer.lora_A]


def _mention(model: nn.Module, wrappers: list[nn.Module], notes: Notes) -> None:
    layers = _lora_layers()
    adapted = [(path, m) for path, m in model.named_modules() if layers is not None and isinstance(m, layers.LoraLayer)]
    if not adapted:
        return
    reached: dict[int, list[str]] = {}
    for wrapper in wrappers:
        if _adapters(wrapper):
            reached.setdefault(id(wrapper.get_base_layer()), []).append(str(wrapper.parameter_name))  # type: ignore[operator]
    by_weights: dict[str, list[tuple[str, nn.Module]]] = {}
    for path, module in model.named_modules():
        if id(module) in reached or "Experts" in type(module).__name__:
            weights = ", ".join(sorted(reached.get(id(module), [])))
            by_weights.setdefault(weights, []).append((path.partition(".base_layer")[0], module))
    for weights, found in by_weights.items():
        notes.add(f"LoRA: {f'adapters on {weights}' if weights else 'no adapter'} in {summary(found)}")
    others = [path for path, layer in adapted if layer not in wrappers and _adapters(layer)]
    names = ", ".join(sorted({path.rpartition(".")[2] for path in others}))
    notes.add(
        f"LoRA: adapters on {len(others)} other layers, {names}" if others else "LoRA: no other layer has an adapter"
    )
