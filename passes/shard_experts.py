"""Pass shard_experts: experts spread over the ranks of an expert-parallel group; rows travel to them and back.

In every region permute -> ... -> unpermute with grouped_linear inside (`expert_regions.py`), for mesh.ep ranks:

1. `exchange_counts` of the region's offsets, once for forward and backward;
2. `exchange` of the rows behind the permute, and `exchange_back` before the unpermute;
3. the products take the offsets of the local experts, `local_offsets`;
4. the experts' weights shrink to those of one rank, [ceil(E / ep), ...], with room for places that stay empty where E
   does not divide (`expert_places` of compiler/layout.py), and are marked in the unit's signature;
5. what lies between is traced anew: its number of rows is data from now on. Sizes written out are read off the rows.

With mesh.capacity the padded forms take their place, whose shapes are fixed, and the rows beyond the capacity become a
further output of the unit. Routing, load counts and shared experts stay as they are. The outer unit, which comes last,
passes the smaller weights on to its layers, and their overflow out.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from moec.compiler.errors import PassError, PlanError, UnsupportedModelError
from moec.compiler.graph import OutputValue, Unit, module_path
from moec.compiler.layout import places_per_rank
from moec.compiler.nodes import describe
from moec.compiler.pass_manager import NearMiss, Pass, PassContext, Report
from moec.compiler.plan import MeshPlan, Plan
from moec.passes.expert_regions import Region, Stack, expert_weights, find_region, same_size
from moec.passes.rewrite import Refused, Rewriter, fake_result

_OPS = torch.ops.moec
ROLE = "exchange"


@dataclass
class ShardedExperts:
    """What the pass did, under its name in the facts.

    weights: template -> index of a weight -> its number of experts. results: template -> how many results it had.
    overflow: template -> the outputs that it got after those.
    """

    weights: dict[str, dict[int, int]] = field(default_factory=dict)
    results: dict[str, int] = field(default_factory=dict)
    overflow: dict[str, list[tuple[OutputValue, torch.Tensor]]] = field(default_factory=dict)
    near_misses: list[NearMiss] = field(default_factory=list)


class ShardExperts(Pass):
    """See the module docstring."""

    name = "shard_experts"
    stage = "sharded"
    requires = ("normal_form",)
    provides = ("expert_shards",)
    changes_numerics = True
    touches_state = True

    def wanted(self, plan: Plan) -> bool:
        return plan.mesh.ep > 1

    def run(self, unit: Unit, context: PassContext) -> Report:
        report = Report()
        done: ShardedExperts = context.facts.setdefault(self.name, ShardedExperts())
        sharded: dict[int, int] = {}
        over: list[tuple[OutputValue, fx.Node]] = []
        for permute in unit.graph.find_nodes(op="call_function", target=_OPS.permute.default):
            inputs = dict(unit.placeholders())
            try:
                region = find_region(permute, inputs)
                _check_count(region, context.plan.mesh)
                stack = expert_weights(region, inputs)
            except Refused as refused:
                report.near_miss(permute, "experts", str(refused))
                continue
            over += _shard(region, stack, context.plan)
            sharded |= {list(inputs).index(node): region.experts for node in stack.weights}
            local = _local(region.experts, context.plan.mesh)
            report.match(permute, f"{region.experts} experts on {context.plan.mesh.ep} ranks, {local} each")
        done.near_misses += report.near_misses
        if unit.is_outer:
            sharded |= _shrink_in_calls(unit, done, context.plan.mesh)
            over += _overflow_of_calls(unit, done)
        else:
            done.weights[unit.name] = sharded
            done.results[unit.name] = len(unit.signature.outputs)
            done.overflow[unit.name] = [(value, node.meta["val"]) for value, node in over]
        _mark(unit, sharded)
        _add_outputs(unit, over)
        if unit.is_outer and not any([sharded, *done.weights.values()]):
            raise _nothing_found(context.plan.mesh, done)
        return report


def _check_count(region: Region, mesh: MeshPlan) -> None:
    if region.experts < mesh.ep:
        raise PlanError(
            f"plan field mesh.ep is {mesh.ep}, and there are {region.experts} experts",
            where=f"plan.mesh.ep; {module_path(region.permute)}",
            why="there are more ranks than experts to share among them",
            hint=f"set mesh.ep to {region.experts} or less",
        )


def _local(experts: int, mesh: MeshPlan) -> int:
    return places_per_rank(experts, mesh.ep, mesh.edp)


def _shard(region: Region, stack: Stack, plan: Plan) -> list[tuple[OutputValue, fx.Node]]:
    """Rewrite one region; returns the overflow of its experts, where they have a capacity."""
    local = _local(region.experts, plan.mesh)
    total = region.rows.meta["val"].shape[0]
    capacity = _capacity(region, total, plan.mesh)
    for node in stack.weights:
        _shrink(node, local)
    for node in stack.between:
        _write_sizes(node, region.experts, local)
        _trace_anew(node)
    region.permute.append(region.offsets)
    region.permute.append(region.rows)
    before = Rewriter(region.permute.graph, [region.permute], region.permute)
    before.after_inputs([region.rows, region.offsets], [])
    # Only experts that do not divide leave places empty between others.
    parts = (plan.mesh.edp,) if region.experts % plan.mesh.ep and plan.mesh.edp > 1 else ()
    counts = before.call(_OPS.exchange_counts.default, region.offsets, plan.mesh.ep, local, ROLE, *parts)
    offsets = before.call(_OPS.local_offsets.default, counts, capacity)
    over = []
    if capacity:
        rows = before.call(_OPS.overflow.default, counts, region.experts, capacity, *parts)
        over = [(OutputValue("overflow", module_path(region.permute), capacity), rows)]
    if capacity:
        received = before.call(_OPS.exchange_padded.default, region.rows, counts, capacity, ROLE)
    else:
        with _without_bindings(region.rows):
            received = before.call(_OPS.exchange.default, region.rows, counts, ROLE)
    _replace_in(region, received, offsets)
    _trace_body(region, received, total)
    for end in region.ends:
        after = Rewriter(end.graph, [end], end)
        count: Any = total if isinstance(total, int) else after.call(torch.ops.aten.sym_size.int, region.rows, 0)
        options = (counts, count, capacity, ROLE) if capacity else (counts, count, ROLE)
        back = _OPS.exchange_padded_back.default if capacity else _OPS.exchange_back.default
        end.update_arg(0, after.call(back, end.args[0], *options))
    return over


def _capacity(region: Region, total: int | torch.SymInt, mesh: MeshPlan) -> int:
    if not mesh.capacity:
        return 0
    if not isinstance(total, int):
        raise PlanError(
            f"plan field mesh.capacity is {mesh.capacity} in a plan of dynamic lengths",
            where="plan.mesh.capacity",
            why="a capacity gives the exchange one fixed shape",
            hint="set mesh.capacity to 0, or leave dynamic out",
        )
    return max(1, math.ceil(mesh.capacity * total / region.experts))


def _shrink(weight: fx.Node, local: int) -> None:
    value = weight.meta["val"]
    with value.fake_mode:
        weight.meta["val"] = torch.empty(
            (local, *value.shape[1:]), dtype=value.dtype, device=value.device, requires_grad=value.requires_grad
        )


def _replace_in(region: Region, received: fx.Node, offsets: fx.Node) -> None:
    for node in region.body:
        if region.rows in node.all_input_nodes:
            node.replace_input_with(region.rows, received)
    for node in region.products:
        node.replace_input_with(region.offsets, offsets)
    for end in region.ends:
        if end.args[0] is region.rows:
            end.update_arg(0, received)


def _trace_body(region: Region, received: fx.Node, total: int | torch.SymInt) -> None:
    wanted = received.meta["val"].shape[0]
    graph = received.graph
    size: fx.Node | int
    if isinstance(wanted, int):
        size = wanted
    else:
        with graph.inserting_after(received):
            size = graph.call_function(torch.ops.aten.sym_size.int, (received, 0))
        size.meta = {key: value for key, value in received.meta.items() if key != "val"} | {"val": wanted}
    for node in region.body:
        _write_sizes(node, total, size)
        _trace_anew(node)
        value = node.meta["val"]
        for tensor in value if isinstance(value, list | tuple) else [value]:
            if isinstance(tensor, torch.Tensor) and not same_size(tensor.shape[0], wanted):
                raise _lost(node, f"its result has {tensor.shape[0]} rows, {wanted} were received")


def _write_sizes(node: fx.Node, old: Any, new: Any) -> None:
    """Replace the first size of a list of sizes where it is the old count: a view keeps its first dimension."""
    for index, argument in enumerate(node.args):
        first = argument[0] if isinstance(argument, list | tuple) and argument else None
        known = first.meta.get("val") if isinstance(first, fx.Node) else first
        if isinstance(known, int | torch.SymInt) and same_size(known, old) and _are_sizes(node, index):
            node.update_arg(index, [new, *argument[1:]])  # type: ignore[index, misc]


def _are_sizes(node: fx.Node, index: int) -> bool:
    return node.target._schema.arguments[index].name in ("shape", "size")  # type: ignore[union-attr]


def _trace_anew(node: fx.Node) -> None:
    try:
        node.meta["val"] = fake_result(node)
    except Exception as error:  # torch raises many kinds here
        raise _lost(node, f"{type(error).__name__}: {error}") from error


def _without_bindings(node: fx.Node) -> Any:
    """The graph is traced again later: nobody waits for the new symbol to be bound."""
    return node.meta["val"].fake_mode.shape_env.ignore_fresh_unbacked_symbols()


def _lost(node: fx.Node, why: str) -> PassError:
    return PassError(
        f"{describe(node)} cannot work on rows whose number is data",
        where=module_path(node),
        why=why,
        hint="report it; set mesh.ep to 1 to train without expert parallelism",
    )


def _shrink_in_calls(unit: Unit, done: ShardedExperts, mesh: MeshPlan) -> dict[int, int]:
    """Shrink the weights that the outer unit hands to its layers; index -> number of experts."""
    inputs = list(unit.placeholders())
    found: dict[int, int] = {}
    for index, (node, value) in enumerate(inputs):
        wanted = [_experts_wanted(user, node, done) for user in node.users]
        counts = {count for uses in wanted for count in uses}
        if counts == {0} or not counts:
            continue
        if len(counts) > 1:
            raise UnsupportedModelError(
                f"the experts' weight {value.name} is also used where it is not one of experts",
                where=", ".join(module_path(user) for user in node.users),
                why="its experts are spread over the ranks, and elsewhere it would be needed whole",
                hint="set mesh.ep to 1",
            )
        found[index] = counts.pop()
        _shrink(node, _local(found[index], mesh))
    return found


def _experts_wanted(user: fx.Node, node: fx.Node, done: ShardedExperts) -> list[int]:
    """For each place where `user` takes `node`: the number of experts that a sharded layer wants of it, else 0."""
    if user.target is not _OPS.region.default:
        return [0]
    template, _, inputs, weights = user.args
    known = done.weights.get(str(template), {})
    taken = [known.get(index, 0) for index, weight in enumerate(weights) if weight is node]  # type: ignore[arg-type]
    return taken + [0] * sum(value is node for value in inputs)  # type: ignore[union-attr]


def _overflow_of_calls(unit: Unit, done: ShardedExperts) -> list[tuple[OutputValue, fx.Node]]:
    """The overflow that layers return: the outputs that their templates got, before the new values of buffers."""
    found = []
    for call in unit.graph.find_nodes(op="call_function", target=_OPS.region.default):
        added = done.overflow.get(str(call.args[0]), [])
        if not added:
            continue
        path, values = str(call.args[1]), list(call.meta["val"])
        first = done.results[str(call.args[0])]
        for reader in list(call.users):
            if reader.args[1] >= first:  # type: ignore[operator]
                reader.update_arg(1, reader.args[1] + len(added))  # type: ignore[operator]
        call.meta["val"] = [*values[:first], *(value for _, value in added), *values[first:]]
        after = Rewriter(unit.graph, [call], call)
        after.after_inputs([call], [])
        for index, (output, _) in enumerate(added):
            name = ".".join(filter(None, (path, output.name)))
            found.append((replace(output, name=name), after.call(operator.getitem, call, first + index)))
    return found


def _add_outputs(unit: Unit, added: list[tuple[OutputValue, fx.Node]]) -> None:
    output = unit.graph.output_node()
    output.args = ((*output.args[0], *(node for _, node in added)),)  # type: ignore[misc]
    unit.signature = replace(unit.signature, outputs=(*unit.signature.outputs, *(value for value, _ in added)))


def _mark(unit: Unit, sharded: dict[int, int]) -> None:
    inputs = (
        replace(value, experts=sharded.get(index, value.experts)) for index, value in enumerate(unit.signature.inputs)
    )
    unit.signature = replace(unit.signature, inputs=tuple(inputs))


def _nothing_found(mesh: MeshPlan, done: ShardedExperts) -> PlanError:
    reasons = [f"{miss.path or 'the model'}: {miss.reason}" for miss in done.near_misses]
    return PlanError(
        f"plan field mesh.ep is {mesh.ep}, and no experts could be spread over ranks",
        where="plan.mesh.ep",
        why="; ".join(reasons[:3]) or "no layer sends tokens to experts through moec.permute and moec.unpermute",
        hint="set mesh.ep to 1, or write the experts as parameters [E, ...] with permute, grouped_linear and unpermute "
        "(docs/extending.md)",
    )
