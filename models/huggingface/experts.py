"""Experts: transformers' pluggable experts forward, expressed by permute, grouped_linear and unpermute.

`use_experts_implementation` makes the forward of an experts class look up `config._experts_implementation` in a table
of functions. The entry "moec" below serves every layout that decorator knows: gated or not, concatenated or
interleaved (the class's own `_apply_gate` splits), `[E, out, in]` or transposed weights, biases, a norm after each
expert. Gate and activation stay the module's own plain operators, for passes to fuse.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moec.compiler import dialect
from moec.compiler.errors import UnsupportedModelError
from moec.models.huggingface.swaps import Notes, forward_of, replaced, summary

NAME = "moec"


@contextmanager
def exportable_experts(model: nn.Module, notes: Notes) -> Iterator[None]:
    """Every experts module runs `experts_forward`; those that cannot are refused by `check_experts`."""
    check_experts(model)
    modules = [(path, module) for path, module in model.named_modules() if _is_pluggable(module)]
    configs = {id(module.config): module.config for _, module in modules}
    by_setting: dict[str, list[tuple[str, nn.Module]]] = {}
    for path, module in modules:
        setting = module.config._experts_implementation
        if setting != NAME:
            by_setting.setdefault(str(setting), []).append((path, module))
    for setting, found in by_setting.items():
        notes.add(f"experts: permute, grouped_linear, unpermute instead of {setting!r} in {summary(found)}")
    with replaced((vars(config), "_experts_implementation_internal", NAME) for config in configs.values()):
        yield


@contextmanager
def loops_in_double(model: nn.Module, notes: Notes) -> Iterator[None]:
    """Float64 experts run the class's own loop: the grouped products of torch take no doubles."""
    modules = [module for module in model.modules() if _is_pluggable(module)]
    wide = [module for module in modules if any(p.dtype == torch.float64 for p in module.parameters())]
    configs = {id(module.config): module.config for module in wide}
    with replaced((vars(config), "_experts_implementation_internal", "eager") for config in configs.values()):
        yield


def check_experts(model: nn.Module) -> None:
    """Raise UnsupportedModelError for experts that loop over data-dependent counts, or live on several ranks."""
    for path, module in model.named_modules():
        name = type(module).__name__
        if _is_pluggable(module):
            if getattr(module, "_is_expert_parallel", False):
                raise UnsupportedModelError(
                    f"{name} is already spread over ranks",
                    where=path,
                    why="transformers' expert parallelism replaced its weights by one rank's share",
                    hint="load the model without a tensor or expert parallel plan; moec shards it itself",
                )
        elif "Experts" in name and _DATA_DEPENDENT & set(forward_of(module).__code__.co_names):
            code = forward_of(module).__code__
            raise UnsupportedModelError(
                f"{name} loops over the experts that were hit",
                where=f"{path} ({code.co_filename}:{code.co_firstlineno})",
                why="the number of tokens per expert is data, so the loop cannot become one graph, and the class does "
                "not use transformers' experts interface, through which moec would replace it",
                hint="decorate the class with transformers.integrations.moe.use_experts_implementation",
            )


def experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """hidden_states [N, D], top_k_index int64 [N, k], top_k_weights [N, k] -> [N, D] in the dtype of hidden_states."""
    first = module.gate_up_proj if module.has_gate else module.up_proj
    first_bias, last_bias = None, None
    if module.has_bias:
        first_bias = module.gate_up_proj_bias if module.has_gate else module.up_proj_bias
        last_bias = module.down_proj_bias
    rows, order, offsets = dialect.permute(hidden_states, top_k_index, experts=module.num_experts)
    # Norms before the experts may be kept in float32 while the experts' weights are not.
    rows = rows.to(first.dtype)
    rows = dialect.grouped_linear(rows, first, offsets, first_bias, transposed=module.is_transposed)
    rows = module._apply_gate(rows) if module.has_gate else module.act_fn(rows)
    rows = dialect.grouped_linear(rows, module.down_proj, offsets, last_bias, transposed=module.is_transposed)
    if getattr(module, "has_post_expert_norm", False):
        rows = module.post_expert_norm(rows)
    return dialect.unpermute(rows, order, top_k_weights).to(hidden_states.dtype)


def _is_pluggable(module: nn.Module) -> bool:
    return hasattr(module, "_apply_gate") and hasattr(module, "is_transposed") and hasattr(module, "config")


_DATA_DEPENDENT = {"nonzero", "where", "tolist"}

ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
