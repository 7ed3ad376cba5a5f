"""The same training step in plain PyTorch: autograd over the model, `clip_grad_norm_`, `torch.optim.AdamW`.

This is what a compiled step has to equal. It shares with it only the training view (what the loss is) and the split
into parameter groups (what is decayed); gradients, clipping, update and balancing are PyTorch's and the model's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from moec.compiler.plan import Plan
from moec.models.adapters import training_view
from moec.runtime import StepState, parameter_groups
from moec.runtime.state import scale_dtype, sum_dtype
from moec.runtime.step import IGNORED

Gradients = dict[str, Tensor | None]


class EagerStep:
    """Trains `model` in place. Parameters of half precision get float32 masters, as in a compiled step.

    parameters: trainable ones by path. masters: what the optimizer changes, the parameter itself in full precision.
    """

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self.model, self.plan = model, plan
        view = training_view(model, plan)
        # A view may know an even plainer forward: that of the model without anything swapped in.
        self._forward = getattr(view.module, "reference", view.module)
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.masters = {name: _master(parameter) for name, parameter in self.parameters.items()}
        self._optimizer = self._make_optimizer()

    def __call__(self, batch: Mapping[str, Tensor], lr: float) -> Tensor:
        """One optimizer step on a batch as `TrainStep` takes it; returns the loss."""
        losses, gradients = self.gradients(batch)
        self.update(gradients, lr)
        return losses["lm_loss"]

    def gradients(self, batch: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Gradients]:
        """The view's results summed over microbatches, and each parameter's gradient, summed in float32 and not yet
        clipped; None for a parameter that got none."""
        sums: Gradients = dict.fromkeys(self.parameters)
        losses: dict[str, Tensor] = {}
        for microbatch in microbatches(batch, scale_dtype(self.model.parameters())):
            results = self._forward(**microbatch)
            if results["objective"].requires_grad:
                results["objective"].backward()
            for name, value in results.items():
                losses[name] = losses[name] + value.detach() if name in losses else value.detach()
            for name, parameter in self.parameters.items():
                if parameter.grad is not None:
                    found, before = parameter.grad.to(sum_dtype(parameter.dtype)), sums[name]
                    sums[name] = found if before is None else before + found
                    parameter.grad = None
        return losses, sums

    @torch.no_grad()
    def update(self, gradients: Mapping[str, Tensor | None], lr: float) -> Tensor:
        """Clip, update and rebalance; returns the gradient norm before clipping."""
        for name, master in self.masters.items():
            gradient = gradients[name]
            master.grad = None if gradient is None else gradient.clone()
        norm = nn.utils.clip_grad_norm_(self.masters.values(), self.plan.optimizer.clip_norm or float("inf"))
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        for name, master in self.masters.items():
            master.grad = None
            if master is not self.parameters[name]:
                self.parameters[name].copy_(master)
        # K3 models balance their routers after each optimizer step.
        rebalance = getattr(self.model, "update_balance", None)
        if callable(rebalance):
            rebalance()
        return norm

    def _make_optimizer(self) -> torch.optim.AdamW:
        options = self.plan.optimizer
        decays = {"decay": options.weight_decay, "no_decay": 0.0}
        groups: list[dict[str, Any]] = [
            {"params": [self.masters[name] for name in members], "weight_decay": decays[kind]}
            for kind, members in parameter_groups(StepState.from_module(self.model)).items()
            if members
        ]
        return torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, eps=options.eps, foreach=False)


def microbatches(batch: Mapping[str, Tensor], dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """A step's batch, [A, B, T] or [B, T], as the training view takes it: [B, T], and `inverse_tokens` of `dtype`."""
    shaped = {name: value.unsqueeze(0) if value.dim() == 2 else value for name, value in batch.items()}
    labels = shaped["labels"]
    valid = int((labels[..., 1:] != IGNORED).sum())
    inverse = torch.tensor(1.0 / valid if valid else 0.0, dtype=dtype, device=labels.device)
    return [{name: v[i] for name, v in shaped.items()} | {"inverse_tokens": inverse} for i in range(len(labels))]


def _master(parameter: nn.Parameter) -> Tensor:
    if parameter.dtype == sum_dtype(parameter.dtype):
        return parameter
    return parameter.detach().to(sum_dtype(parameter.dtype)).requires_grad_()
