"""Whole models: losses, packing, gradients, images, fakes, training."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode

from moec.compiler.errors import BatchError
from moec.models.build import build
from moec.models.k3.config import K3Config
from moec.models.k3.model import K3Model
from moec.models.presets import preset
from tests.models.k3_small import assert_close, documents, kimi_linear_small, random_model, small

KINDS = {
    "mla": small(),
    "dsa": small(full_attention="dsa"),
    "gqa": small(full_attention="gqa", heads=4, kv_heads=2),
    "kimi-linear": kimi_linear_small(),
}


@pytest.fixture(params=KINDS.values(), ids=KINDS.keys())
def config(request: pytest.FixtureRequest) -> K3Config:
    return request.param


def _gradients(model: K3Model) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_packed_equals_separate(config: K3Config) -> None:
    """Three documents in one row, and each alone: the same logits, losses and gradients."""
    lengths = (6, 9, 2)
    tokens = torch.randint(0, 39, (1, sum(lengths)), generator=torch.Generator().manual_seed(3))
    labels = tokens.clone()
    labels[0, [0, 6, 15]] = -100
    inverse = torch.tensor(1 / (sum(lengths) - 3), dtype=torch.float64)

    model = random_model(config)
    packed = model(tokens, labels, documents(*lengths), inverse_tokens=inverse)
    packed.loss.backward()
    wanted = _gradients(model)

    other = random_model(config)
    parts = [
        other(t, y, inverse_tokens=inverse)
        for t, y in zip(tokens.split(lengths, 1), labels.split(lengths, 1), strict=True)
    ]
    sum(part.loss for part in parts).backward()
    assert_close(packed.logits, torch.cat([part.logits for part in parts], 1))
    assert_close(packed.loss, sum(part.loss for part in parts))
    for name, gradient in _gradients(other).items():
        assert (gradient is None) == (wanted[name] is None), name
        if gradient is not None:
            assert_close(wanted[name], gradient, 1e-9)


def test_documents_matter(config: K3Config) -> None:
    tokens = torch.randint(0, 39, (1, 12), generator=torch.Generator().manual_seed(3))
    model = random_model(config)
    joined, apart = model(tokens).logits, model(tokens, document_ids=documents(5, 7)).logits
    assert_close(apart[:, :5], joined[:, :5])
    assert (apart[:, 5:] - joined[:, 5:]).norm() > 1e-3


def test_every_parameter_learns(config: K3Config) -> None:
    """Nonzero gradients everywhere but in layer 0's attention mix, which has nothing to mix."""
    model = random_model(config)
    tokens = torch.randint(0, 40, (4, 24), generator=torch.Generator().manual_seed(0))
    model(tokens, tokens).loss.backward()
    silent = {name for name, grad in _gradients(model).items() if grad is None or grad.norm() == 0}
    assert all(grad is None or bool(torch.isfinite(grad).all()) for grad in _gradients(model).values())
    assert silent == (
        {"layers.0.attention_mix.norm", "layers.0.attention_mix.proj"} if config.residual_block else set()
    )


def test_loss_is_the_mean_over_valid_tokens() -> None:
    model = random_model(small())
    tokens = torch.randint(0, 40, (2, 8))
    labels = tokens.clone()
    labels[0, 3:6] = -100
    output = model(tokens, labels)
    losses = [
        F.cross_entropy(output.logits[b, t], labels[b, t + 1])
        for b in range(2)
        for t in range(7)
        if labels[b, t + 1] != -100
    ]
    assert_close(output.loss, torch.stack(losses).mean())
    assert output.indexer_loss is None


def test_no_valid_token_gives_zero(config: K3Config) -> None:
    model = random_model(config)
    output = model(torch.zeros(1, 6, dtype=torch.int64), torch.full((1, 6), -100))
    output.loss.backward()
    assert output.loss.item() == 0
    assert all(grad is None or grad.norm() == 0 for grad in _gradients(model).values())


