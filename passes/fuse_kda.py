"""Pass fuse_kda: the stages around a delta rule, and the rule itself, become one moec::kda.

    q, k   projection -> short_conv -> heads -> l2_norm
    v      projection -> short_conv -> heads
    g      lower_bound * sigmoid(exp(A) (z + b)) or -exp(A) softplus(z + b), per channel or per head
    beta   sigmoid of a projection
    o      gated_norm over each head

1. From each delta_rule every operand is read back to its projection. If q, k, g or beta has another form, nothing is
   fused.
2. The convolutions are taken in when all three are there and restart at the same documents. One convolution over
   [q | k | v] is three, since it is depthwise: its input and taps are split. Otherwise they stay outside, and a near
   miss says why.
3. The gated norm is taken in when it is the only use of the output.
4. A rule that starts from a given state, or whose final state is used, becomes moec::kda_with_state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

import moec.compiler.dialect  # noqa: F401  (registers torch.ops.moec)
from moec.compiler.graph import Unit, tensor_meta
from moec.compiler.matching import Failure, Match
from moec.compiler.nodes import Targets, bound_args, describe, looked_through, origin, source_of, used_outside
from moec.compiler.pass_manager import Pass, PassContext, Report
from moec.compiler.pattern import anything, op
from moec.passes.decay import Decay, read_decay, read_sigmoid
from moec.passes.layout import fold_reshapes
from moec.passes.parts import RESHAPES, part_of
from moec.passes.rewrite import Finder, Refused, Rewriter, Sign, apply_rules

_DELTA: Targets = frozenset({torch.ops.moec.delta_rule.default})
_CONV = torch.ops.moec.short_conv.default
_L2, _GATED = torch.ops.moec.l2_norm.default, torch.ops.moec.gated_norm.default
_REPEAT = torch.ops.aten.repeat_interleave.self_int


class FuseKda(Pass):
    """See the module docstring."""

    name = "fuse_kda"
    stage = "fused"
    requires = ("norms", "short_convs")
    provides = ("kda_stages",)
    changes_numerics = True

    def run(self, unit: Unit, context: PassContext) -> Report:
        report = Report()

        def rewrite(found: Match, rewriter: Rewriter) -> str:
            return _rewrite(found, rewriter, report)

        apply_rules(unit, [Finder("kda", _DELTA, _find, rewrite)], report, SIGNS)
        return report

    def expected(self, unit: Unit) -> str:
        rules = sum(node.target in _DELTA for node in unit.graph.nodes)
        return f"{rules} delta rules are in the graph, none was fused with its stages" if rules else ""


@dataclass
class _Operand:
    """q, k or v: the node [B, T, heads * width] that its heads are cut from, and what was done on the way.

    eps: of the l2_norm, 0 without one. dtype: what the norm, or else the recurrence, reads. inner: the nodes in
    between.
    """

    flat: fx.Node
    heads: int
    width: int
    repeats: int
    eps: float
    dtype: torch.dtype
    inner: list[fx.Node]


@dataclass
class _Output:
    """Where the stage ends: `root` is replaced. The gated norm's operands are None without one."""

    root: fx.Node
    inner: list[fx.Node]
    gate: fx.Node | None = None
    weight: fx.Node | None = None
    eps: float = 0.0
    activation: str = "sigmoid"


def _find(delta: fx.Node) -> Match | Failure:
    """Read back all operands; what is Refused on the way is the failure."""
    try:
        q, k, v, g, beta, documents, initial, scale, chunk = bound_args(delta)
        results = {user.args[1]: user for user in delta.users}
        if 0 not in results or len(results) != len(delta.users):
            raise Refused("the output is not used, or in more than one place")
        queries, keys, values = _operand("q", q), _operand("k", k), _operand("v", v)
        if (queries.heads, queries.repeats, queries.eps) != (keys.heads, keys.repeats, keys.eps):
            raise Refused("q and k have different heads or norms")
        if not queries.eps or values.eps or values.repeats != 1:
            raise Refused("q and k are not l2_norm of heads, or v is")
        decay, (strength, strength_nodes), output = read_decay(g, values.heads), read_sigmoid(beta), _output(results[0])
        inner = [*queries.inner, *keys.inner, *values.inner, *decay.inner, *strength_nodes, *output.inner, delta]
        _require_unused(inner, {output.root, *inner, *results.values()})
    except Refused as refused:
        reason = str(refused)
        return Failure((delta,), lambda: reason, complete=True)
    captures = {
        "operands": [queries, keys, values],
        "decay": decay,
        "strength": strength,
        "output": output,
        "documents": documents,
        "scale": scale,
        "chunk": chunk,
        "initial": initial,
        "final": results.get(1),
    }
    return Match(output.root, captures, (output.root, *inner))


