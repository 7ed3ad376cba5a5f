"""Costs of graphs: FLOPs and bytes against counts made by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moec.compiler import dialect
from moec.compiler.cost import HOST_BYTES, NETWORK_BYTES, Cost, graph_cost, node_bytes, node_flops
from moec.compiler.differentiate import differentiate
from moec.compiler.graph import Unit
from moec.compiler.hardware import Hardware, Link, hardware
from moec.compiler.plan import MeshPlan
from moec.compiler.wire import Collective

from .units import unit_of

FLOAT = 4
sdpa = F.scaled_dot_product_attention


class Call(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(*args)


def flops(function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> float:
    return graph_cost(unit_of(Call(function), *[torch.randn(shape) for shape in shapes]).graph).flops


@pytest.mark.parametrize(
    ("function", "shapes", "wanted"),
    [
        (torch.mm, [(3, 4), (4, 5)], 2 * 3 * 4 * 5),
        (torch.matmul, [(2, 3, 4), (4, 5)], 2 * 2 * 3 * 4 * 5),
        (torch.bmm, [(2, 3, 4), (2, 4, 5)], 2 * 2 * 3 * 4 * 5),
        (F.linear, [(2, 3, 4), (5, 4)], 2 * 2 * 3 * 4 * 5),
        (torch.addmm, [(5,), (3, 4), (4, 5)], 2 * 3 * 4 * 5),
        (lambda q, k, v: sdpa(q, k, v), [(2, 3, 6, 4), (2, 3, 6, 4), (2, 3, 6, 5)], 2 * 2 * 3 * 6 * 6 * (4 + 5)),
        (lambda q, k: sdpa(q, k, k, is_causal=True), [(2, 3, 6, 4), (2, 3, 6, 4)], 2 * 3 * 6 * 6 * (4 + 4)),
        (lambda x, w: F.conv1d(x, w, padding=2, groups=8)[..., :6], [(2, 8, 6), (8, 1, 3)], 2 * 2 * 8 * 6 * 3),
        (torch.exp, [(3, 4)], 12),
        (torch.add, [(3, 4), (4,)], 12),
        (lambda x: x.t()[1:].reshape(2, -1), [(4, 3)], 0),
        (lambda x, w: dialect.rms_norm(x, w, 1e-6), [(3, 4), (4,)], 4 * 3 * 4),
    ],
)
def test_flops(function: Callable[..., Tensor], shapes: list[tuple[int, ...]], wanted: int) -> None:
    assert flops(function, *shapes) == wanted


def attention_unit() -> Unit:
    q, k, v = (torch.randn(2, 6, heads, 4, requires_grad=True) for heads in (4, 2, 2))
    return unit_of(Call(lambda q, k, v: dialect.attention(q, k, v, scale=0.5)[0]), q, k, v)


def test_dialect_ops_cost_what_their_definition_says_in_both_directions() -> None:
    joint = differentiate(attention_unit())
    costs = {str(node.target): node_flops(node) for node in joint.graph.nodes if "attention" in str(node.target)}
    definition = dialect.registry.DEFINITIONS["attention"]
    q, k, v = (torch.empty(2, 6, heads, 4) for heads in (4, 2, 2))
    given = {"q": q, "k": k, "v": v, "scale": 0.5, "window": 0, "causal": True}
    assert costs["moec.attention.default"] == float(definition.flops_of((), given)) > 0
    assert costs["moec.attention_backward.default"] == float(definition.backward_flops_of((), given))


def test_bytes_are_what_each_op_reads_and_writes() -> None:
    unit = unit_of(Call(lambda x, y: (x + y).t()), torch.randn(3, 4), torch.randn(4))
    add, transpose = (node for node in unit.graph.nodes if node.op == "call_function")
    assert node_bytes(add) == FLOAT * (12 + 4 + 12)
    assert node_bytes(transpose) == 0
    cost = graph_cost(unit.graph)
    assert (cost.flops, cost.hbm_bytes, cost.launches) == (12.0, FLOAT * 28, 1)
    assert (cost.host_bytes, cost.network_bytes) == (0, 0)


def test_a_look_up_reads_only_the_rows_it_takes() -> None:
    unit = unit_of(Call(lambda ids, table: F.embedding(ids, table)), torch.randint(9, (5,)), torch.randn(1000, 4))
    cost = graph_cost(unit.graph)
    assert (cost.flops, cost.hbm_bytes) == (0, 2 * 5 * 4 * FLOAT)


DEVICE = Hardware("test", {"float32": 1e9, "bfloat16": 4e9}, 1e9, 1e6, 1e6, 1e5, 1e-4)


@pytest.mark.parametrize(
    ("dtype", "rows", "wanted"),
    [
        (torch.float32, 100, 2 * 100**3 / 1e9),  # arithmetic takes longest
        (torch.bfloat16, 100, 2 * 100**3 / 4e9),
        (torch.float32, 1, 1e-4),  # the host needs longer to launch it
    ],
)
def test_time_is_that_of_the_slowest_part(dtype: torch.dtype, rows: int, wanted: float) -> None:
    unit = unit_of(Call(torch.mm), torch.randn(rows, rows).to(dtype), torch.randn(rows, rows).to(dtype))
    assert graph_cost(unit.graph, DEVICE).seconds == pytest.approx(wanted)


def test_pointwise_time_is_that_of_memory_and_ops_follow_each_other() -> None:
    unit = unit_of(Call(lambda x: x.exp().sin()), torch.randn(1000, 1000))
    cost = graph_cost(unit.graph, DEVICE)
    assert cost.seconds == pytest.approx(2 * (2 * 4e6) / 1e9)
    assert cost.launches == 2


def test_bytes_over_links_come_from_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    exp, sin = torch.ops.aten.exp.default, torch.ops.aten.sin.default
    monkeypatch.setitem(NETWORK_BYTES, exp, lambda node: 5e5)
    monkeypatch.setitem(HOST_BYTES, sin, lambda node: 2e6)
    cost = graph_cost(unit_of(Call(lambda x: x.exp().sin().cos()), torch.randn(4)).graph, DEVICE)
    assert (cost.network_bytes, cost.host_bytes) == (5e5, 2e6)
    assert cost.seconds == pytest.approx(5e5 / 1e5 + 2e6 / 1e6, rel=1e-3)


def test_costs_add_and_repeat() -> None:
    one = Cost(1.0, 2.0, 3.0, 4.0, 5.0, 6)
    assert one + one * 2 == Cost(3.0, 6.0, 9.0, 12.0, 15.0, 18)


def test_the_default_device_is_an_h200() -> None:
    h200 = hardware()
    assert h200.name == "H200"
    assert (h200.flops_of(torch.bfloat16), h200.hbm_bytes) == (690e12, 4.2e12)
    assert (h200.host_bytes, h200.host_bytes_both) == (55e9, 45.6e9)
    assert h200.flops_of(torch.int8) == h200.flops_of(torch.float32) < h200.flops_of(torch.float16)


def test_symbolic_sizes_count_by_their_hint_and_add_no_guard() -> None:
    def pool(x: Tensor, w: Tensor) -> Tensor:
        return dialect.rms_norm(F.linear(x, w), w[0], 1e-6).exp()

    args = torch.randn(6, 4), torch.randn(4, 4)
    dynamic = unit_of(Call(pool), *args, dynamic_shapes=(({0: torch.export.Dim("n")}, None),))
    environment = dynamic.graph.find_nodes(op="placeholder")[0].meta["val"].fake_mode.shape_env
    guards = len(environment.guards)
    assert graph_cost(dynamic.graph) == graph_cost(unit_of(Call(pool), *args).graph)
    assert len(environment.guards) == guards


def test_a_collective_takes_the_line_of_its_kind_within_a_host_and_the_network_beyond() -> None:
    device = dataclasses.replace(DEVICE, host_devices=8, links={"all_gather": Link(1e-3, 1e6)})
    gather = Collective("all_gather", "gather", "uint8", 1000, 1)
    assert gather.seconds(MeshPlan(fsdp=2), device) == pytest.approx(1e-3 + 1e-3)
    assert gather.seconds(MeshPlan(fsdp=8), device) == pytest.approx(1e-3 + 7e-3)
    assert gather.seconds(MeshPlan(fsdp=16), device) == pytest.approx(15e3 / DEVICE.network_bytes)
    experts = dataclasses.replace(gather, role="expert_gather")
    assert experts.seconds(MeshPlan(fsdp=16, ep=8), device) == pytest.approx(1e3 / DEVICE.network_bytes)
    reduction = dataclasses.replace(gather, kind="reduce_scatter")
    assert reduction.seconds(MeshPlan(fsdp=2), device) == pytest.approx(1e3 / DEVICE.network_bytes)


def test_the_links_of_an_h200_are_known() -> None:
    links = hardware().links
    assert set(links) == {"all_gather", "reduce_scatter", "all_reduce", "all_to_all"}
    assert all(2e11 < link.bytes_per_second < 4.5e11 and 0 < link.latency < 1e-3 for link in links.values())
    assert hardware().host_devices == 8
