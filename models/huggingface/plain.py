"""Swaps that leave the numbers alone and make the trace simpler.

- `without_no_grad`: a forward under `torch.no_grad()` traces into a sub-graph of its own. It runs inline instead,
  with its results detached, which is the same.
- `with_symbolic_min`: `min(k, length)` in a modeling file keeps both cases when the length is symbolic.
- `without_checkpointing`: what is recomputed in backward is for the plan to say.
- `with_fixed_rope`: rotary frequencies that depend on the length are fixed where the plan's lengths allow it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn

from moec.compiler._torch_compat import pytree
from moec.compiler.errors import UnsupportedModelError
from moec.compiler.plan import Plan
from moec.compiler.symbolic import TrustTopK
from moec.models.huggingface.swaps import Notes, Replacement, forward_of, replaced, summary


@contextmanager
def without_no_grad(model: nn.Module, notes: Notes) -> Iterator[None]:
    """Forwards decorated with `torch.no_grad()` run inline on the outer grad mode, their results detached."""
    found = [(path, module) for path, module in model.named_modules() if _is_no_grad(type(module).forward)]
    if found:
        notes.add(f"no_grad: traced inline, results detached, in {summary(found)}; no gradient reaches their weights")
    with replaced((vars(module), "forward", partial(_detached, module)) for _, module in found):
        yield


@contextmanager
def with_symbolic_min(model: nn.Module, notes: Notes) -> Iterator[None]:
    """In modules that call the builtin `min` it is `symbolic_min`, and `topk` believes its result."""
    users = [module for module in model.modules() if "min" in forward_of(module).__code__.co_names]
    tables = {id(table): table for table in (forward_of(module).__globals__ for module in users)}
    builtins = [(table, "min", symbolic_min) for table in tables.values()]
    with replaced([*builtins, *((vars(m), "forward", _trusting_topk(m.forward)) for m in users)]):
        yield


@contextmanager
def without_checkpointing(model: nn.Module, notes: Notes) -> Iterator[None]:
    """Modules with gradient checkpointing switched on run without it."""
    found = [(path, m) for path, m in model.named_modules() if getattr(m, "gradient_checkpointing", False)]
    if found:
        notes.add(f"gradient checkpointing: off in {summary(found)}; the plan's `recompute` decides")
    with replaced((vars(module), "gradient_checkpointing", False) for _, module in found):
        yield


def with_fixed_rope(plan: Plan) -> Callable[[nn.Module, Notes], AbstractContextManager[None]]:
    """The swap for rotary embeddings of length-dependent type; raises UnsupportedModelError where they would change."""

    @contextmanager
    def swap(model: nn.Module, notes: Notes) -> Iterator[None]:
        replacements: list[Replacement] = []
        for path, module in model.named_modules():
            types = _length_dependent_types(module)
            if not types:
                continue
            limit = min(_rope_limit(module, types), *_grown(module))
            if plan.length > limit:
                raise UnsupportedModelError(
                    f"rope_type {types[0]!r} changes the rotary frequencies with the length",
                    where=f"{path} (config.rope_parameters), plan.length = {plan.length}",
                    why=f"above {limit} tokens the frequencies depend on the longest position of each batch",
                    hint=f"set plan.length to at most {limit}, or use a rope_type with fixed frequencies (yarn)",
                )
            notes.add(f"rope: {types[0]!r} with its frequencies for at most {limit} tokens in {path}")
            replacements.append((vars(module), "forward", partial(_detached, module)))
        with replaced(replacements):
            yield

    return swap


def symbolic_min(*values: Any, **options: Any) -> Any:
    """`min` that does not decide between a symbolic size and a number."""
    if options or not any(isinstance(value, torch.SymInt) for value in values):
        return min(*values, **options)
    return reduce(torch.sym_min, values)


def _trusting_topk(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with TrustTopK():
            return forward(*args, **kwargs)

    return run


def _detached(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    result = forward_of(module)(module, *args, **kwargs)
    return pytree.tree_map_only(Tensor, lambda leaf: leaf.detach() if leaf.is_floating_point() else leaf, result)


def _is_no_grad(forward: Callable[..., Any]) -> bool:
    if getattr(forward, "__code__", None) is None or forward.__code__.co_name != "decorate_context":
        return False
    factory = inspect.getclosurevars(forward).nonlocals.get("ctx_factory")
    return isinstance(getattr(factory, "__self__", None), torch.no_grad)


def _length_dependent_types(module: nn.Module) -> list[str]:
    rope_type = getattr(module, "rope_type", None)
    types = list(rope_type.values()) if isinstance(rope_type, dict) else [rope_type]
    return [name for name in types if isinstance(name, str) and ("dynamic" in name or name == "longrope")]


def _rope_limit(module: Any, types: list[str]) -> int:
    parameters = module.config.rope_parameters
    tables = list(parameters.values()) if isinstance(module.rope_type, dict) else [parameters]
    limits = [int(module.original_max_seq_len)] if any("dynamic" in name for name in types) else []
    limits += [int(t["original_max_position_embeddings"]) for t in tables if t.get("rope_type") == "longrope"]
    return min(limits)


def _grown(module: Any) -> list[int]:
    """A limit of 0 if a longer batch has already changed the module's frequencies."""
    names = [name for name in vars(module) if name.endswith("max_seq_len_cached")]
    return [0 if int(getattr(module, name)) > int(module.original_max_seq_len) else 1 << 62 for name in names]
