"""shard_experts: layers with their experts on several ranks equal the same layers on one; what is refused, and why."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moec.compiler import dialect
from moec.compiler.differentiate import differentiate
from moec.compiler.errors import PlanError, UnsupportedModelError
from moec.compiler.graph import OUTER, Unit, op_histogram
from moec.compiler.partition import RECOMPUTE, every, partition
from moec.compiler.pass_manager import PassContext, Report
from moec.compiler.plan import MeshPlan, Plan
from moec.models.build import build
from moec.models.huggingface.tiny import TINY
from moec.passes.normalize import Normalize
from moec.passes.shard_experts import ShardExperts

from ..compiler.units import unit_of
from ..models.huggingface.support import build as build_huggingface
from .rank_units import Given, Values, assert_same, check_layer, given_for, joined, run_spread, run_whole, units_of
from .support import apply, assert_golden, graph_text, reasons, what

TOKENS, WIDTH, SIZE = 24, 6, 10
MESHES = [(1, 1), (2, 1), (2, 2), (3, 3), (4, 2), (4, 4), (8, 2), (8, 8)]


class Experts(nn.Module):
    """Router, experts with biases, and a weighted sum; x [N, WIDTH] -> [N, WIDTH]."""

    def __init__(self, experts: int = 8, top_k: int = 2, *, transposed: bool = False) -> None:
        super().__init__()
        self.experts, self.top_k, self.transposed = experts, top_k, transposed
        self.router = nn.Linear(WIDTH, experts)
        self.register_buffer("preference", torch.zeros(experts))
        first, last = ((WIDTH, 2 * SIZE), (SIZE, WIDTH)) if transposed else ((2 * SIZE, WIDTH), (WIDTH, SIZE))
        self.gate_up = nn.Parameter(torch.randn(experts, *first))
        self.gate_up_bias = nn.Parameter(torch.randn(experts, 2 * SIZE))
        self.down = nn.Parameter(torch.randn(experts, *last))
        self.down_bias = nn.Parameter(torch.randn(experts, WIDTH) * 3)

    def forward(self, x: Tensor) -> Tensor:
        weights, indices = self.route(x)
        rows, order, offsets = dialect.permute(x, indices, experts=self.experts)
        return dialect.unpermute(self.transform(rows, offsets), order, weights)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return dialect.route(self.router(x), self.preference, top_k=self.top_k, score="softmax", renormalize=False)

    def transform(self, rows: Tensor, offsets: Tensor) -> Tensor:
        rows = dialect.grouped_linear(rows, self.gate_up, offsets, self.gate_up_bias, transposed=self.transposed)
        gate, up = rows.chunk(2, -1)
        rows = F.silu(gate) * up
        return dialect.grouped_linear(rows, self.down, offsets, self.down_bias, transposed=self.transposed)


def mesh_of(fsdp: int, ep: int, **options: Any) -> MeshPlan:
    return MeshPlan(fsdp=fsdp, ep=ep, **options)


def layer_of(module: nn.Module, tokens: int = TOKENS) -> Unit:
    return unit_of(module, torch.zeros(tokens, WIDTH, requires_grad=True))


def sharded(module: nn.Module, mesh: MeshPlan, tokens: int) -> tuple[Unit, Report]:
    unit = layer_of(module, tokens)
    apply([Normalize()], unit)
    report = ShardExperts().run(unit, PassContext(plan=Plan(mesh=mesh))) if mesh.ep > 1 else Report()
    unit.graph.eliminate_dead_code()
    unit.graph.lint()
    unit.module.recompile()
    return unit, report


def compare(
    module: nn.Module,
    mesh: MeshPlan,
    change: Callable[[Given], None] = lambda given: None,
    **options: Any,
) -> tuple[list[Values], Given]:
    """The module on the mesh and on one rank: the same."""
    torch.manual_seed(0)
    whole = layer_of(module)
    given = given_for(whole, module, TOKENS)
    change(given)
    unit, report = sharded(module, mesh, TOKENS // mesh.world)
    assert what(report) or mesh.ep == 1, reasons(report)
    ranks = run_spread(unit, mesh, given, **options)
    assert_same(joined(unit, mesh, given, ranks), run_whole(whole, given))
    return ranks, given


def routed_to(*experts: int) -> Callable[[Given], None]:
    """All tokens go to these experts."""

    def change(given: Given) -> None:
        given.values["preference"][list(experts)] += 50.0

    return change


# the same numbers on any mesh


@pytest.mark.parametrize(("fsdp", "ep"), MESHES)
@pytest.mark.parametrize("transposed", [False, True])
def test_results_and_gradients_of_one_rank(fsdp: int, ep: int, transposed: bool) -> None:
    """C13: expert and dense gradients on every mesh are those of the joined batch."""
    compare(Experts(transposed=transposed), mesh_of(fsdp, ep))


@pytest.mark.parametrize(("experts", "ep"), [(6, 4), (5, 3), (3, 2), (2, 2)])
def test_experts_that_do_not_divide(experts: int, ep: int) -> None:
    compare(Experts(experts), mesh_of(ep, ep))


@pytest.mark.parametrize("experts", [(0, 1), (6, 7), (0, 7)])
@pytest.mark.parametrize(("fsdp", "ep"), [(2, 2), (4, 2), (8, 8)])
def test_ranks_whose_experts_get_nothing(experts: tuple[int, int], fsdp: int, ep: int) -> None:
    """C11: their experts' gradients are zeros of full shape."""
    ranks, _ = compare(Experts(), mesh_of(fsdp, ep), routed_to(*experts))
    local = 8 // ep
    for rank, values in enumerate(ranks):
        held = range(rank % ep * local, (rank % ep + 1) * local)
        assert values.grads["down"].any() == any(expert in held for expert in experts)
        assert values.grads["down"].shape == (local, WIDTH, SIZE)


