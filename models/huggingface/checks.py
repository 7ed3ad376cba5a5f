"""What moec refuses in a Hugging Face model before tracing it, and what it only mentions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss

from moec.compiler.errors import UnsupportedModelError
from moec.compiler.plan import Plan
from moec.models.huggingface.swaps import Notes


def check_model(model: Any) -> None:
    """Raise UnsupportedModelError for a model without a causal LM loss or with random ops in its forward."""
    if getattr(model, "loss_function", None) is not ForCausalLMLoss or model.get_output_embeddings() is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no causal language modelling loss",
            why="moec trains models whose forward(labels=...) is transformers' ForCausalLMLoss of their logits",
            hint="load the model with AutoModelForCausalLM",
        )
    if not model.training:
        return
    for name, value in _random_fields(model.config):
        raise UnsupportedModelError(
            f"config.{name} = {value} draws random numbers in every forward pass",
            where=f"config.{name}",
            why="the compiled step has no random operators",
            hint=f"set config.{name} = 0 before building the model",
        )
    for path, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0 and module.training:
            raise UnsupportedModelError(
                f"a dropout of {module.p} draws random numbers in every forward pass",
                where=path,
                why="the compiled step has no random operators",
                hint=f"set its probability to 0: model.get_submodule({path!r}).p = 0.0",
            )


def mention(model: Any, plan: Plan, notes: Notes) -> None:
    """Note tied weights, weights that no gradient is wanted for, and a length beyond what the model was trained for."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for tied in names.values():
        if len(tied) > 1:
            notes.add(f"tied weights: {' = '.join(tied)} is one parameter with one gradient")
    trained = getattr(model.config, "max_position_embeddings", None)
    if trained is not None and plan.length > trained:
        notes.add(f"length: plan.length = {plan.length} is beyond config.max_position_embeddings = {trained}")


def _random_fields(config: Any) -> Iterator[tuple[str, float]]:
    for name, value in vars(config).items():
        random = any(word in name for word in ("dropout", "pdrop", "jitter")) and not name.startswith("classifier")
        if random and isinstance(value, int | float) and value > 0:
            yield name, value
        if hasattr(value, "to_dict"):
            yield from ((f"{name}.{inner}", found) for inner, found in _random_fields(value))
