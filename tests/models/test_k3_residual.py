"""Attention residuals: the mix formula, and which sources each sublayer sees."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from moec.models.k3.model import K3Model
from moec.models.k3.residual import DepthMix
from tests.models.k3_small import SMALL, assert_close, assert_same_gradients, random_model, random_module, small


def mix_reference(mix: DepthMix, sources: list[Tensor]) -> Tensor:
    query = mix.norm * mix.proj
    logits = [(v @ query) / torch.sqrt((v * v).mean(-1) + mix.eps) for v in sources]
    largest = torch.stack(logits).max(0).values
    weights = [torch.exp(logit - largest) for logit in logits]
    total = sum(weights)
    return sum((w / total).unsqueeze(-1) * v for w, v in zip(weights, sources, strict=True))


def test_mix_equals_formula() -> None:
    mix = random_module(DepthMix(24, 1e-5))
    sources = [torch.randn(2, 5, 24, dtype=torch.float64, requires_grad=True) for _ in range(4)]
    got, wanted = mix(sources), mix_reference(mix, sources)
    assert_close(got, wanted)
    assert_same_gradients(got, wanted, [*sources, *mix.parameters()])


def test_fresh_mix_is_the_mean() -> None:
    sources = [torch.randn(2, 3, 24) for _ in range(3)]
    torch.testing.assert_close(DepthMix(24, 1e-5)(sources), sum(sources) / 3)


def forward_by_hand(model: K3Model, input_ids: Tensor) -> Tensor:
    """The model's control flow as the report writes it, on the model's own sublayers."""
    blocks: list[Tensor] = []
    prefix: Tensor | None = model.embed(input_ids)
    for index, layer in enumerate(model.layers):
        h = mix_reference(layer.attention_mix, [*blocks, prefix]) if blocks else prefix
        if index % model.config.residual_block == 0:
            blocks.append(prefix)
            prefix = None
        a = layer.attention.mixer(layer.attention.norm(h))
        prefix = a if prefix is None else prefix + a
        h = mix_reference(layer.feed_forward_mix, [*blocks, prefix])
        prefix = prefix + layer.feed_forward.mlp(layer.feed_forward.norm(h))
    return model.lm_head(model.norm(mix_reference(model.output_mix, [*blocks, prefix])))


def test_model_follows_the_published_order() -> None:
    for block in (1, 2, 3, 9):
        model = random_model(small(residual_block=block))
        input_ids = torch.randint(0, 40, (2, 7))
        assert_close(model(input_ids).logits, forward_by_hand(model, input_ids))


def _sources(block: int) -> list[int]:
    model = random_model(dataclasses.replace(SMALL, residual_block=block))
    seen: list[int] = []
    for module in model.modules():
        if isinstance(module, DepthMix):
            module.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    model(torch.zeros(1, 3, dtype=torch.int64))
    return seen


def test_block_sizes() -> None:
    """One block: the embedding and the running sum everywhere. Block 1: one source per finished layer."""
    assert _sources(99) == [2] * 10
    assert _sources(1) == [2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    assert _sources(2) == [2, 2, 2, 2, 3, 3, 3, 3, 4, 4]


def test_ordinary_residual() -> None:
    model = random_model(small(residual_block=0))
    input_ids = torch.randint(0, 40, (1, 6))
    hidden = model.embed(input_ids)
    for layer in model.layers:
        hidden = hidden + layer.attention(hidden, None)
        hidden = hidden + layer.feed_forward(hidden)
    assert_close(model(input_ids).logits, model.lm_head(model.norm(hidden)))
    assert not any("_mix." in name for name in model.state_dict())
