"""What has to hold before anything is traced: one device, a plan that fits the model, inputs of the plan's shapes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moec.compiler.errors import PlanError, UnsupportedModelError
from moec.compiler.plan import Plan
from moec.compiler.view import TrainingView
from moec.models.adapters import training_view
from moec.runtime.state import scale_dtype


def checked_view(model: nn.Module, plan: Plan) -> TrainingView:
    """The model as training sees it; PlanError, UnsupportedModelError where the plan asks for what it lacks."""
    view = training_view(model, plan)
    if plan.packing and view.packing_refusal:
        raise UnsupportedModelError(
            "the plan packs documents, but this model cannot keep them apart",
            where=view.packing_refusal,
            hint="set packing: false in the plan, and give one document per row",
        )
    if plan.image_tokens and view.images is None:
        raise PlanError(
            f"plan field image_tokens is {plan.image_tokens}",
            where="plan.image_tokens",
            why=f"{type(model).__name__} takes no image features",
            hint="set image_tokens: 0, or use a model with an image placeholder token",
        )
    if view.max_length is not None and plan.length > view.max_length:
        raise PlanError(
            f"plan field length is {plan.length}",
            where="plan.length",
            why=f"the model supports at most {view.max_length} positions",
        )
    if plan.dtype is not None:
        _check_dtype(model, plan)
    return view


def example_inputs(model: nn.Module, plan: Plan, images: tuple[int, int] | None = None) -> dict[str, Tensor]:
    """Tensors of the plan's shapes on the model's device; only their metadata is used.

    images: (placeholder token, width of a feature) of the model, for a plan with image tokens.
    """
    device = device_of(model)
    ids = torch.zeros(plan.batch, plan.length, dtype=torch.int64, device=device)
    inputs = {
        "input_ids": ids,
        "labels": ids,
        "inverse_tokens": torch.ones((), dtype=scale_dtype(model.parameters()), device=device),
    }
    inputs |= {"document_ids": ids} if plan.packing else {}
    if plan.image_tokens and images is not None:
        inputs["image_features"] = torch.zeros(plan.image_tokens, images[1], device=device)
    return inputs


def device_of(model: nn.Module) -> torch.device:
    """The device of all parameters; raises UnsupportedModelError when there are several."""
    found: dict[torch.device, str] = {}
    for path, parameter in model.named_parameters():
        if not parameter.is_meta:
            found.setdefault(parameter.device, path)
    if len(found) > 1:
        raise UnsupportedModelError(
            f"the model lies on several devices: {', '.join(f'{path} on {d}' for d, path in found.items())}",
            why="one process compiles for one device",
            hint="move the model to one device before compiling",
        )
    return next(iter(found), torch.device("cpu"))


def device_of_program(model: nn.Module, plan: Plan) -> torch.device:
    """The model's; on several ranks without its number, since all have the same text and each a device of its own."""
    device = device_of(model)
    return device if plan.mesh.world == 1 else torch.device(device.type)


def _check_dtype(model: nn.Module, plan: Plan) -> None:
    sizes: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    main = max(sizes, key=lambda dtype: sizes[dtype]) if sizes else None
    if main is not None and main != getattr(torch, str(plan.dtype)):
        raise PlanError(
            f"plan field dtype is {plan.dtype}, the model's parameters are {str(main).removeprefix('torch.')}",
            where="plan.dtype",
            hint=f"convert the model first (model.to(torch.{plan.dtype})), or leave dtype out",
        )
