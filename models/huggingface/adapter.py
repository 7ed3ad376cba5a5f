"""Hugging Face models: recognise them, build them from a config, and wrap them for capture."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moec.compiler.errors import UnsupportedModelError
from moec.compiler.plan import Plan
from moec.compiler.view import TrainingView
from moec.models.huggingface.lora import causal_model, check_adapters


def is_huggingface(model: nn.Module) -> bool:
    """True for models of the transformers library, which is not imported for the question."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def has_huggingface_view(model: nn.Module) -> bool:
    """True for models of the transformers library, also where peft has wrapped one."""
    check_adapters(model)
    return is_huggingface(causal_model(model))


def huggingface_view(model: nn.Module, plan: Plan) -> TrainingView:
    """The training view of a transformers causal LM; raises UnsupportedModelError naming what cannot be trained.

    While `prepare` is active experts, attention, delta rules and short convolutions are dialect ops; the model is as
    it was after it. `view.module.reference` runs the model's own forward for comparison.
    """
    from moec.models.huggingface import checks
    from moec.models.huggingface.packing import packing_refusal
    from moec.models.huggingface.view import HuggingFaceView

    causal = causal_model(model)
    checks.check_model(causal)
    module = HuggingFaceView(model, plan)
    checks.mention(causal, plan, module.notes)
    return TrainingView(
        module=module,
        prefix="model.",
        prepare=module.prepare,
        notes=module.notes,
        packing_refusal=packing_refusal(causal),
        vocabulary=getattr(causal.config, "vocab_size", None),
    )


def from_config(
    source: str | Path | Mapping[str, Any], dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> nn.Module:
    """A causal LM with random weights, in training mode, from a config.json, its folder, or its values.

    dtype: None takes the config's. device: "meta" makes no weights.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise UnsupportedModelError(
            "this config needs the transformers library",
            why=str(error),
            hint="pip install 'moec[transformers]'",
        ) from error
    values = dict(source) if isinstance(source, Mapping) else _read(Path(source))
    kind = values.pop("model_type", None)
    if kind is None:
        raise UnsupportedModelError("the config has no model_type", where=str(source), hint="give a config.json")
    try:
        config = AutoConfig.for_model(kind, **values)
    except ValueError as error:
        raise UnsupportedModelError(
            f"transformers does not know model_type {kind!r}", where="model_type", why=str(error).splitlines()[0]
        ) from error
    with torch.device(device or "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype or config.dtype or torch.float32)
    return model.train()  # type: ignore[no-any-return]


def _read(path: Path) -> dict[str, Any]:
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise UnsupportedModelError(f"no config at {path}", hint="give the path of a config.json")
    return dict(json.loads(path.read_text()))
