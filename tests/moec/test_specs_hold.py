"""All specs hold at every stage of whole models: their graphs after every pass, and the emitted text."""

from __future__ import annotations

import pytest
import torch

from moec.compiler.plan import Plan
from moec.driver import build
from moec.models.build import build as model
from tests.spine import recomputed

PLANS = {
    "packed": Plan(batch=2, length=32, packing=True, cache=recomputed("layers.*.attention"), check=True),
    "any length": Plan(batch=2, length=32, dynamic="length", min_length=16, check=True),
}
TRANSFORMERS = ["mixtral", "deepseek_v3", "gpt_oss", "qwen3_next", "kimi_linear", "glm_moe_dsa"]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["k3-tiny", "k3-dsa-tiny"])
def test_our_models(name: str, plan: str) -> None:
    build(model(name, device="meta").train(), PLANS[plan])


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers_models(name: str) -> None:
    pytest.importorskip("transformers")
    from moec.models.huggingface.adapter import from_config
    from moec.models.huggingface.tiny import tiny_config

    torch.manual_seed(0)
    build(from_config(tiny_config(name)).train(), Plan(batch=2, length=16, check=True))
