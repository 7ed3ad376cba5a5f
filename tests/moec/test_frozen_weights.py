"""Frozen weights cost nothing in backward: no arithmetic for their gradients, and nothing kept for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import fx, nn

import moec
from moec.codegen.program import Section
from moec.compilation import Compilation
from moec.compiler.cost import graph_cost
from moec.driver import build

from ..spine import PLAN, assert_equal_gradients, batch_for, small_k3

_OPS = torch.ops.moec
Frozen = Callable[[str], bool]


def expert(name: str) -> bool:
    return ".experts." in name


def vector(name: str) -> bool:
    """Norms, convolutions, and what else is small."""
    return any(part in name for part in ("norm", "conv", "A_log", "dt_bias", "mix"))


def all_but_one(name: str) -> bool:
    """As an adapter trains: one matrix of each attention, everything else is the frozen base."""
    return not name.endswith("attention.mixer.o_proj.weight")


def frozen(which: Frozen) -> nn.Module:
    model = small_k3()
    names = [name for name, _ in model.named_parameters() if which(name)]
    assert names
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model


def compiled(which: Frozen) -> Compilation:
    return build(frozen(which), PLAN)


def sections(found: Compilation) -> Mapping[str, Section]:
    return {section.template.name: section for section in found.sections}


def flops(graph: fx.Graph, target: Any = None) -> float:
    """Arithmetic of a graph, or of the calls of one op in it."""
    if target is None:
        return graph_cost(graph).flops
    calls = fx.Graph()
    for node in graph.find_nodes(op="call_function", target=target):
        inputs = {source: calls.placeholder(source.name) for source in node.all_input_nodes}
        for source, copy in inputs.items():
            copy.meta = dict(source.meta)
        calls.node_copy(node, inputs.__getitem__)
    return graph_cost(calls).flops


@pytest.fixture(scope="module")
def trained() -> Compilation:
    return build(small_k3(), PLAN)


def test_frozen_experts_have_half_the_products_in_backward_and_keep_no_rows(trained: Compilation) -> None:
    found = compiled(expert)
    (before,) = (s for name, s in sections(trained).items() if name.startswith("feed_forward"))
    (after,) = (s for name, s in sections(found).items() if name.startswith("feed_forward"))
    product = _OPS.grouped_linear_backward.default
    assert flops(after.parts.backward, product) == flops(before.parts.backward, product) / 2 > 0
    operands = {node.args[1].name for node in before.parts.joint.graph.find_nodes(op="call_function", target=product)}
    saved, still_saved = ({node.name for node in section.parts.saved} for section in (before, after))
    assert operands <= saved, "the rows that come in, and those between the two products"
    assert not operands & still_saved
    assert after.parts.saved_bytes < before.parts.saved_bytes
    assert found.program is not None
    assert found.program.text.count("needed=[True, False, True]") == 2


@pytest.mark.parametrize("which", [expert, vector, all_but_one])
def test_a_partly_frozen_model_has_eagers_gradients(which: Frozen) -> None:
    model = frozen(which)
    step, batch = moec.compile(model, PLAN), batch_for(PLAN)
    model(batch["input_ids"], batch["labels"]).loss.backward()
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    assert_equal_gradients(step.gradients(batch), wanted)
    assert "needed=[" in step.source


def test_frozen_vectors_are_summed_nowhere(trained: Compilation) -> None:
    found = compiled(vector)
    for op in (_OPS.rms_norm_backward.default, _OPS.kda_backward.default):
        for name, section in sections(found).items():
            calls = section.parts.backward.find_nodes(op="call_function", target=op)
            assert all(isinstance(node.args[-1], list) and not all(node.args[-1]) for node in calls), name
    grads = {name for s in found.sections for name in s.template.weight_names if vector(name)}
    assert grads
    assert not any(f'"{name}": d_' in found.program.text for name in grads)  # type: ignore[union-attr]


def test_a_frozen_base_leaves_only_what_leads_to_the_trained_matrices(trained: Compilation) -> None:
    """Gradients of values have to pass; those of weights are a third of the products of training everything."""
    found = compiled(all_but_one)
    ratio = sum(flops(s.parts.backward) for s in found.sections) / sum(
        flops(s.parts.backward) for s in trained.sections
    )
    assert ratio < 0.7
    weights = {
        value.name
        for section in found.sections
        for index in section.parts.joint.grads
        if (value := section.parts.joint.unit.signature.inputs[index]).kind == "weight"
    }
    assert weights == {"mixer.o_proj.weight"}
