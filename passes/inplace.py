"""In-place operators as functional ones, where nobody can tell the difference.

An in-place op on a fresh value becomes its functional form, and later uses of the value read the result. A buffer that
is allocated and then filled slice by slice becomes a `cat`. A write into an input (a buffer that the model updates) or
through any other view is left as it is; the latter is said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import fx

from moec.compiler._torch_compat import OpOverload
from moec.compiler.aliases import Aliases, is_mutation
from moec.compiler.graph import tensor_meta
from moec.compiler.nodes import aten, source_of, target_name
from moec.compiler.pass_manager import Report
from moec.passes.parts import Part, part_of
from moec.passes.rewrite import Refused, Rewriter, erase_dead

ALLOCATIONS = aten(
    "empty.memory_format", "new_empty.default", "empty_like.default", "zeros.default", "new_zeros.default",
    "zeros_like.default",
)  # fmt: skip
_COPY = aten("copy_.default")


def make_functional(graph: fx.Graph, report: Report) -> Counter[str]:
    """Replace in-place ops in graph order and count them; a near miss counts those that stay, per op."""
    counts: Counter[str] = Counter()
    kept: dict[str, list[fx.Node]] = {}
    reasons: dict[str, str] = {}
    aliases = Aliases(graph)
    for node in list(graph.nodes):
        if node.op != "call_function" or not is_mutation(node):
            continue
        if aliases.root(node.args[0]).op in ("placeholder", "get_attr"):
            continue  # The model updates a buffer, as it means to.
        name = target_name(node)
        try:
            if node.target in _COPY and aliases.root(node.args[0]).target in ALLOCATIONS:
                _assemble(graph, node, aliases)
            else:
                _functional(graph, node, aliases)
            counts[f"{name} made functional"] += 1
        except Refused as refused:
            kept.setdefault(name, []).append(node)
            reasons.setdefault(name, str(refused))
    for name, nodes in kept.items():
        report.near_miss(nodes[0], f"{len(nodes)} x {name}", reasons[name])
    return counts


def _functional(graph: fx.Graph, node: fx.Node, aliases: Aliases) -> None:
    base = source_of(node)
    if base is not aliases.root(base) and not is_mutation(base):
        raise Refused(f"it writes through a view, {base.name}")
    for member in aliases.members(base):
        if member < node and member is not base and any(user > node for user in member.users):
            raise Refused(f"{member.name} shares its memory and is used later")
    rewriter = Rewriter(graph, [node], node)
    result = rewriter.call(_functional_overload(node.target), *node.args, **node.kwargs)
    wanted = tensor_meta(node)
    found = tensor_meta(result)
    if wanted is not None and found is not None and wanted.dtype != found.dtype:
        rewriter.drop_created()
        raise Refused(f"its functional form gives {found.dtype} instead of {wanted.dtype}")
    aliases.split(base, node, result)
    _replace_later(base, node, result)
    graph.erase_node(node)


def _assemble(graph: fx.Graph, node: fx.Node, aliases: Aliases) -> None:
    """`buffer[..., a:b] = x; buffer[..., b:] = y` as a cat, at the last of the copies that fill it."""
    root = aliases.root(node.args[0])
    writes: list[tuple[fx.Node, Part]] = []
    for user in root.users:
        part = part_of(user)
        copies = list(user.users)
        if part is not None and part.source is root and len(copies) == 1 and copies[0].target in _COPY:
            writes.append((copies[0], part))
    last = max((copy for copy, _ in writes), default=node)
    if node is not last:
        if node in [copy for copy, _ in writes]:
            return  # Handled when the loop reaches the last one.
        raise Refused(f"it writes through a view, {node.args[0]}")
    writes.sort(key=lambda pair: pair[1].start)
    if not _tiles([part for _, part in writes]):
        raise Refused(f"the slices written do not fill {root.name}")
    if any(copy.users for copy, _ in writes):
        raise Refused(f"the value of a copy into {root.name} is used")
    slices = {copy.args[0] for copy, _ in writes}
    if any(user not in slices and user < last for user in root.users):
        raise Refused(f"{root.name} is read before it is filled")
    rewriter = Rewriter(graph, [root, *(copy for copy, _ in writes)], last)
    try:
        pieces = [_fitted(rewriter, copy) for copy, _ in writes]
    except Refused:
        rewriter.drop_created()
        raise
    result = rewriter.call(torch.ops.aten.cat.default, pieces, writes[0][1].dim)
    root.replace_all_uses_with(result, delete_user_cb=lambda user: user not in slices)
    for copy, _ in writes:
        window = copy.args[0]
        graph.erase_node(copy)
        graph.erase_node(window)  # type: ignore[arg-type]
    erase_dead(graph, [root])


def _fitted(rewriter: Rewriter, copy: fx.Node) -> fx.Node:
    """The copied value, broadcast and cast as `copy_` does."""
    window, value = copy.args[:2]
    assert isinstance(window, fx.Node)
    assert isinstance(value, fx.Node)
    wanted, found = tensor_meta(window), tensor_meta(value)
    if wanted is None or found is None:
        raise Refused(f"the shape of {value.name} is not known")
    if found.dtype != wanted.dtype:
        value = rewriter.call(torch.ops.aten.to.dtype, value, wanted.dtype)
    if found.shape != wanted.shape:
        if not all(isinstance(size, int) for size in wanted.shape):
            raise Refused(f"the copied value is broadcast to a symbolic shape in {window.name}")
        value = rewriter.call(torch.ops.aten.expand.default, value, list(wanted.shape))
    return value


def _tiles(parts: list[Part]) -> bool:
    if not parts or any(part.step != 1 or part.dim != parts[0].dim for part in parts):
        return False
    ends = [0, *(part.start + part.length for part in parts)]
    return ends[-1] == parts[0].size and all(part.start == end for part, end in zip(parts, ends, strict=False))


def _functional_overload(target: object) -> OpOverload:
    """add_.Tensor -> add.Tensor; raises Refused when there is none."""
    assert isinstance(target, OpOverload)
    name = target._schema.name.removeprefix("aten::").removesuffix("_")
    packet = getattr(torch.ops.aten, name, None)
    if not target._schema.name.startswith("aten::") or packet is None or target._overloadname not in packet.overloads():
        raise Refused("it has no functional form")
    found: OpOverload = getattr(packet, target._overloadname)
    return found


def _replace_later(base: fx.Node, node: fx.Node, result: fx.Node) -> None:
    """Uses of the in-place op's value, and of what it wrote into after it, become uses of `result`."""
    node.replace_all_uses_with(result)
    later: Iterable[fx.Node] = [user for user in base.users if user > node and user is not result]
    for user in later:
        user.replace_input_with(base, result)
