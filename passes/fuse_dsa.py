"""Pass fuse_dsa: sparse attention written with dense scores becomes index_topk, sparse_attention and indexer_loss.

    I      = sum_h w_h relu(q_h . k)                        the indexer's scores, masked to earlier tokens of a document
    best, S = topk(I);  chosen = best > -inf                 -> index_topk
    p      = softmax(scale * Q . entries[S]),  o = p entries[S][..., :V]       -> sparse_attention
    KL(sum_h p || softmax(best)) per token, p detached       -> indexer_loss, if it is there

The ops mark unused slots by -1 instead of keeping `chosen`, so all of it is rewritten together or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import fx

import moec.compiler.dialect  # noqa: F401  (registers torch.ops.moec)
from moec.compiler.graph import Unit, tensor_meta
from moec.compiler.matching import Failure, Match, match
from moec.compiler.nodes import aten, bound_args, describe, source_of, used_outside
from moec.compiler.pass_manager import Pass, PassContext, Report
from moec.compiler.pattern import Pattern, anything, cast, dim, item, items, number, op, var
from moec.passes.mask_rules import evaluate
from moec.passes.mask_values import Linear
from moec.passes.masks import NotUnderstood, understand
from moec.passes.origins import weight_values
from moec.passes.recognize_norm import DIV, MUL
from moec.passes.rewrite import Finder, Refused, Rewriter, Sign, apply_rules

_MATMUL, _TRANSPOSE, _UNSQUEEZE = aten("matmul.default"), aten("transpose.int"), aten("unsqueeze.default")
_PRODUCTS = aten("matmul.default", "bmm.default", "einsum.default", "linear.default", "mm.default", "addmm.default")
_SUM, _TOPK, _FILL, _NOT = (
    aten("sum.dim_IntList"),
    aten("topk.default"),
    aten("masked_fill.Scalar"),
    aten("bitwise_not.default", "logical_not.default"),
)


class FuseDsa(Pass):
    """See the module docstring."""

    name = "fuse_dsa"
    requires = ("normal_form",)
    provides = ("sparse_attention",)
    changes_numerics = True

    def run(self, unit: Unit, context: PassContext) -> Report:
        report = Report()
        rules = [Finder("sparse_attention", _ROOTS, _find, _rewrite)]
        apply_rules(unit, rules, report, SIGNS, context.documents_of(unit))
        return report

    def expected(self, unit: Unit) -> str:
        weights = weight_values(unit)
        left = [node for node in unit.graph.nodes if node.target in _TOPK and _ranks_keys(node, weights)]
        return f"{describe(left[0])} selects keys by scores, but no sparse attention was recognised" if left else ""


def _ranks_keys(topk: fx.Node, weights: set[fx.Node]) -> bool:
    """Whether scores [B, T, keys] are made of products of queries and keys: a router has weights on one side."""
    if _by_key(source_of(topk)):
        return False
    waiting, seen = [source_of(topk)], set()
    while waiting:
        node = waiting.pop()
        if node in seen or node.op != "call_function":
            continue
        seen.add(node)
        if node.target not in _PRODUCTS:
            waiting += node.all_input_nodes
        elif not weights & set(node.all_input_nodes):
            return True
    return False


def _find(root: fx.Node) -> Match | Failure:
    """The attention that ends in `root`, and the divergence that goes with it."""
    found = match(_ATTENTION, root, exclusive=False)
    if not isinstance(found, Match):
        return found
    captures, nodes = dict(found.captures), dict.fromkeys(found.nodes)
    loss = _divergence_of(found)
    if loss is not None:
        captures["loss"] = loss.root
        nodes |= dict.fromkeys(loss.nodes)
    outputs = {root, captures.get("loss")}
    inside = set(nodes) | set(found.crossed) | (set(loss.crossed) if loss is not None else set())
    outside = used_outside((node for node in nodes if node not in outputs), inside)
    if outside is not None:
        return Failure(tuple(nodes), lambda: f"{describe(outside)} is used outside of the sparse attention too")
    return Match(root, captures, tuple(nodes))


def _divergence_of(attention: Match) -> Match | None:
    """The KL divergence between the attention's probabilities and the softmax of the indexer's scores."""
    for node in _reach(attention["shares"].users, 8):
        if node.target in _SUM:
            found = match(_DIVERGENCE, node, exclusive=False)
            if isinstance(found, Match) and all(found[n] is attention[n] for n in ("shares", "topk", "chosen")):
                return found
    return None


def _reach(start: Iterable[fx.Node], steps: int) -> list[fx.Node]:
    """The nodes of `start` and what uses them, directly or through up to `steps` nodes, in graph order."""
    found = border = set(start)
    for _ in range(steps):
        border = {user for node in border for user in node.users} - found
        found = found | border
    return sorted(found)


def _rewrite(found: Match, rewriter: Rewriter) -> str:
    q, k, w, main_q, entries = (found[name] for name in ("q", "k", "w", "main_q", "entries"))
    value_dim, scale = _value_dim(found), float(found["scale"])
    if evaluate(found["batch"], {}) != Linear(((-3, 1),), 0.0):
        raise Refused("the entries are not selected row by row of the batch")
    try:
        mask = understand(found["hidden"], rewriter.documents, hides=True, batch=-3)
    except NotUnderstood as reason:
        raise Refused(str(reason)) from None
    if mask.window:
        raise Refused("the indexer sees a window only")
    top_k = _top_k(found["topk"])
    loss = found.get("loss")
    inputs = [node for node in (q, k, w, main_q, entries, mask.documents) if node is not None]
    rewriter.after_inputs(inputs, [node for node in (found.root, loss) if node is not None])
    relu = "relu" in found
    indices = rewriter.call(torch.ops.moec.index_topk.default, q, k, w, mask.documents, top_k, relu)
    o, lse = rewriter.results(
        torch.ops.moec.sparse_attention.default, *(main_q, entries, indices, scale, value_dim), count=2
    )
    if loss is not None:
        divergence = rewriter.call(
            torch.ops.moec.indexer_loss.default, q, k, w, indices, main_q, entries, lse, scale, relu
        )
        rewriter.replace(loss, divergence)
    rewriter.replace(found.root, o)
    return f"sparse_attention to {top_k} keys" + (", indexer_loss" if loss is not None else "")


def _value_dim(found: Match) -> int:
    values = tensor_meta(found["values"] if "values" in found else found["picked"])
    if values is None or not isinstance(values.shape[-1], int):
        raise Refused("the width of the values is not known")
    return values.shape[-1]


def _top_k(topk: fx.Node) -> int:
    """The number of keys to select; of min(k, length) with a symbolic length it is k."""
    count = bound_args(topk)[1]
    if isinstance(count, fx.Node):
        numbers = [value for value in count.args if isinstance(value, int)]
        if count.target not in (torch.sym_min, min) or len(numbers) != 1:
            raise Refused("the number of selected keys is symbolic")
        return numbers[0]
    return int(count)


def _selection() -> tuple[Pattern, Pattern, Pattern]:
    """(topk, its values, which of them are real keys)"""
    q, k, w = var("q"), var("k"), var("w")
    keys = op(_UNSQUEEZE, op(_TRANSPOSE, k, 1, 2), 1)
    products = op(_MATMUL, op(_TRANSPOSE, q, 1, 2), keys)
    kept = op(aten("relu.default"), products, name="relu") | products
    weights = op(_UNSQUEEZE, op(_TRANSPOSE, w, 1, 2), dim(-1))
    scores = op(_SUM, op(MUL, kept, weights, commutes=True), dim(1)) | _by_query(q, k, w)
    masked = op(_FILL, scores, var("hidden"), -math.inf)
    topk = op(_TOPK, masked, anything(), dim(-1), True, anything(), name="topk")
    best = item(topk, 0)
    return topk, best, op(aten("gt.Scalar"), best, -math.inf, name="chosen")


def _by_query(q: Pattern, k: Pattern, w: Pattern) -> Pattern:
    """The same scores with the heads of a query next to each other: w [1, H] times relu(q [H, D] times keys [D, S])."""
    products = op(_MATMUL, q, op(_UNSQUEEZE, op(_TRANSPOSE, k, 1, 2), 1))
    kept = op(aten("relu.default"), products, name="relu") | products
    return op(aten("squeeze.dim"), op(_MATMUL, op(_UNSQUEEZE, w, dim(-2)), kept), dim(-2))


def _attention() -> Pattern:
    topk, _, chosen = _selection()
    picked = op(aten("index.Tensor"), var("entries"), items(var("batch"), item(topk, 1)), name="picked")
    logits = op(_MATMUL, var("main_q"), op(_TRANSPOSE, picked, 2, 3))
    scaled = op(MUL, logits, number("scale"), commutes=True)
    hidden = op(_NOT, op(_UNSQUEEZE, chosen, 2)) | op(_UNSQUEEZE, op(_NOT, chosen), 2)
    shares = op(aten("softmax.int"), op(_FILL, scaled, hidden, -math.inf), dim(-1), anything(), name="shares")
    values = op(aten("slice.Tensor"), picked, dim(3), 0, anything(), 1, name="values") | picked
    return op(_MATMUL, shares, values)


def _divergence() -> Pattern:
    _, best, chosen = _selection()
    shares = op(aten("softmax.int"), *[anything()] * 3, name="shares")
    total = op(_SUM, op(aten("detach.default"), shares), dim(2))
    target = op(DIV, total, op(_SUM, total, dim(-1), True))
    prediction = op(_FILL, op(aten("log_softmax.int"), best, dim(-1), anything()), op(_NOT, chosen), 0)
    gap = op(aten("sub.Tensor"), op(aten("xlogy.Tensor"), target, target), op(MUL, target, prediction, commutes=True))
    return op(_SUM, gap, dim(-1))


def _by_key(node: fx.Node) -> str:
    """Scores [B, T, T], unlike those of a router."""
    tensor = tensor_meta(node)
    return "" if tensor is not None and tensor.dim() == 3 else "the scores are not those of keys"


_ATTENTION, _DIVERGENCE = cast(_attention(), "final"), _divergence()
_ROOTS = _MATMUL | aten("to.dtype")
SIGNS = (
    Sign(
        "sparse_attention",
        op(_TOPK, op(_FILL, anything(), anything(), -math.inf, where=_by_key), *[anything()] * 4),
        "its indices are used in another way than to gather the entries of sparse latent attention",
    ),
)
