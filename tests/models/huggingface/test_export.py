"""Under `prepare` each model exports into one graph that runs equal and does not grow with the length."""

from __future__ import annotations

import sys
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from moec.compiler.capture import capture
from moec.compiler.graph import op_histogram
from moec.compiler.plan import Plan
from moec.models.huggingface import linear_attention
from tests.models.huggingface.support import KINDS, Case, batch, build, differences, gradients

# Two layers that still hold every layer kind.
SHORT: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"num_hidden_layers": 2},
    "qwen3_next": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "kimi_linear": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "glm_moe_dsa": {
        "num_hidden_layers": 2,
        "mlp_layer_types": ["dense", "sparse"],
        "indexer_types": ["full", "shared"],
    },
}


def short(kind: str, **changes: Any) -> Case:
    return build(kind, **SHORT.get(kind, {}), **changes)


def export(case: Case, values: dict[str, torch.Tensor], *, dynamic: bool = False) -> ExportedProgram:
    length = Dim("length", min=2, max=256)
    shapes = {name: {1: length} if value.dim() == 2 else None for name, value in values.items()}
    with case.view.prepare():
        return torch.export.export(
            case.view.module, (), dict(values), dynamic_shapes=shapes if dynamic else None, strict=False
        )


@pytest.mark.parametrize("kind", KINDS)
def test_one_graph_for_all_lengths(kind: str) -> None:
    """Lengths 3 to 130 with documents; for glm_moe_dsa that is below and above its top-8."""
    case = short(kind)
    module = export(case, batch(2, 16, lengths=(9, 7)), dynamic=True).module()
    for length in (3, 8, 9, 65, 130):
        values = batch(2, length, lengths=(length - 2, 2))
        expected = {name: value.detach() for name, value in case.eager(**values).items()}
        result = {name: value.detach() for name, value in module(**values).items()}
        assert differences(result, expected, 1e-6) == [], length


@pytest.mark.parametrize("kind", KINDS)
def test_static_graph_and_its_gradients(kind: str) -> None:
    case, values = short(kind), batch(2, 16)
    exported = export(case, values)
    assert not [node for node in exported.graph.nodes if "wrap_with" in str(node.target)]
    module = exported.module()
    losses, grads = gradients(module, module, values)
    expected, expected_grads = gradients(case.model, case.eager, values)
    assert differences(losses, expected, 1e-6) == []
    by_path = {name.removeprefix("model."): grad for name, grad in grads.items()}
    wanted = {name: by_path[name] for name in expected_grads}
    assert differences(wanted, expected_grads, 1e-5) == []


@pytest.mark.parametrize("kind", ["qwen3_next", "kimi_linear"])
def test_graph_does_not_grow_with_length(kind: str) -> None:
    case = short(kind)
    lengths = [len(export(case, batch(1, length)).graph.nodes) for length in (64, 200)]
    assert lengths[0] == lengths[1] < 450


def test_without_the_swap_the_graph_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The count above would see an unrolled loop."""
    monkeypatch.setattr(linear_attention, "REPLACEMENTS", {})
    case = build("qwen3_next", num_hidden_layers=1, layer_types=["linear_attention"])
    assert len(export(case, batch(1, 16)).graph.nodes) < len(export(case, batch(1, 80)).graph.nodes)


def test_ops_of_the_graph() -> None:
    """Every stage that moec has an op for is that op, and nothing of what it replaces is left."""
    found = op_histogram(export(short("qwen3_next"), batch(2, 16)).graph)
    counts = {name.removeprefix("moec.").removesuffix(".default"): count for name, count in found.items()}
    expected = {"permute": 2, "grouped_linear": 4, "unpermute": 2, "attention": 1, "delta_rule": 1, "short_conv": 1}
    assert {name: counts.get(name) for name in expected} == expected
    assert not [name for name in found if any(word in name for word in ("grouped_mm", "scaled_dot", "conv1d"))]


@pytest.mark.parametrize("kind", ["mixtral", "glm_moe_dsa"])
def test_layers_are_regions(kind: str) -> None:
    """Each layer is captured alone; the router logits of the aux loss are results of it."""
    case = build(kind, output_router_logits=True)
    values = batch(2, 16, lengths=(9, 7))
    captured = capture(case.view, Plan(batch=2, length=16), values)
    assert captured.near_misses == []
    instances = sorted(path for unit in captured.program.templates() for path in unit.instances)
    assert instances == [f"model.layers.{index}" for index in range(case.model.config.num_hidden_layers)]
    results = {len(unit.signature.outputs) for unit in captured.program.templates()}
    if kind == "mixtral":
        assert captured.results == ("objective", "lm_loss", "aux_loss")
        assert results == {2}
    else:
        # This family has no aux loss whatever the config says; a layer returns its hidden states and the selection.
        assert captured.results == ("objective", "lm_loss")
        assert results == {2}


def test_prepare_restores_everything() -> None:
    """After prepare() each attribute, hook and global is the object it was, and the model runs bit-equal."""
    case = build("qwen3_next", output_router_logits=True)
    values = batch(2, 16)

    def run() -> torch.Tensor:
        return case.model(input_ids=values["input_ids"], labels=values["labels"]).loss  # type: ignore[no-any-return]

    loss = run()
    before = _state(case.model)
    with case.view.prepare():
        assert _state(case.model) != before
        case.prepared(**values)
    assert _state(case.model) == before
    assert torch.equal(run(), loss)


def test_a_failing_trace_restores_too() -> None:
    case = build("glm_moe_dsa")
    before = _state(case.model)
    with pytest.raises(RuntimeError, match="planted"), case.view.prepare():
        raise RuntimeError("planted")
    assert _state(case.model) == before


def _state(model: nn.Module) -> dict[int, Any]:
    """Attributes and hooks of all modules, fields of all configs, globals of all modeling files."""
    tables: dict[int, Any] = {}
    for module in model.modules():
        tables[id(module)] = {name: value for name, value in vars(module).items() if name[0] != "_"}
        tables[id(module._forward_hooks)] = dict(module._forward_hooks)
        tables[id(vars(module))] = hasattr(module, "_loss_function")
        for table in (vars(getattr(module, "config", model.config)), vars(sys.modules[type(module).__module__])):
            tables[id(table)] = {name: value for name, value in table.items() if name[:2] != "__"}
    return tables