@pytest.mark.parametrize("experts", range(8))
def test_all_rows_to_one_expert(experts: int) -> None:
    compare(Experts(top_k=1), mesh_of(4, 4), routed_to(experts))


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_without_valid_tokens(rank: int) -> None:
    """C11: one rank's part of the batch is padding, and gets no gradient."""

    def silence(given: Given) -> None:
        given.tangents[0].chunk(3)[rank].zero_()

    ranks, _ = compare(Experts(), mesh_of(3, 3), silence)
    assert not ranks[rank].grads["x"].any()
    assert all(values.grads["down"].any() for values in ranks)


def test_one_layer_serves_every_routing() -> None:
    """C18: a hot expert, balance, another hot expert: one graph, no rebuild."""
    module, mesh = Experts(top_k=1), mesh_of(4, 4)
    whole = layer_of(module)
    unit, _ = sharded(module, mesh, TOKENS // 4)
    parts = partition(differentiate(unit))
    for hot in ((3,), (), (6,)):
        given = given_for(whole, module, TOKENS)
        routed_to(*hot)(given)
        assert_same(joined(unit, mesh, given, run_spread(unit, mesh, given, parts)), run_whole(whole, given))


@pytest.mark.parametrize(("fsdp", "ep"), [(2, 2), (3, 3), (4, 2)])
def test_recomputation_exchanges_once_in_each_direction(fsdp: int, ep: int) -> None:
    compare(Experts(), mesh_of(fsdp, ep), recompute=True)
    unit, _ = sharded(Experts(), mesh_of(fsdp, ep), TOKENS // fsdp)
    parts = partition(differentiate(unit), every(RECOMPUTE))
    for graph in (parts.forward, parts.backward):
        found = op_histogram(graph)
        assert found["moec.exchange.default"] == found["moec.exchange_back.default"] == 1
    assert "moec.exchange_counts.default" not in op_histogram(parts.backward)
    assert "moec.route.default" not in op_histogram(parts.backward)


KINDS = ["k3-tiny", "k3-dsa-tiny", *TINY]
QUICK_KINDS = {"k3-tiny", "mixtral", "gpt_oss"}
KIND_MESHES = [(2, 2), (4, 2), (3, 3), (4, 4), (8, 8), (2, 2), (3, 3), (2, 2)]


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        pytest.param(kind, mesh, marks=() if kind in QUICK_KINDS else pytest.mark.slow)
        for kind, mesh in zip(KINDS, KIND_MESHES, strict=True)
    ],
)
def test_layers_of_known_models(kind: str, mesh: tuple[int, int]) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        model: nn.Module = build_huggingface(kind).model if kind in TINY else build(kind)
        return model

    assert check_layer(make, mesh_of(*mesh))


