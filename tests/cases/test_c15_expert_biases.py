"""C15: the bias of an expert's last product is weighted by the router, and added once for each token and expert."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from torch import Tensor

import moec
from moec.compiler.plan import Plan

from ..models.huggingface.support import batch, build
from ..spine import assert_like_eager_step
from .planting import Op, plant

PLAN = Plan(batch=2, length=8, check=True)


def biased(top_k: int) -> Any:
    """gpt_oss with biases far from 0."""
    kinds = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    model = build("gpt_oss", PLAN, num_experts_per_tok=top_k, **kinds).model
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.experts.gate_up_proj_bias.normal_(0.0, 2.0)
            layer.mlp.experts.down_proj_bias.normal_(3.0, 2.0)
    return model


def assert_biases_are_weighted(step: moec.CompiledStep, model: Any) -> None:
    values = batch(PLAN.batch, PLAN.length)
    found = assert_like_eager_step(step, model, {name: values[name] for name in ("input_ids", "labels")})
    for name in ("gate_up_proj_bias", "down_proj_bias"):
        assert found[f"model.layers.0.mlp.experts.{name}"].any()


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_c15_the_step_is_eagers(top_k: int) -> None:
    model = biased(top_k)
    assert_biases_are_weighted(moec.compile(model, PLAN), model)


def test_c15_a_bias_that_is_added_k_times_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products are weighted, and the biases of a token's experts are added as they are."""
    model = biased(2)
    step = moec.compile(model, PLAN)
    biases: list[Tensor] = []

    def noting(grouped_linear: Op) -> Op:
        def run(x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor, **options: Any) -> Any:
            counts = offsets.diff(prepend=offsets.new_zeros(1))
            biases.append(bias.detach().repeat_interleave(counts, 0))
            return grouped_linear(x, weight, offsets, bias, **options)

        return run

    def unweighted(unpermute: Op) -> Op:
        def run(rows: Tensor, order: Tensor, weights: Tensor) -> Any:
            bias = biases[-1]
            return unpermute(rows - bias, order, weights) + unpermute(bias, order, torch.ones_like(weights))

        return run

    plant(monkeypatch, step, grouped_linear=noting, unpermute=unweighted)
    with pytest.raises(AssertionError):
        assert_biases_are_weighted(step, model)


def test_c15_a_bias_gradient_without_weights_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right in forward; in backward each of a token's k experts gets the whole gradient for its bias."""
    model = biased(2)
    step = moec.compile(model, PLAN)
    whole: list[Tensor] = []

    def noting(unpermute_backward: Op) -> Op:
        def run(grad: Tensor, rows: Tensor, order: Tensor, weights: Tensor) -> Any:
            whole[:] = [grad.index_select(0, order.div(weights.shape[1], rounding_mode="floor"))]
            return unpermute_backward(grad, rows, order, weights)

        return run

    def unweighted(grouped_linear_backward: Op) -> Op:
        def run(grad: Tensor, *args: Any, **options: Any) -> Any:
            d_x, d_weight, d_bias = grouped_linear_backward(grad, *args, **options)
            if whole:  # the last product, whose backward comes first
                _, _, d_bias = grouped_linear_backward(whole.pop(), *args, **options)
            return d_x, d_weight, d_bias

        return run

    plant(monkeypatch, step, unpermute_backward=noting, grouped_linear_backward=unweighted)
    with pytest.raises(AssertionError, match="down_proj_bias"):
        assert_biases_are_weighted(step, model)
