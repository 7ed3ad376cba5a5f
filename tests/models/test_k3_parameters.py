"""Parameter arithmetic of the published models, to the last digit, on the meta device."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from moec.models.build import build
from moec.models.k3.checkpoint import to_huggingface
from moec.models.k3.config import K3Config
from moec.models.k3.counts import Counts, count_parameters
from moec.models.k3.model import K3Model
from moec.models.k3.moe import Experts
from moec.models.k3.residual import DepthMix
from moec.models.presets import preset, preset_names
from tests.models.k3_small import SMALL, kimi_linear_small, small

VISION = 401_214_464 + 46_144_512
EXPERT = 3 * 3584 * 3072


@pytest.fixture(scope="module")
def k3() -> K3Model:
    return build("k3", dtype=torch.bfloat16, device="meta")


def counted(model: K3Model) -> Counts:
    """What a model holds, by its own tensors."""
    tensors = [*model.parameters(), *(router.correction_bias for router in model.routers().values())]
    total = sum(tensor.numel() for tensor in tensors)
    routed = sum(p.numel() for module in model.modules() if isinstance(module, Experts) for p in module.parameters())
    unused = routed // model.config.experts * (model.config.experts - model.config.top_k)
    return Counts(total, total - unused, total - unused - model.embed.weight.numel())


def test_k3_totals(k3: K3Model) -> None:
    counts = count_parameters(k3.config)
    assert counts == counted(k3)
    assert counts.total == 2_779_484_476_000
    assert counts.total + VISION == 2_779_931_834_976
    assert counts.active == 105_364_017_760
    assert counts.active_in_layers == 104_189_612_640


def test_kimi_linear_total() -> None:
    assert count_parameters(preset("kimi-linear-48b")).total == 49_122_681_728


@pytest.mark.parametrize("name", preset_names())
def test_what_a_configuration_says_is_what_its_model_holds(name: str) -> None:
    """With fewer layers: at least one of each kind."""
    full = preset(name).full_attention_layers[:2]
    config = dataclasses.replace(preset(name), layers=full[-1], full_attention_layers=full)
    assert count_parameters(config) == counted(build(config, device="meta"))


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        kimi_linear_small(),
        small(full_attention="gqa", kv_heads=3),
        small(full_attention="dsa"),
        small(full_attention="dsa", q_rank=0, attention_gate=False),
        small(shared_size=0, dense_layers=0),
        small(dense_layers=4, balancing=False, residual_block=0),
    ],
)
def test_every_choice_is_counted(config: K3Config) -> None:
    assert count_parameters(config) == counted(build(config, device="meta"))


@pytest.mark.parametrize(
    ("module", "count"),
    [
        ("layers.0.attention.mixer", 443_740_384),
        ("layers.92.attention.mixer", 232_196_096),
        ("layers.0.feed_forward.mlp", 726_663_168),
        ("layers.1.feed_forward.mlp.experts", 896 * EXPERT),
    ],
)
def test_k3_parts(k3: K3Model, module: str, count: int) -> None:
    assert sum(parameter.numel() for parameter in k3.get_submodule(module).parameters()) == count


def test_k3_layer_kinds(k3: K3Model) -> None:
    kinds = [type(layer.attention.mixer).__name__ for layer in k3.layers]
    assert kinds.count("KDA") == 69
    assert [i for i, kind in enumerate(kinds) if kind == "MLA"] == [*range(3, 92, 4), 92]


@pytest.mark.slow
def test_checkpoint_bytes(k3: K3Model) -> None:
    """Experts in MXFP4 (half a byte and one scale per 32), the rest as published, vision in bf16."""
    experts = others = 0
    for name, tensor in to_huggingface(k3.state_dict(), k3.config):
        if ".experts." in name:
            experts += tensor.numel()
        else:
            others += tensor.numel() * tensor.element_size()
    assert experts == 2_722_740_830_208
    assert others + experts * 17 // 32 + 2 * VISION == 1_560_860_324_864


def test_sources_per_site(k3: K3Model) -> None:
    """Attention site l >= 1 mixes ceil(l / 12) + 1 sources, MLP site l // 12 + 2, the output site 9."""
    seen: dict[str, int] = {}
    hooks = [
        module.register_forward_pre_hook(lambda _, args, name=name: seen.update({name: len(args[0])}))
        for name, module in k3.named_modules()
        if isinstance(module, DepthMix)
    ]
    k3(torch.zeros(1, 4, dtype=torch.int64, device="meta"))
    for hook in hooks:
        hook.remove()
    wanted = {f"layers.{layer}.attention_mix": -(-layer // 12) + 1 for layer in range(1, 93)}
    wanted |= {f"layers.{layer}.feed_forward_mix": layer // 12 + 2 for layer in range(93)}
    assert seen == wanted | {"output_mix": 9}
    assert sum(seen.values()) == 492 + 501 + 9


def test_precise_parameters_stay_float32(k3: K3Model) -> None:
    precise = {name.split(".", 2)[2] for name, tensor in k3.state_dict().items() if tensor.dtype == torch.float32}
    kda = [f"{name}_conv.weight" for name in "qkv"] + ["decay.A_log", "decay.dt_bias", "output_norm.weight"]
    assert precise == {f"attention.mixer.{name}" for name in kda} | {"feed_forward.mlp.router.correction_bias"}


def test_tiny_presets_are_tiny() -> None:
    for name in ("k3-tiny", "k3-dsa-tiny"):
        assert count_parameters(preset(name)).total < 1_500_000
        assert preset(name).vocab_size > 256