def _rewrite(found: Match, rewriter: Rewriter, report: Report) -> str:
    operands: list[_Operand] = found["operands"]
    decay: Decay = found["decay"]
    output: _Output = found["output"]
    queries, _, values = operands
    documents = found["documents"]
    if found["final"] is not None:
        # It may be used before the output is normalised.
        gate = None if output.gate is None else _before_reshape(output.gate, values.flat)
        read = (decay.logits, decay.bias, decay.rate, found["strength"], gate, output.weight, documents)
        inputs = (*(operand.flat for operand in operands), *read, found["initial"])
        rewriter.after_inputs([node for node in inputs if node is not None], [found["final"], output.root])
    try:
        flats, taps = _convolutions(rewriter, operands, documents, set(found.nodes))
        convolved = True
    except Refused as refused:
        flats, taps, convolved = [operand.flat for operand in operands], [None, None, None], False
        reason = str(refused)
        rewriter.then(lambda: report.near_miss(found.root, "kda without its convolutions", reason))
    flats = [_in_dtype(rewriter, flat, operand.dtype) for flat, operand in zip(flats, operands, strict=True)]
    rate, bias = decay.vectors(rewriter)
    gate = None if output.gate is None else _flattened(rewriter, output.gate, values.flat)
    initial, final = found["initial"], found["final"]
    arguments = (
        *flats,
        decay.logits,
        found["strength"],
        rate,
        bias,
        *taps,
        gate,
        output.weight,
        documents,
        queries.heads,
        values.heads,
        decay.kind,
        decay.lower_bound,
        queries.eps,
        output.eps,
        output.activation,
        found["scale"],
        found["chunk"],
    )
    if initial is None and final is None:
        stage = rewriter.call(torch.ops.moec.kda.default, *arguments)
    else:
        stage, state = rewriter.results(torch.ops.moec.kda_with_state.default, *arguments, initial, count=2)
        if final is not None:
            rewriter.replace(final, state)
    back = rewriter.call(torch.ops.aten.reshape.default, stage, _sizes(output.root))
    rewriter.replace(output.root, back)
    rewriter.then(lambda: fold_reshapes(rewriter.graph, back))
    parts = [f"{decay.kind} decay per {'channel' if _per_channel(decay, values.heads) else 'head'}"]
    parts += ["convolutions"] if convolved else []
    parts += [f"{output.activation} gated norm"] if gate is not None else []
    parts += ["from a given state"] if initial is not None else []
    parts += ["final state"] if final is not None else []
    heads = f"{values.heads} heads" if values.heads == queries.heads else f"{queries.heads} to {values.heads} heads"
    return f"kda of {heads}: {', '.join(parts)}"


# Reading back


def _operand(name: str, node: fx.Node) -> _Operand:
    """From the recurrence's argument [B, T, heads, width] down to the reshape that cuts heads."""
    inner: list[fx.Node] = []
    eps, repeats, dtype = 0.0, 1, _tensor(node).dtype
    while True:
        node = origin(node)
        if node.target is _L2 and not eps:
            eps, dtype = bound_args(node)[1], _tensor(source_of(node)).dtype
        elif node.target is _REPEAT and repeats == 1 and tuple(bound_args(node)[2:]) == (2, None):
            repeats = bound_args(node)[1]
        elif node.target in RESHAPES:
            break
        else:
            raise Refused(f"{name} does not come from heads of a projection but from {describe(node)}")
        inner.append(node)
        node = source_of(node)
    heads, flat = _tensor(node), _tensor(source_of(node))
    if flat.dim() != 3 or heads.dim() != 4 or flat.shape[2] != heads.shape[2] * heads.shape[3]:
        raise Refused(f"{name} is cut into heads in an unknown way")
    inner.append(node)
    flat_node = origin(source_of(node))
    return _Operand(flat_node, int(heads.shape[2]), int(heads.shape[3]), repeats, eps, dtype, inner)


def _output(result: fx.Node) -> _Output:
    """The gated norm of the output, or the output itself: without such a norm, or where the op gives another one."""
    node, inner = result, [result]
    while len(node.users) == 1:
        (user,) = node.users
        if user.target is _GATED and _takes_norm(user, node, result):
            _, gate, weight, eps, activation, _ = bound_args(user)
            return _Output(user, inner, gate, weight, eps, activation)
        lossless = user.target in RESHAPES or (node in user.all_input_nodes and origin(user) is origin(node))
        if not lossless or _tensor(user).shape[-1] != _tensor(result).shape[-1]:
            break
        node = user
        inner.append(user)
    return _Output(result, [])


def _takes_norm(norm: fx.Node, value: fx.Node, output: fx.Node) -> bool:
    """Whether the stage may end in a gated norm of `value`: the op has a gate of its own, and rounds as `output` is."""
    x, gate, _, _, _, zero_centered = bound_args(norm)
    return x is value and gate is not value and not zero_centered and _tensor(norm).dtype == _tensor(output).dtype


