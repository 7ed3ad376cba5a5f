"""PyTorch's own ways to save activation memory, on the very graphs and kernels that moec runs.

The captured graphs with the semantic passes run under autograd, op by op; each layer template is what a user would wrap
in `torch.utils.checkpoint`. Gradients are added to the same state, and the update is that of the emitted program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from moec.codegen.program import OBJECTIVE
from moec.codegen.triton import kda
from moec.compilation import Compilation
from moec.step import CompiledStep

Layer = Callable[..., list[Tensor]]
_aten, _moec = torch.ops.aten, torch.ops.moec
EXPENSIVE = [
    _aten.mm.default,
    _aten.bmm.default,
    _aten.addmm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _moec.grouped_linear.default,
    _moec.expert_up.default,
    _moec.expert_down.default,
    _moec.attention.default,
    _moec.sparse_attention.default,
    _moec.kda.default,
    _moec.route.default,
    _moec.permute.default,
]
"""Results that selective checkpointing keeps: products, attention, and what a router decides."""


def _plain(layer: Layer, *arguments: Any) -> Any:
    return layer(*arguments)


def _checkpointed(layer: Layer, *arguments: Any) -> Any:
    return checkpoint(layer, *arguments, use_reentrant=False, preserve_rng_state=False)


def _selective(layer: Layer, *arguments: Any) -> Any:
    contexts = partial(create_selective_checkpoint_contexts, EXPENSIVE)
    return checkpoint(layer, *arguments, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


def _on_cpu() -> AbstractContextManager[Any]:
    return save_on_cpu(pin_memory=torch.cuda.is_available())


WAYS: dict[str, tuple[Callable[..., Any], Callable[[], AbstractContextManager[Any]]]] = {
    "torch none": (_plain, nullcontext),
    "torch checkpoint": (_checkpointed, nullcontext),
    "torch selective": (_selective, nullcontext),
    "torch save_on_cpu": (_plain, _on_cpu),
}


def kernels_for_autograd() -> None:
    """Let `moec::kda` run its kernels where autograd calls it; a compiled step calls them by another name."""
    for op, kernel in ((_moec.kda, kda._forward), (_moec.kda_backward, kda._backward)):
        torch.library.register_kernel(op.default, "cuda", kernel)


class TorchStep:
    """A step in one of `WAYS`. found, step: the same model, compiled with everything kept."""

    def __init__(self, found: Compilation, step: CompiledStep, way: str) -> None:
        self._found, self._step = found, step
        self._layer, self._saving = WAYS[way]
        self._parameters = dict(found.model.named_parameters())
        self._results = found.captured.program.outer.signature.outputs
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._accumulate, path))
            for path, parameter in self._parameters.items()
            if parameter.requires_grad
        ]

    def __call__(self, batch: Mapping[str, Tensor]) -> Tensor:
        """One optimizer step; the loss."""
        loss = self.gradients(batch)
        with torch.no_grad():
            self._step.program.update(self._step.state, self._step.learning_rate())
        self._step.state.step += 1
        return loss

    def gradients(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Forward and backward alone; the gradients are in the state."""
        state = self._step.state
        state.clear_gradients()
        (microbatch,) = self._step._prepared(batch)
        with torch.enable_grad():
            with self._saving():
                results = self._forward(microbatch)
            results[OBJECTIVE].backward()
        return results["lm_loss"].detach()

    def _forward(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        outer = self._found.captured.program.outer
        buffers = self._step.state.scope("")
        given = [
            batch.get(value.name)
            if value.kind == "input"
            else self._parameters.get(value.name, buffers.get(value.name))
            for value in outer.signature.inputs
        ]
        outputs = _Outer(outer.module, self._call).run(*given)
        results = {}
        for value, output in zip(self._results, outputs, strict=True):
            if value.kind == "buffer":
                buffers[value.name].copy_(output.detach())
            else:
                results[value.name] = output
        return results

    def _call(self, template: str, path: str, inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> Any:
        return self._layer(self._found.captured.templates[template].run, inputs, weights)

    def _accumulate(self, path: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._step.state.accumulate(path, parameter.grad)
        parameter.grad = None


class _Outer(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, call: Callable[..., Any]) -> None:
        super().__init__(module)
        self._region = call

    def run_node(self, n: fx.Node) -> Any:
        if n.target is _moec.region.default:
            args, _ = self.fetch_args_kwargs_from_env(n)
            return self._region(*args)
        return super().run_node(n)
