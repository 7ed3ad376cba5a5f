from __future__ import annotations

import pytest
import torch

from moec.compiler import dialect
from moec.compiler.dialect import DEFINITIONS, define, lookup
from moec.compiler.dialect._define import define_op
from tests.dialect.contract import rand

# Ops of the namespace that belong to capture, not to the dialect.
# Calls of layer templates, and implementations that lowering puts in an op's place.
STRUCTURAL = {"region", "region_backward", "held"} | {
    f"{op}_triton{backward}" for op in ("kda", "kda_with_state") for backward in ("", "_backward")
}


def test_every_registered_op_is_in_the_table() -> None:
    registered = {
        name.removeprefix("moec::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("moec::")
    }
    described = set(DEFINITIONS) | {f"{name}_backward" for name, entry in DEFINITIONS.items() if entry.backward}
    assert {name.split(".")[0] for name in registered} - STRUCTURAL == described


@pytest.mark.parametrize("name", sorted(DEFINITIONS))
def test_entry_is_complete(name: str) -> None:
    definition = DEFINITIONS[name]
    assert callable(getattr(dialect, name))
    assert getattr(dialect, name).__doc__
    assert definition.summary
    arguments = {argument.name for argument in definition.op._schema.arguments}
    results = {result.name for result in definition.op._schema.returns}
    assert set(definition.shapes) <= arguments | results
    assert set(definition.only_for) <= arguments
    assert lookup(definition.op) is definition
    if definition.backward is None:
        assert definition.backward_flops == "0"
    else:
        assert lookup(definition.backward) is definition
        assert definition.backward_flops != "0"
    assert not definition.op._schema.is_mutable


def test_nothing_else_is_looked_up() -> None:
    assert lookup(torch.ops.aten.mm.default) is None
    assert lookup("rms_norm") is None


def test_double_definition_raises() -> None:
    with pytest.raises(ValueError, match="moec::rms_norm is defined twice"):
        define(DEFINITIONS["rms_norm"])


def test_sizes_that_disagree_raise() -> None:
    definition = DEFINITIONS["rms_norm"]
    with pytest.raises(ValueError, match="moec::rms_norm: weight has D=3"):
        definition.flops_of((rand(2, 4), rand(3), 1e-5), {})
    with pytest.raises(ValueError, match="moec::short_conv: x has shape"):
        DEFINITIONS["short_conv"].flops_of((rand(2, 4), rand(4, 2), None, "silu"), {})


def test_costs_count_leading_dimensions_lists_and_defaults() -> None:
    assert DEFINITIONS["l2_norm"].flops_of((rand(2, 3, 4), 1e-6), {}) == 3 * 24
    one, three = (
        DEFINITIONS["depth_mix"].flops_of(([rand(5, 4)] * count, rand(4), rand(4), 1e-5), {}) for count in (1, 3)
    )
    assert three == 3 * one
    args = (rand(1, 8, 1, 2), rand(1, 8, 1, 2), rand(1, 8, 1, 2), rand(1, 8, 1, 2), rand(1, 8, 1), None, None, 1.0)
    definition = DEFINITIONS["delta_rule"]
    assert definition.flops_of(args, {}) == definition.flops_of((*args, 64), {}) > 0


def test_backward_schema_must_name_forward_values() -> None:
    with pytest.raises(ValueError, match="grad_z: neither an argument, a result nor a gradient"):
        define_op(
            "misnamed",
            "(Tensor x) -> (Tensor y)",
            lambda x: x + 1,
            lambda x: torch.empty_like(x),
            shapes={"x": "..."},
            flops="N",
            backward_schema="(Tensor grad_z, Tensor x) -> (Tensor grad_x)",
            backward=lambda grad, x: grad + 0,
            backward_fake=lambda grad, x: torch.empty_like(x),
        )
    assert "misnamed" not in DEFINITIONS
