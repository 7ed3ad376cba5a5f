"""Training views: how each kind of model is brought into the form that capture traces (`compiler/view.py`).

A table of (predicate, factory), tried in order; the last row takes any module.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from moec.compiler.errors import UnsupportedModelError
from moec.compiler.plan import Plan
from moec.compiler.view import TrainingView
from moec.models.k3.loss import valid_tokens
from moec.models.k3.model import K3Model
from moec.models.k3.numerics import widen

Predicate = Callable[[nn.Module], bool]
Factory = Callable[[nn.Module, Plan], TrainingView]


def training_view(model: nn.Module, plan: Plan) -> TrainingView:
    """The view of a model; raises UnsupportedModelError for one whose forward takes no input_ids and labels."""
    factory = next(factory for predicate, factory in ADAPTERS if predicate(model))
    return factory(model, plan)


class K3View(nn.Module):
    """View of a Kimi K3 model: it already takes and returns what a view needs."""

    def __init__(self, model: K3Model) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        inverse_tokens: Tensor,
        document_ids: Tensor | None = None,
        image_features: Tensor | None = None,
    ) -> dict[str, Tensor]:
        output = self.model(input_ids, labels, document_ids, image_features, inverse_tokens)
        losses = {"objective": output.loss, "lm_loss": output.lm_loss.detach()}
        if output.indexer_loss is not None:
            losses["indexer_loss"] = output.indexer_loss.detach()
        return losses


class GenericView(nn.Module):
    """View of any module whose forward(input_ids, labels) returns its mean loss over valid tokens.

    The loss is a scalar tensor, or an attribute or key `loss` of the result. Valid tokens are those whose shifted
    label is not -100. A microbatch without any gives 0, whatever the model makes of a mean over nothing.
    """

    def __init__(self, model: nn.Module, takes_documents: bool) -> None:
        super().__init__()
        self.model = model
        self.takes_documents = takes_documents

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        inverse_tokens: Tensor,
        document_ids: Tensor | None = None,
        image_features: Tensor | None = None,
    ) -> dict[str, Tensor]:
        count = valid_tokens(labels)
        # A mean over nothing is 0/0, and a NaN in an unused branch still poisons the gradients: such a microbatch gets
        # labels of its own, and its loss is then multiplied by its count of 0.
        given: dict[str, Tensor] = {"input_ids": input_ids, "labels": torch.where(count > 0, labels, input_ids)}
        if document_ids is not None and self.takes_documents:
            given["document_ids"] = document_ids
        if image_features is not None:
            given["image_features"] = image_features
        loss = widen(_loss_of(self.model(**given)))
        loss = loss * count * inverse_tokens
        return {"objective": loss, "lm_loss": loss.detach()}


def _loss_of(result: Any) -> Tensor:
    loss = result.get("loss") if isinstance(result, dict) else getattr(result, "loss", None)
    if isinstance(result, Tensor):
        loss = result
    if isinstance(loss, Tensor) and (loss.dim() or not loss.is_floating_point()):
        raise UnsupportedModelError(
            f"the model's loss is a {loss.dtype} tensor of shape {list(loss.shape)}",
            why="a training step needs the mean loss, one floating-point number",
            hint="return the mean over the valid tokens when labels are given, not logits or a loss per token",
        )
    if not isinstance(loss, Tensor):
        raise UnsupportedModelError(
            f"the model returned {type(result).__name__} without a loss",
            hint="return a scalar loss, or an object with `loss`, when labels are given",
        )
    return loss


def _k3_view(model: nn.Module, plan: Plan) -> TrainingView:
    assert isinstance(model, K3Model)
    routers = {path: router for path, router in model.routers().items() if router.balancing}
    balanced = tuple((f"{p}.correction_bias", f"{p}.histogram", router.top_k) for p, router in routers.items())
    config = model.config
    images = (config.image_token, config.hidden_size) if config.image_token else None
    return TrainingView(K3View(model), vocabulary=config.vocab_size, images=images, balanced=balanced)


def _is_huggingface(model: nn.Module) -> bool:
    if "transformers" not in sys.modules:  # then no module of it can exist, and importing it takes seconds
        return False
    from moec.models.huggingface.adapter import has_huggingface_view

    return has_huggingface_view(model)


def _huggingface_view(model: nn.Module, plan: Plan) -> TrainingView:
    from moec.models.huggingface.adapter import huggingface_view

    return huggingface_view(model, plan)


def _generic_view(model: nn.Module, plan: Plan) -> TrainingView:
    parameters = inspect.signature(model.forward).parameters
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    lacking = [name for name in ("input_ids", "labels") if name not in parameters and not open_ended]
    if lacking:
        raise UnsupportedModelError(
            f"{type(model).__name__}.forward takes no {' and no '.join(lacking)}",
            where=f"{type(model).__module__}.{type(model).__qualname__}.forward",
            why="a training step calls forward(input_ids=..., labels=...) and expects the mean loss",
            hint="wrap the model in a module whose forward does that",
        )
    takes_documents = "document_ids" in parameters
    refusal = "" if takes_documents else f"{type(model).__name__}.forward takes no document_ids"
    return TrainingView(GenericView(model, takes_documents), packing_refusal=refusal)


ADAPTERS: list[tuple[Predicate, Factory]] = [
    (lambda model: isinstance(model, K3Model), _k3_view),
    (_is_huggingface, _huggingface_view),
    (lambda model: True, _generic_view),
]
