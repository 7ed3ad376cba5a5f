"""The models and meshes of the tests on several ranks."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import nn

from moec.compiler.plan import MeshPlan, Plan
from moec.models.build import build

PRESETS = ("k3-tiny", "k3-dsa-tiny")
HUGGINGFACE = ("mixtral", "deepseek_v3", "gpt_oss", "qwen3_next", "glm_moe_dsa")
MESHES = ((2, 1), (2, 2), (3, 1), (3, 3), (4, 2), (4, 4), (8, 2), (8, 8))

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs the extra `transformers`"
)


def model_of(name: str, seed: int = 0) -> nn.Module:
    """A preset, or a tiny Hugging Face model, in training mode."""
    torch.manual_seed(seed)
    if name in PRESETS:
        return build(name).train()
    from moec.models.huggingface.adapter import from_config
    from moec.models.huggingface.tiny import tiny_config

    return from_config(tiny_config(name)).train()


def plan_of(fsdp: int, ep: int, *, length: int = 40, packing: bool = False, **mesh: object) -> Plan:
    """A plan of one row per rank, with the specs of all stages checked."""
    return Plan(batch=1, length=length, packing=packing, mesh=MeshPlan(fsdp=fsdp, ep=ep, **mesh), check=True)  # type: ignore[arg-type]
