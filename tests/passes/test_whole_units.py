"""Whole layers of our family and of transformers: all passes in order, one op per stage, and the same numbers."""

from __future__ import annotations

import copy
from collections import Counter
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from moec.compiler.capture import capture
from moec.compiler.graph import Unit
from moec.compiler.pass_manager import Report
from moec.compiler.plan import Plan
from moec.models.adapters import training_view
from moec.models.build import build
from moec.models.k3.layer import Layer
from moec.models.k3.model import K3Model
from tests.passes.support import ONE_RANK

from .support import apply, compare, counts, graph_text, run_unit, unit_of

IDS = torch.tensor([[0] * 5 + [1] * 7, [0] * 12])
ROUTED = {"route": 1, "permute": 1, "grouped_linear": 2, "gated_mlp_act": 2, "unpermute": 1, "rms_norm": 2}


@cache
def _model(preset: str) -> K3Model:
    torch.manual_seed(0)
    model = build(preset)
    model.set_balancing(False)
    return model


def _layer(preset: str, mixer: str) -> Layer:
    model = _model(preset)
    index = next(i for i in range(1, model.config.layers) if model.config.mixer(i) == mixer)
    return model.layers[index]  # type: ignore[return-value]


def _hidden(width: int) -> Tensor:
    return torch.randn(2, 12, width, generator=torch.Generator().manual_seed(1))


def _passed(module: nn.Module, *args: Tensor) -> tuple[Unit, list[Report]]:
    unit = unit_of(module, *args)
    wanted = run_unit(unit, module, args)
    reports = apply(ONE_RANK, unit)
    compare(run_unit(unit, module, args), wanted, bound=1e-5)
    return unit, reports


@pytest.mark.parametrize(
    ("preset", "mixer", "expected"),
    [
        ("k3-tiny", "kda", {"kda": 1, "rms_norm": 1}),
        ("k3-tiny", "mla", {"attention": 1, "sigmoid_gate": 1, "rms_norm": 3}),
    ],
)
def test_attention_sublayers(preset: str, mixer: str, expected: dict[str, int]) -> None:
    layer = _layer(preset, mixer).attention
    unit, reports = _passed(layer, _hidden(_model(preset).config.hidden_size), IDS)
    assert counts(unit) == expected
    assert not [miss for report in reports for miss in report.near_misses]


def test_sparse_attention_sublayer() -> None:
    layer = _layer("k3-dsa-tiny", "dsa").attention
    valid = torch.ones(2, 12, dtype=torch.bool)
    unit, reports = _passed(layer, _hidden(_model("k3-dsa-tiny").config.hidden_size), IDS, valid)
    assert counts(unit) == {"index_topk": 1, "sparse_attention": 1, "indexer_loss": 1, "sigmoid_gate": 1, "rms_norm": 3}
    assert not [miss for report in reports for miss in report.near_misses]


def test_expert_sublayer() -> None:
    unit, reports = _passed(_layer("k3-tiny", "kda").feed_forward, _hidden(_model("k3-tiny").config.hidden_size))
    assert counts(unit) == ROUTED
    assert not [miss for report in reports for miss in report.near_misses]


def test_routing_counts_do_not_disturb_the_route() -> None:
    layer = copy.deepcopy(_layer("k3-tiny", "kda").feed_forward)
    layer.mlp.router.balancing = True
    unit = unit_of(layer, _hidden(_model("k3-tiny").config.hidden_size))
    apply(ONE_RANK, unit)
    assert counts(unit) == ROUTED | {"route_histogram": 1}


class Ends(nn.Module):
    """What a model does outside of its layers: mixes over depth, final norm, head and loss."""

    def __init__(self, model: K3Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, a: Tensor, b: Tensor, c: Tensor, labels: Tensor) -> Tensor:
        from moec.models.k3.loss import next_token_labels, summed_cross_entropy

        mix = self.model.output_mix
        assert mix is not None
        logits = self.model.lm_head(self.model.norm(mix([a, b, c])))
        return summed_cross_entropy(logits, next_token_labels(labels))


def test_mix_norm_head_and_loss() -> None:
    model, width = _model("k3-tiny"), _model("k3-tiny").config.hidden_size
    ends = Ends(model)
    args = (*_hidden(width).tensor_split(1), _hidden(width) * 2, _hidden(width) - 1, torch.randint(0, 300, (2, 12)))
    unit = unit_of(ends, *args)
    apply(ONE_RANK, unit)
    assert counts(unit) == {"depth_mix": 1, "rms_norm": 1, "linear_cross_entropy_sum": 1}


