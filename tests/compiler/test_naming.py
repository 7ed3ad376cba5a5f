"""Names of templates: distinct, valid, and saying what sets a template apart."""

from __future__ import annotations

import pytest
from torch import nn

from moec.compiler.graph import OUTER
from moec.compiler.naming import snake_case, template_names
from moec.compiler.regions import RegionCall


class Block(nn.Module):
    """A module whose children have the given class names."""

    def __init__(self, *children: str) -> None:
        super().__init__()
        for index, name in enumerate(children):
            self.add_module(f"child{index}", type(name, (nn.Module,), {})())


def names(*templates: tuple[str, Block]) -> list[str]:
    """Names of one template per (path, module)."""
    empty = ((), (), (), (), None, (), (), None, (), "")
    calls = [[RegionCall(path, *empty)] for path, _ in templates]
    return template_names([[body] for _, body in templates], calls)


def test_the_only_template_is_named_by_its_list_or_attribute() -> None:
    assert names(("model.layers.0", Block())) == ["layer"]
    assert names(("blocks.3", Block())) == ["block"]
    assert names(("layers.0.attention", Block())) == ["attention"]
    assert names(("layers.0.attention", Block()), ("layers.0.feed_forward", Block())) == ["attention", "feed_forward"]


def test_children_that_differ_give_the_name() -> None:
    found = names(("layers.0", Block("Norm", "DenseMLP")), ("layers.1", Block("Norm", "SparseMoE")))
    assert found == ["layer_dense_mlp", "layer_sparse_moe"]


def test_a_prefix_that_all_children_share_is_left_out() -> None:
    found = names(("layers.0", Block("QwenNorm", "QwenDense")), ("layers.1", Block("QwenNorm", "QwenSparse")))
    assert found == ["layer_dense", "layer_sparse"]


def test_templates_alike_in_their_children_are_numbered() -> None:
    assert names(("layers.0", Block("Norm")), ("layers.1", Block("Norm"))) == ["layer_1", "layer_2"]
    assert names(("layers.0", Block()), ("layers.1", Block())) == ["layer_1", "layer_2"]
    assert names(("layers.0", Block()), ("layers.1", Block("Norm"))) == ["layer", "layer_norm"]


@pytest.mark.parametrize(
    "templates",
    [
        [("layers.0", Block("Norm")), ("layers.1", Block("Norm")), ("layer_1", Block("Norm"))],
        [("0", Block()), ("1", Block())],
        [("my-block.0", Block()), ("a.my-block", Block())],
        [("models.0", Block()), ("models.1", Block())],
        [("models.0", Block())],
        [("layers.0", Block("A", "B", "C")), ("layers.1", Block("A", "B", "D")), ("layers.2", Block("E"))],
    ],
)
def test_names_are_distinct_identifiers(templates: list[tuple[str, Block]]) -> None:
    found = names(*templates)
    assert len(set(found)) == len(found)
    assert all(name.isidentifier() and name != OUTER for name in found)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("GatedMLP", "gated_mlp"),
        ("MLAttention", "ml_attention"),
        ("RMSNorm", "rms_norm"),
        ("KDA", "kda"),
        ("Layer2", "layer2"),
    ],
)
def test_snake_case(name: str, shown: str) -> None:
    assert snake_case(name) == shown