def _require_unused(nodes: list[fx.Node], inside: set[fx.Node]) -> None:
    casts = {user for node in nodes for user in node.users if looked_through(user) is node}
    node = used_outside(nodes, inside | casts)
    if node is not None:
        raise Refused(f"{describe(node)} is used outside of the stage too")


# Convolutions


def _convolutions(
    rewriter: Rewriter, operands: list[_Operand], documents: fx.Node | None, inside: set[fx.Node]
) -> tuple[list[fx.Node], list[fx.Node | None]]:
    """Inputs and taps of the convolutions in front of q, k and v; raises Refused when they have to stay outside."""
    parts = [part_of(operand.flat) for operand in operands]
    if all(part is not None and part.dim == 2 and part.step == 1 for part in parts):
        ends = [(part.start, part.start + part.length) for part in parts if part is not None]
        (conv, *others) = [origin(part.source) for part in parts if part is not None]
        if any(other is not conv for other in others):
            raise Refused("q, k and v are parts of different values")
        x, weight = _conv(conv, documents)
        splits = {node for operand in operands for node in (operand.flat, source_of(operand.flat))}
        _require_unused([conv, *splits - {conv}], inside | splits)
        pieces = _pieces(rewriter, x, ends)
        return pieces, [rewriter.call(torch.ops.aten.slice.Tensor, weight, 0, start, end) for start, end in ends]
    inputs: list[fx.Node] = []
    taps: list[fx.Node | None] = []
    for operand in operands:
        x, weight = _conv(operand.flat, documents)
        _require_unused([operand.flat], inside)
        inputs.append(x)
        taps.append(weight)
    return inputs, taps


def _conv(node: fx.Node, documents: fx.Node | None) -> tuple[fx.Node, fx.Node]:
    if node.target is not _CONV:
        raise Refused(f"{describe(node)} is not a short convolution")
    x, weight, ids, activation = bound_args(node)
    if activation != "silu":
        raise Refused("the convolution has no SiLU")
    if ids is not documents:
        raise Refused("convolution and recurrence restart at different documents")
    return x, weight


def _pieces(rewriter: Rewriter, x: fx.Node, ends: list[tuple[int, int]]) -> list[fx.Node]:
    """The channels start..end of x, for each pair: what x was concatenated from, where that is the same."""
    if x.target is torch.ops.aten.cat.default and _last_dim(x):
        tensors: list[fx.Node] = list(x.args[0])  # type: ignore[arg-type]
        found, start = {}, 0
        for tensor in tensors:
            width = int(_tensor(tensor).shape[-1])
            found[start, start + width] = tensor
            start += width
        if all(pair in found for pair in ends):
            return [found[pair] for pair in ends]
    return [rewriter.call(torch.ops.aten.slice.Tensor, x, 2, start, end) for start, end in ends]


def _last_dim(cat: fx.Node) -> bool:
    rank = _tensor(cat).dim()
    return bool(bound_args(cat)[1] % rank == rank - 1)


# Shapes


def _in_dtype(rewriter: Rewriter, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """The stage rounds q, k and v to the dtype they come in, so they come in the one the model computes them in."""
    return node if _tensor(node).dtype == dtype else rewriter.call(torch.ops.aten.to.dtype, node, dtype)


def _before_reshape(gate: fx.Node, like: fx.Node) -> fx.Node:
    """What the output gate was reshaped from, if that is [B, T, heads * width] as `like` is, else the gate itself."""
    source = source_of(gate) if gate.target in RESHAPES else gate
    return source if _tensor(source).shape == _tensor(like).shape else gate


def _flattened(rewriter: Rewriter, gate: fx.Node, like: fx.Node) -> fx.Node:
    """The output gate as [B, T, heads * width]."""
    source = _before_reshape(gate, like)
    if _tensor(source).shape == _tensor(like).shape:
        return source
    return rewriter.call(torch.ops.aten.reshape.default, gate, _sizes(like))


def _sizes(node: fx.Node) -> list[int]:
    sizes = [size if isinstance(size, int) else -1 for size in _tensor(node).shape]
    if sizes.count(-1) > 1:
        raise Refused("more than one size is symbolic")
    return sizes


def _per_channel(decay: Decay, heads: int) -> bool:
    return bool(_tensor(decay.logits).shape[-1] != heads)


def _tensor(node: fx.Node) -> torch.Tensor:
    tensor = tensor_meta(node)
    if tensor is None:
        raise Refused(f"the shape of {node.name} is not known")
    return tensor


SIGNS = (Sign("kda", op(_DELTA, *[anything()] * 9), "its operands have an unknown form"),)
