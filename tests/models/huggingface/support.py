"""Tiny models, batches and comparisons for the tests of the Hugging Face adapter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moec.compiler.plan import Plan
from moec.compiler.view import TrainingView
from moec.models.huggingface.adapter import from_config, huggingface_view
from moec.models.huggingface.tiny import TINY, tiny_config

KINDS = list(TINY)
Losses = Callable[..., dict[str, Tensor]]


@dataclass
class Case:
    """A tiny model with its view."""

    model: Any
    view: TrainingView

    @property
    def prepared(self) -> Losses:
        """The view: swapped implementations."""
        return self.view.module

    @property
    def eager(self) -> Losses:
        """The model's own forward, documents one by one."""
        return self.view.module.reference  # type: ignore[no-any-return, return-value, union-attr]


def build(kind: str, plan: Plan | None = None, *, seed: int = 0, **changes: Any) -> Case:
    """A tiny model whose norms and biases are away from their initial ones and zeros, and its view.

    For a kind that has no tiny config `changes` are the whole config.
    """
    torch.manual_seed(seed)
    model = from_config(tiny_config(kind, **changes) if kind in TINY else {"model_type": kind, **changes})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or (name.endswith(("bias", "sinks")) and "dt_bias" not in name):
                parameter.add_(torch.randn_like(parameter) * 0.1)
            if name.endswith("A_log"):
                # States that last for many tokens, so that what must not pass between documents would be seen.
                parameter.uniform_(-3.0, 0.0)
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                buffer.copy_(torch.randn_like(buffer) * 0.1)
    return Case(model, huggingface_view(model, plan or Plan(batch=2, length=16)))


def batch(rows: int, length: int, *, lengths: tuple[int, ...] = (), seed: int = 1) -> dict[str, Tensor]:
    """A seeded batch with three ignored labels per row; `lengths` packs documents of these lengths into every row."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(3, 512, (rows, length), generator=generator)
    labels = input_ids.clone()
    labels[:, 2:5] = -100
    values = {"input_ids": input_ids, "labels": labels}
    if lengths:
        document_ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).expand(rows, length)
        values["document_ids"] = document_ids.contiguous()
        labels[:, 1:][document_ids[:, 1:] != document_ids[:, :-1]] = -100
    values["inverse_tokens"] = 1.0 / (labels[:, 1:] != -100).sum().clamp(min=1).float()
    return values


def gradients(model: nn.Module, losses: Losses, values: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(losses, gradient of the objective by parameter name, None where there is none)."""
    model.zero_grad(set_to_none=True)
    result = losses(**values)
    result["objective"].backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return {name: value.detach() for name, value in result.items()}, found


def differences(one: dict[str, Any], other: dict[str, Any], bound: float) -> list[str]:
    """Names whose tensors differ by more than `bound` in norm; zeros and None have to agree exactly."""
    assert one.keys() == other.keys()
    wrong = []
    for name, reference in other.items():
        value = one[name]
        if reference is None or value is None:
            same = reference is value
        elif float(reference.detach().norm()) == 0.0:
            same = float(value.detach().norm()) == 0.0
        else:
            same = float((value - reference).detach().norm() / reference.detach().norm()) <= bound
        if not same:
            wrong.append(name)
    return wrong


def assert_equal(case: Case, values: dict[str, Tensor]) -> None:
    """Losses within 1e-6 and all gradients within 1e-5 (relative, per tensor) of the model's own eager run."""
    losses, grads = gradients(case.model, case.prepared, values)
    expected, expected_grads = gradients(case.model, case.eager, values)
    assert differences(losses, expected, 1e-6) == []
    assert differences(grads, expected_grads, 1e-5) == []
    assert any(grad is not None and float(grad.norm()) > 0 for grad in grads.values())
