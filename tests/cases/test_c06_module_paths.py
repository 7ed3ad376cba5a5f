"""C06: nodes know their modules in forward and backward, and a rule that names no module is an error, not silence."""

from __future__ import annotations

from typing import Any

import pytest
from torch import fx, nn

from moec.compilation import Compilation
from moec.compiler import differentiate
from moec.compiler.errors import PlanError
from moec.compiler.graph import module_path
from moec.compiler.plan import Plan
from moec.driver import build

from ..spine import WIDTH, Language, Layer, recomputed, seeded, small_k3

_STACKS = ("nn_module_stack", "fwd_nn_module_stack")
_FREE = ("view", "reshape", "t.default", "transpose", "permute", "expand", "squeeze", "slice", "getitem", "detach")


class Inner(nn.Sequential):
    """A layer whose every op is some child's."""

    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def with_path(graphs: list[fx.Graph]) -> float:
    """Share of the nodes that compute something and know their module: a child's path, or the layer itself."""
    nodes = [n for graph in graphs for n in graph.nodes if n.op == "call_function" and not _is_free(n)]
    known = [node for node in nodes if module_path(node) or any(node.meta.get(key) for key in _STACKS)]
    return len(known) / len(nodes)


def _is_free(node: fx.Node) -> bool:
    return any(part in str(node.target) for part in _FREE)


def shares(found: Compilation) -> tuple[float, float]:
    parts = [section.parts for section in found.sections]
    return with_path([part.forward for part in parts]), with_path([part.backward for part in parts])


def k3_model() -> Any:
    return small_k3(full_attention="dsa")


@pytest.mark.parametrize("make", [lambda: seeded(Language, Inner(), Inner()), k3_model], ids=["sequential", "k3"])
def test_c06_forward_and_backward_nodes_carry_their_module(make: Any) -> None:
    forward, backward = shares(build(make(), Plan(batch=2, length=6)))
    assert forward == 1.0
    assert backward >= 0.95


def test_c06_every_op_of_a_child_carries_its_path() -> None:
    found = build(seeded(Language, Inner(), Inner()), Plan(batch=2, length=6))
    graph = found.sections[0].parts.forward
    assert [module_path(n) for n in graph.nodes if n.op == "call_function" and not _is_free(n)] == ["0", "1", "2", "3"]


def test_c06_lost_paths_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The measure falls when the trace forgets where its nodes come from."""

    def forget(graph: fx.Graph) -> None:
        for node in graph.nodes:
            node.meta = {key: value for key, value in node.meta.items() if key not in _STACKS} | {
                "custom": {"path": ""}
            }

    monkeypatch.setattr(differentiate, "_carry_paths", forget)
    assert shares(build(seeded(Language, Inner(), Inner()), Plan(batch=2, length=6))) == (0.0, 0.0)


def test_c06_the_outer_graph_names_embedding_layers_and_head() -> None:
    found = build(seeded(Language, Inner(), Inner()), Plan(batch=2, length=6))
    assert found.outer is not None
    for graph in (found.outer.forward, found.outer.backward):
        assert {"embed", "layers.0", "layers.1", "head"} <= {module_path(node) for node in graph.nodes}


@pytest.mark.parametrize(
    ("pattern", "nearest"),
    [("layer.1", "layers.1"), ("layers.*.mlp", "layers."), ("Layers.0", "layers.0"), ("nothing", "layers.0")],
)
def test_c06_a_rule_that_matches_no_module_lists_the_nearest(pattern: str, nearest: str) -> None:
    with pytest.raises(PlanError) as caught:
        build(seeded(Language, Layer(), Layer()), Plan(batch=2, length=6, cache=recomputed(pattern)))
    assert f"the rule to recompute {pattern!r} covers no value" in caught.value.what
    assert nearest in caught.value.hint
    assert caught.value.where == "plan.cache.policy"