# capacity


@pytest.mark.parametrize(("fsdp", "ep"), [(2, 2), (3, 3), (4, 2), (8, 8)])
def test_enough_capacity_changes_nothing(fsdp: int, ep: int) -> None:
    compare(Experts(), mesh_of(fsdp, ep, capacity=8.0))
    compare(Experts(), mesh_of(fsdp, ep, capacity=8.0), routed_to(0, 5))


class Dropping(Experts):
    """One rank that does what several with a capacity do: choices that are too many for their expert count nothing."""

    def __init__(self, ranks: int, capacity: int) -> None:
        super().__init__()
        self.ranks, self.capacity = ranks, capacity

    def forward(self, x: Tensor) -> Tensor:
        weights, indices = self.route(x)
        places = []
        for part in indices.chunk(self.ranks):
            chosen = F.one_hot(part.flatten(), self.experts)
            places.append((chosen.cumsum(0) * chosen).sum(1).view_as(part))
        kept = torch.cat(places) <= self.capacity
        rows, order, offsets = dialect.permute(x, indices, experts=self.experts)
        return dialect.unpermute(self.transform(rows, offsets), order, weights * kept)


@pytest.mark.parametrize(("fsdp", "ep"), [(2, 2), (3, 3), (4, 2)])
@pytest.mark.parametrize("experts", [(), (0, 5)])
def test_rows_beyond_the_capacity_are_left_out(fsdp: int, ep: int, experts: tuple[int, ...]) -> None:
    """They give zeros and get zero gradients: the same as choices with weight 0."""
    tokens = TOKENS // fsdp
    module, mesh = Experts(), mesh_of(fsdp, ep, capacity=1.0, overflow="drop")
    reference = Dropping(fsdp, capacity=-(-tokens * 2 // 8))
    reference.load_state_dict(module.state_dict())
    whole = layer_of(reference)
    given = given_for(whole, reference, TOKENS)
    routed_to(*experts)(given)
    unit, _ = sharded(module, mesh, tokens)
    ranks = run_spread(unit, mesh, given)
    found = joined(unit, mesh, given, ranks)
    assert_same(found, run_whole(whole, given))
    assert int(found.overflow[0].sum()) > 0
    complete = layer_of(module)
    with pytest.raises(AssertionError):
        assert_same(found, run_whole(complete, given))


def test_shapes_are_fixed_by_a_capacity() -> None:
    unit, _ = sharded(Experts(), mesh_of(4, 4, capacity=1.5), 16)
    for node in unit.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            assert all(isinstance(size, int) for size in value.shape)
    (received,) = unit.graph.find_nodes(op="call_function", target=torch.ops.moec.exchange_padded.default)
    assert received.meta["val"].shape == (4 * 2 * 6, WIDTH)  # 16 tokens x 2 choices / 8 experts x 1.5


def test_nothing_past_the_rows_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """C16: the receive buffer is larger than needed, and holds NaN there: biases and their gradients do not see it."""
    poisoned = []
    original = torch.fx.Interpreter.call_function

    def call_function(self: Any, target: Any, args: Any, kwargs: Any) -> Any:
        result = original(self, target, args, kwargs)
        if target is torch.ops.moec.exchange_padded.default and type(result) is Tensor:
            end = int(args[1][1].clamp_max(args[2]).sum())
            poisoned.append(len(result) - end)
            result[end:] = float("nan")
        return result

    monkeypatch.setattr(torch.fx.Interpreter, "call_function", call_function)
    compare(Experts(), mesh_of(2, 2, capacity=8.0))
    assert min(poisoned) > 0


# what stands between


class PerHead(Experts):
    """A norm over parts of each row, written with sizes, and a residual of the rows."""

    def transform(self, rows: Tensor, offsets: Tensor) -> Tensor:
        heads = rows.view(rows.shape[0], 2, WIDTH // 2)
        normed = heads / heads.square().mean(-1, keepdim=True).sqrt().expand(rows.shape[0], 2, WIDTH // 2)
        return super().transform(normed.reshape(rows.shape[0], WIDTH), offsets) + rows


class Stacked(Experts):
    """Weights that are reshaped, cast, sliced, transposed and put together on their way."""

    def transform(self, rows: Tensor, offsets: Tensor) -> Tensor:
        gate, up = self.gate_up.double().float().view(self.experts, 2, SIZE, WIDTH).unbind(1)
        both = torch.cat((up[:, :, :], gate), 1).transpose(1, 2).contiguous()
        rows = dialect.grouped_linear(rows, both * 2.0, offsets, -self.gate_up_bias, transposed=True)
        up, gate = rows.split(SIZE, -1)
        rows = F.gelu(gate) * up
        return dialect.grouped_linear(rows, self.down, offsets)


class Indexed(Experts):
    """Weights of the choice are not used."""

    def forward(self, x: Tensor) -> Tensor:
        _, indices = self.route(x)
        rows, order, offsets = dialect.permute(x, indices, experts=self.experts)
        return dialect.unpermute(self.transform(rows, offsets), order, torch.ones_like(indices, dtype=x.dtype))


@pytest.mark.parametrize("kind", [PerHead, Stacked, Indexed])
@pytest.mark.parametrize("mesh", [mesh_of(2, 2), mesh_of(3, 3), mesh_of(3, 3, capacity=8.0)])
def test_what_may_stand_between(kind: type[Experts], mesh: MeshPlan) -> None:
    compare(kind(), mesh)


class Changed(Experts):
    """Experts with something else between permute and unpermute."""

    def __init__(self, change: Callable[[Changed, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change
        self.scale = nn.Parameter(torch.randn(TOKENS * 2, 1))
        self.register_buffer("fixed", torch.randn(8, 2 * SIZE, WIDTH))
        self.parts = nn.ParameterList(torch.randn(WIDTH, SIZE) for _ in range(8))
        self.shared = nn.Parameter(torch.randn(WIDTH, SIZE))
        self.square = nn.Parameter(torch.randn(8, 8, WIDTH))

    def transform(self, rows: Tensor, offsets: Tensor) -> Tensor:
        return self.change(self, rows, offsets)


def plain(self: Changed, rows: Tensor, offsets: Tensor) -> Tensor:
    return Experts.transform(self, rows, offsets)


REFUSED = {
    "mean": (lambda s, r, o: plain(s, r - r.mean(0), o), r"mean.*works along the first dimension"),
    "flip": (lambda s, r, o: plain(s, r.flip(0), o), r"flip.*is not known to treat each row on its own"),
    "scale": (lambda s, r, o: plain(s, r * s.scale, o), r"mul.*takes .*scale.*does not travel with them"),
    "merge": (
        lambda s, r, o: plain(s, r.view(-1, 2 * WIDTH)[:, :WIDTH].repeat(2, 1), o),
        r"changes the first dimension",
    ),
    "offsets": (lambda s, r, o: plain(s, r * o[:1].float(), o), r"mul.*depends on the x of this rank"),
    "random": (lambda s, r, o: plain(s, r * torch.rand(()), o), r"mul.*takes rand.*which is random"),
    "groups": (lambda s, r, o: plain(s, r, o.flip(0).contiguous()), r"groups that are not the experts'"),
    "buffer": (
        lambda s, r, o: dialect.grouped_linear(F.relu(dialect.grouped_linear(r, s.fixed, o))[:, :SIZE], s.down, o),
        r"the buffer fixed, which is no parameter",
    ),
    "stack": (
        lambda s, r, o: dialect.grouped_linear(
            dialect.grouped_linear(r, s.down.transpose(1, 2), o), torch.stack(list(s.parts)), o
        ),
        r"parameters of separate modules",
    ),
    "shared": (
        lambda s, r, o: dialect.grouped_linear(
            dialect.grouped_linear(r, s.down.transpose(1, 2), o), s.shared.expand(8, WIDTH, SIZE), o
        ),
        r"is not made of one part per expert",
    ),
    "mixed": (lambda s, r, o: mixed(s, r, o), r"softmax.*is not known to treat each expert on its own"),
    "moved": (
        lambda s, r, o: dialect.grouped_linear(r, s.square.transpose(0, 1), o),
        r"transpose.*of which .* takes its matrices, works along the first dimension",
    ),
    "looked at": (lambda s, r, o: plain(s, r + s.down.mean(), o), r"p_down.*is used by mean.*too"),
    "none": (lambda s, r, o: r * 2.0, r"no grouped_linear takes its rows"),
}


class Leaving(Experts):
    """The rows are a result too."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        weights, indices = self.route(x)
        rows, order, offsets = dialect.permute(x, indices, experts=self.experts)
        rows = self.transform(rows, offsets)
        return dialect.unpermute(rows, order, weights), rows


class OtherOrder(Experts):
    """The rows are put back in the order of another routing."""

    def forward(self, x: Tensor) -> Tensor:
        weights, indices = self.route(x)
        rows, _, offsets = dialect.permute(x, indices, experts=self.experts)
        _, order, _ = dialect.permute(x, indices.flip(1), experts=self.experts)
        return dialect.unpermute(self.transform(rows, offsets), order, weights)


def mixed(self: Changed, rows: Tensor, offsets: Tensor) -> Tensor:
    rows = dialect.grouped_linear(rows, self.down.transpose(1, 2), offsets)
    return dialect.grouped_linear(rows, self.down.softmax(0), offsets)


@pytest.mark.parametrize("name", list(REFUSED))
def test_near_misses_leave_the_layer_alone(name: str) -> None:
    change, reason = REFUSED[name]
    check_refused(Changed(change), reason)


def test_rows_that_go_elsewhere() -> None:
    check_refused(Leaving(), r"grouped_linear_1.*leaves the layer as rows sorted by expert")
    check_refused(
        OtherOrder(), r"unpermute.*in another order than that of permute", r"no grouped_linear takes its rows"
    )


def check_refused(module: nn.Module, *wanted: str) -> None:
    unit = layer_of(module)
    before = str(unit.graph)
    report = ShardExperts().run(unit, PassContext(plan=Plan(mesh=mesh_of(2, 2))))
    assert not report.matches
    for reason, miss in zip(wanted, reasons(report), strict=True):
        assert re.search(reason, miss), miss
    assert str(unit.graph) == before
    assert not any(value.experts for value in unit.signature.inputs)


# whole programs


def k3() -> nn.Module:
    torch.manual_seed(0)
    return build("k3-tiny")


def test_weights_of_layers_shrink_in_the_outer_unit_too() -> None:
    units, log = units_of(k3(), Plan(batch=1, length=8, mesh=mesh_of(3, 3)))
    outer = {value.name: (node.meta["val"].shape, value.experts) for node, value in units[OUTER].placeholders()}
    assert outer["layers.3.feed_forward.mlp.experts.gate_up"] == (torch.Size((3, 96, 32)), 8)
    assert outer["layers.7.feed_forward.mlp.experts.down"] == (torch.Size((3, 32, 48)), 8)
    assert outer["layers.3.feed_forward.mlp.router.weight"] == (torch.Size((8, 64)), 0)
    assert sum(experts > 0 for _, experts in outer.values()) == 2 * 7
    (match,) = [change for _, change in log.matches("shard_experts")]
    assert (match.path, match.what) == ("mlp.experts", "8 experts on 3 ranks, 3 each")


def test_a_plan_for_one_rank_leaves_the_pass_out() -> None:
    _, log = units_of(k3(), Plan(batch=1, length=8, mesh=mesh_of(2, 1)))
    assert "shard_experts" not in {record.name for record in log.records}


def test_dynamic_lengths() -> None:
    model, mesh = k3(), mesh_of(2, 2)
    plan = Plan(batch=2, length=12, dynamic="length", mesh=mesh, check=True)
    spread, _ = units_of(model, plan)
    parts = partition(differentiate(spread["feed_forward_latent_moe"]))
    for length in (5, 12):
        whole, _ = units_of(model, Plan(batch=4, length=length))
        given = given_for(whole["feed_forward_latent_moe"], model, 4)
        wanted = run_whole(whole["feed_forward_latent_moe"], given)
        unit = spread["feed_forward_latent_moe"]
        assert_same(joined(unit, mesh, given, run_spread(unit, mesh, given, parts)), wanted)


def test_more_ranks_than_experts() -> None:
    with pytest.raises(PlanError, match=r"mesh\.ep is 9, and there are 8 experts(.|\n)*mlp\.experts"):
        units_of(k3(), Plan(batch=1, length=8, mesh=mesh_of(9, 9)))


def test_a_capacity_needs_a_fixed_length() -> None:
    with pytest.raises(PlanError, match=r"mesh\.capacity is 1\.5 in a plan of dynamic lengths"):
        units_of(k3(), Plan(batch=1, length=8, dynamic="length", mesh=mesh_of(2, 2, capacity=1.5)))


class Language(nn.Module):
    """Embedding, a block, a head."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = hidden + block(hidden.flatten(0, 1)).view_as(hidden)
        return F.cross_entropy(self.head(hidden)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Modules(nn.Module):
    """C12: each expert is a module of its own, run on all tokens and weighted by its gate."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        gates = self.router(x).softmax(-1)
        return torch.stack([expert(x) for expert in self.experts], -1).mul(gates.unsqueeze(1)).sum(-1)


def test_experts_outside_layers_of_one_kind() -> None:
    """A single layer is no template: its experts lie in the outer unit."""
    units, _ = units_of(Language(Experts()), Plan(batch=1, length=8, mesh=mesh_of(4, 4)))
    assert list(units) == [OUTER]
    shapes = {value.name: node.meta["val"].shape for node, value in units[OUTER].placeholders() if value.experts}
    assert shapes["blocks.0.down"] == (2, WIDTH, SIZE)
    assert len(shapes) == 4
    differentiate(units[OUTER])


def test_nothing_to_spread_is_an_error_that_says_why() -> None:
    with pytest.raises(PlanError, match=r"no experts could be spread(.|\n)*through moec\.permute"):
        units_of(Language(Modules(), Modules()), Plan(batch=1, length=8, mesh=mesh_of(2, 2)))
    mixing = Changed(lambda s, r, o: plain(s, r - r.mean(0), o))
    with pytest.raises(PlanError, match=r"no experts could be spread(.|\n)*works along the first dimension"):
        units_of(Language(mixing), Plan(batch=1, length=8, mesh=mesh_of(2, 2)))


class Regularised(nn.Module):
    """The model's loss looks at the experts' weights itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Language(Experts(), Experts())

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.inner(input_ids, labels)
        return loss + self.inner.blocks[1].down.square().mean()  # type: ignore[union-attr, operator]


def test_experts_that_the_loss_looks_at() -> None:
    with pytest.raises(UnsupportedModelError, match=r"blocks\.1\.down is also used"):
        units_of(Regularised(), Plan(batch=1, length=8, mesh=mesh_of(2, 2)))


def test_golden() -> None:
    unit, _ = sharded(Experts(), mesh_of(4, 4), 16)
    assert_golden("shard_experts", graph_text(unit))
    unit, _ = sharded(Experts(), mesh_of(4, 4, capacity=1.5), 16)
    assert_golden("shard_experts_padded", graph_text(unit))