def test_indexer_loss_averages_over_tokens_and_layers() -> None:
    model = random_model(small(full_attention="dsa"))
    tokens = torch.randint(0, 40, (2, 9))
    labels = tokens.clone()
    labels[1, 5:] = -100
    divergences: list[Tensor] = []
    for layer in (2, 4):
        mixer: Any = model.layers[layer].attention.mixer
        mixer.register_forward_hook(lambda module, args, result: divergences.append(result[1]))
    output = model(tokens, labels)
    valid = F.pad(labels, (0, 1), value=-100)[:, 1:] != -100
    assert_close(output.indexer_loss, torch.stack([d[valid].mean() for d in divergences]).mean())
    assert_close(output.loss, output.lm_loss + output.indexer_loss)
    assert output.indexer_loss > 0


def test_image_features_take_the_places_of_placeholders() -> None:
    model = random_model(small())
    tokens = torch.randint(0, 39, (2, 8))
    features = torch.randn(3, 24, dtype=torch.float64, requires_grad=True)
    tokens[0, 2], tokens[0, 3], tokens[1, 5] = 39, 39, 39
    output = model(tokens, tokens, image_features=features)

    embeddings = model.embed(tokens).detach()
    embeddings[0, 2:4], embeddings[1, 5] = features.detach()[:2], features.detach()[2]
    hook = model.embed.register_forward_hook(lambda module, args, result: embeddings)
    wanted = model(tokens, tokens)
    hook.remove()
    assert_close(output.logits, wanted.logits)

    output.loss.backward()
    assert features.grad is not None
    assert features.grad.norm(dim=1).min() > 0
    assert model.embed.weight.grad is not None
    assert model.embed.weight.grad[39].norm() == 0


def test_wrong_number_of_image_features() -> None:
    model = random_model(small())
    tokens = torch.tensor([[39, 1, 39]])
    with pytest.raises(BatchError, match="1 image features for 2 placeholder tokens"):
        model(tokens, image_features=torch.randn(1, 24, dtype=torch.float64))
    with pytest.raises(BatchError, match="0 image features for 2"):
        model(tokens, image_features=torch.randn(0, 24, dtype=torch.float64))


def test_builds_and_runs_on_fakes() -> None:
    config = dataclasses.replace(preset("k3-dsa"), layers=5, full_attention_layers=(4, 5))
    with FakeTensorMode():
        model = build(config, dtype=torch.bfloat16)
        output = model(torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 4, dtype=torch.int64))
    assert output.logits.shape == (1, 4, 163840)
    assert output.loss is not None
    assert output.loss.dtype == torch.float32


def test_initialisation() -> None:
    torch.manual_seed(0)
    model = build("k3-tiny")
    state = model.state_dict()
    for name, tensor in state.items():
        if name.endswith("_conv.weight"):
            assert tensor.abs().max() <= 0.5, name
        elif name.endswith(("_mix.proj", "correction_bias")):
            assert tensor.abs().max() == 0, name
        elif tensor.dim() >= 2:
            assert 0.05 < tensor.std() < 0.07, name
        elif "norm" in name:
            assert torch.equal(tensor, torch.ones_like(tensor)), name


@pytest.mark.parametrize("name", ["k3-tiny", "k3-dsa-tiny"])
def test_tiny_models_train(name: str) -> None:
    torch.manual_seed(0)
    model = build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
    text = torch.tensor(list(b"def forward(self, hidden): return self.mlp(self.norm(hidden))\n" * 3))
    before = {path: router.correction_bias.clone() for path, router in model.routers().items()}
    losses = []
    for step in range(12):
        tokens = torch.stack([text[start : start + 64] for start in range(step, step + 4)])
        output = model(tokens, labels=tokens)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.update_balance()
        losses.append(output.lm_loss.item())
    assert losses[0] > 5
    assert losses[-1] < 3
    assert all((router.correction_bias != before[path]).any() for path, router in model.routers().items())


def test_balancing_can_be_turned_off() -> None:
    model = random_model(small())
    model.set_balancing(False)
    before = {path: router.correction_bias.clone() for path, router in model.routers().items()}
    model(torch.randint(0, 40, (1, 8)))
    model.update_balance()
    assert all(torch.equal(router.correction_bias, before[path]) for path, router in model.routers().items())
