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

_MODULES_ALONE = {"LORA", "IA3"}
"""Kinds of adapters that are modules of the model and nothing else: all that peft adds runs with them."""


def causal_model(model: nn.Module) -> nn.Module:
    """The transformers model inside one that peft has wrapped; any other model as it is."""
    return model.get_base_model() if _is_wrapped(model) else model  # type: ignore[operator, no-any-return]


def check_adapters(model: nn.Module) -> None:
    """Raise UnsupportedModelError for a model in which peft does more than its modules do, or trains nothing."""
    peft = sys.modules.get("peft")
    if peft is not None and isinstance(model, peft.PeftMixedModel):
        raise _refused("adapters of several kinds are mixed", "PeftMixedModel", "use adapters of one kind")
    for config in _active_configs(model):
        kind, where = str(config.peft_type.value), f"{type(model).__name__}.peft_config"
        if kind not in _MODULES_ALONE or getattr(config, "alora_invocation_tokens", None):
            name = "aLoRA" if kind == "LORA" else kind
            raise _refused(f"the adapters are of the kind {name}", where, "use LoRA or IA3")
    merged = [path for path, module in model.named_modules() if _is_merged(module)]
    if merged:
        raise UnsupportedModelError(
            f"the adapters of {merged[0]} are merged into its weights",
            where=merged[0],
            why="merged adapters do nothing of their own, so nothing would train them",
            hint="call unmerge_adapter() to train them, or merge_and_unload() to train the model",
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
    if wrapper.disable_adapters:
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


def _active_configs(model: Any) -> list[Any]:
    return [model.peft_config[name] for name in model.active_adapters] if _is_wrapped(model) else []


def _refused(what: str, where: str, hint: str) -> UnsupportedModelError:
    why = "moec runs the transformers model inside, without what peft does around it: a prompt, another loss, offsets"
    return UnsupportedModelError(what, where=where, why=why, hint=f"{hint}, which are modules of the model")


def _is_merged(module: nn.Module) -> bool:
    return bool(getattr(module, "merged_adapters", ()))


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