def test_the_same_graph_gives_the_same_text() -> None:
    layer = _layer("k3-tiny", "kda").attention
    args = (_hidden(_model("k3-tiny").config.hidden_size), IDS)
    texts = []
    for _ in range(2):
        unit = unit_of(layer, *args)
        apply(ONE_RANK, unit)
        texts.append(graph_text(unit))
    assert texts[0] == texts[1]
    apply(ONE_RANK, unit)
    assert graph_text(unit) == texts[0], "the passes are not idempotent"


# transformers, traced as it is: no adapter, as graphs come through torch.compile

HUGGING_FACE: dict[str, dict[str, int]] = {
    "mixtral": {"attention": 2, "route": 2, "permute": 2, "grouped_linear": 4, "unpermute": 2, "gated_mlp_act": 2},
    "deepseek_v3": {"attention": 3, "route": 2, "permute": 2, "grouped_linear": 4, "unpermute": 2, "gated_mlp_act": 5},
    "gpt_oss": {"attention": 2, "route": 2, "permute": 2, "grouped_linear": 4, "unpermute": 2, "gated_mlp_act": 2},
    "glm_moe_dsa": {"attention": 0},
}


class Whole(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, labels=input_ids, position_ids=position_ids, use_cache=False).loss


def _transformers(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    from moec.models.huggingface.tiny import TINY

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **TINY[name])
    return Whole(transformers.AutoModelForCausalLM.from_config(config).train())


@pytest.mark.parametrize("name", sorted(HUGGING_FACE))
def test_transformers_models(name: str) -> None:
    module = _transformers(name)
    ids = torch.randint(0, 512, (2, 10), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(10).expand(2, 10).clone()
    unit, reports = _passed(module, ids, positions)
    found = Counter(counts(unit))
    assert found["linear_cross_entropy_sum"] == 1
    assert {op: found[op] for op in HUGGING_FACE[name]} == HUGGING_FACE[name]
    assert found["rms_norm"] >= 5
    reasons = [miss.reason for report in reports for miss in report.near_misses if miss.what == "attention"]
    assert bool(reasons) == (name == "glm_moe_dsa")


def test_packed_positions_become_documents() -> None:
    """transformers separates documents by position ids that restart; the op must too."""
    module = _transformers("mixtral")
    ids = torch.randint(0, 512, (1, 10), generator=torch.Generator().manual_seed(0))
    _, reports = _passed(module, ids, torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]]))
    texts = [match.what for report in reports for match in report.matches if match.what.startswith("attention")]
    assert texts == ["attention of 4 heads to 2: causal, by document"] * 2


# transformers through its adapter, layer by layer, as `moec.compile` captures it

LAYERS: dict[str, dict[str, dict[str, int]]] = {
    "qwen3_next": {
        "layer_gated_delta_net": {"kda": 1, "rms_norm": 2, "route": 1},
        "layer_attention": {"attention": 1, "sigmoid_gate": 1, "rms_norm": 4, "route": 1},
    },
    "kimi_linear": {
        "layer_delta_attention_mlp": {"kda": 1, "rms_norm": 2, "gated_mlp_act": 1},
        "layer_attention_moe": {"attention": 1, "rms_norm": 4, "route": 1, "permute": 1},
    },
}


@pytest.mark.parametrize("name", sorted(LAYERS))
def test_linear_attention_of_transformers(name: str) -> None:
    plan = Plan(batch=2, length=12, packing=True)
    model = _transformers(name).model
    ids = torch.zeros(2, 12, dtype=torch.int64)
    inputs = {"input_ids": ids, "labels": ids, "inverse_tokens": torch.ones(()), "document_ids": ids}
    units = capture(training_view(model, plan), plan, inputs).program.units  # type: ignore[arg-type]
    found = {}
    for unit in units.values():
        apply(ONE_RANK, unit)
        found[unit.name] = counts(unit)
    for unit_name, expected in LAYERS[name].items():
        (match,) = [name for name in found if name.startswith(unit_name)]
        assert {op: found[match].get(op, 0) for op in expected} == expected
    assert found["model"]["linear_cross_entropy_sum"] == 1
