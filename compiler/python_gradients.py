"""Gradients written in Python: what autograd runs outside of ops, and a traced graph therefore loses.

A trace goes through the forward of a torch.autograd.Function and leaves its backward behind; a hook on a gradient is
never seen at all. Both would give wrong gradients without a word, so the probe run refuses them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from moec.compiler._torch_compat import pytree


class PythonGradient(RuntimeError):
    """Raised where a model asks autograd for something that a graph cannot hold; the text says for what."""


@contextmanager
def refuse_python_gradients() -> Iterator[None]:
    """Within the context, an autograd.Function or a gradient hook that would matter raises PythonGradient."""
    apply, register_hook = torch.autograd.Function.__dict__["apply"], torch.Tensor.register_hook

    def checked_apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        # An op registered with register_autograd is one of these too, made by torch; the trace keeps its gradient.
        if not cls.__module__.startswith("torch._library") and _wants_gradient(args, kwargs):
            raise PythonGradient(
                f"{cls.__qualname__} is a torch.autograd.Function, of which a trace loses the backward"
            )
        return apply.__get__(None, cls)(*args, **kwargs)

    def checked_hook(self: Tensor, hook: Callable[..., Any]) -> Any:
        if self.requires_grad:
            name = getattr(hook, "__qualname__", type(hook).__name__)
            raise PythonGradient(f"{name} is a hook on a gradient, which a trace does not see")
        return register_hook(self, hook)

    torch.autograd.Function.apply = classmethod(checked_apply)  # type: ignore[assignment, method-assign]
    torch.Tensor.register_hook = checked_hook  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]
        torch.Tensor.register_hook = register_hook  # type: ignore[method-assign]


def hooked_parameters(module: nn.Module) -> list[str]:
    """Paths of parameters with a hook on their gradient; a compiled step never calls it."""
    return [
        path
        for path, parameter in module.named_parameters()
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks
    ]


def _wants_gradient(args: Any, kwargs: Any) -> bool:
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
