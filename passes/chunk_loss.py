"""Pass chunk_loss: an output head and what is made of its logits become ops that hold a chunk of logits at a time.

    cross entropy, mean or sum             total, ... = linear_cross_entropy_sum(hidden, weight, labels, tokens, ...)
    cross entropy, none                    losses, lse, ... = linear_cross_entropy(hidden, weight, labels, ...)
    the same, and logsumexp(logits)        losses, lse, ... = linear_cross_entropy(...), for any use of lse (a z-loss)
    gather(log_softmax(logits), labels)    log_probs, ... = token_log_probs(hidden, weight, labels, ...)

with class weights, label smoothing and any ignored label. A second walk finds losses per row that are only summed, with
weights or not, and with or without a sum over squares of lse: they become linear_cross_entropy_sum too
(`loss_sums.py`).

What lies between head and loss is in `loss_logits.py`; what divides a sum afterwards stays outside. The plan's `loss`
says how many logits exist at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx

import moec.compiler.dialect  # noqa: F401  (registers torch.ops.moec)
from moec.compiler.dialect.loss_chunks import ChunkSizes, head_sizes
from moec.compiler.graph import Unit, tensor_meta
from moec.compiler.matching import Failure, Match, match
from moec.compiler.nodes import aten, bound_args, describe, used_outside
from moec.compiler.pass_manager import Pass, PassContext, Report
from moec.compiler.pattern import anything, dim, number, op, var
from moec.compiler.plan import LossPlan
from moec.passes.loss_logits import CLASSES_SECOND, LOGITS, Logits, read, row_shape, same_logits
from moec.passes.loss_sums import fold_sums
from moec.passes.rewrite import Finder, Refused, Rewriter, Rule, Sign, apply_rules

_CROSS_ENTROPY, _NLL = aten("cross_entropy_loss.default"), aten("nll_loss_nd.default", "nll_loss.default")
_LOG_SOFTMAX, _LOGSUMEXP, _GATHER = aten("log_softmax.int"), aten("logsumexp.default"), aten("gather.default")
_NONE, _MEAN, _SUM = 0, 1, 2
_NO_LABEL = -100


class ChunkLoss(Pass):
    """See the module docstring."""

    name = "chunk_loss"
    requires = ("normal_form",)
    provides = ("loss",)
    changes_numerics = True

    def run(self, unit: Unit, context: PassContext) -> Report:
        report, plan = Report(), getattr(context.plan, "loss", None) or LossPlan()
        work = _Rewriting(plan, _trainable(unit))
        rules: list[Rule | Finder] = [
            Finder("linear_cross_entropy", _CROSS_ENTROPY | _NLL, _find, work.cross_entropy),
            Rule("token_log_probs", _PICKED, work.log_probs),
        ]
        apply_rules(unit, rules, report, SIGNS)
        fold_sums(unit, _trainable(unit), report)
        return report

    def expected(self, unit: Unit) -> str:
        left = [node for node in unit.graph.nodes if node.target in _CROSS_ENTROPY | _NLL]
        return "the graph has a cross entropy, whose logits stay whole" if left else ""


_TAIL = (var("labels"), anything(), number("reduction"), number("ignored"))
_WHOLE = op(_CROSS_ENTROPY, CLASSES_SECOND, *_TAIL, number("smoothing")) | op(
    _NLL, op(_LOG_SOFTMAX, LOGITS, dim(-1), anything()), *_TAIL
)
_PICKED = op(_GATHER, op(_LOG_SOFTMAX, LOGITS, dim(-1), anything()), dim(-1), var("index"), anything(), name="picked")
_DENOMINATOR = op(_LOGSUMEXP, LOGITS, dim(-1), anything())


def _find(root: fx.Node) -> Match | Failure:
    """The cross entropy that ends in `root`, with the logsumexps of the same logits."""
    found = match(_WHOLE, root, exclusive=False)
    if not isinstance(found, Match):
        return found
    nodes, denominators = dict.fromkeys((*found.nodes, *found.crossed)), []
    for node in _reach([user for inner in nodes if inner is not root for user in inner.users], 4):
        other = match(_DENOMINATOR, node, exclusive=False) if node.target in _LOGSUMEXP else None
        if isinstance(other, Match) and same_logits(found, other):
            denominators.append(node)
            nodes |= dict.fromkeys((*other.nodes, *other.crossed))
    free = {root, *denominators, bound_args(found["head"])[1]}  # a transposed weight costs nothing
    outside = used_outside((node for node in nodes if node not in free), nodes)
    if outside is not None:
        return Failure(tuple(nodes), partial(_outside_text, outside))
    return Match(root, {**found.captures, "denominators": denominators}, tuple(nodes))


def _outside_text(node: fx.Node) -> str:
    return f"{describe(node)} is used outside the pattern too"


def _reach(start: Iterable[fx.Node], steps: int) -> list[fx.Node]:
    """The nodes of `start` and what uses them, through up to `steps` nodes, in graph order."""
    found = border = set(start)
    for _ in range(steps):
        border = {user for node in border for user in node.users} - found
        found = found | border
    return sorted(found)


def _trainable(unit: Unit) -> set[fx.Node]:
    """The nodes that a gradient may reach: inputs that want one, and what depends on them."""
    found = {node for node, value in unit.placeholders() if value.requires_grad}
    for node in unit.graph.nodes:
        if node.target is not torch.ops.aten.detach.default and any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


@dataclass
class _Rewriting:
    """The rewrites of one unit. trainable: the nodes that a gradient may reach."""

    plan: LossPlan
    trainable: set[fx.Node]

    def cross_entropy(self, found: Match, rewriter: Rewriter) -> str:
        if found["denominators"]:
            inputs = [node for node in (found["hidden"], found["weight"], *_tensors(found)) if node is not None]
            _lift(inputs, found)
            rewriter.after_inputs(inputs, [found.root, *found["denominators"]])
        labels, weights = self._labels(found, rewriter), bound_args(found.root)[2]
        if weights is not None and tensor_meta(weights) is None:
            raise Refused("the class weights are not known")
        logits = read(found, rewriter)
        ignored, smoothing = int(found["ignored"]), float(found.get("smoothing", 0.0))
        sizes = self._sizes(logits)
        options = (logits.bias, weights, ignored, logits.scale, logits.softcap, smoothing, sizes.rows, sizes.columns)
        kind = {_NONE: "per row", _MEAN: "mean", _SUM: "sum"}[found["reduction"]]
        if found["reduction"] == _NONE or found["denominators"]:
            losses, lse = rewriter.results(
                torch.ops.moec.linear_cross_entropy.default, logits.hidden, logits.weight, labels, *options, count=2
            )
            for node in found["denominators"]:
                rewriter.replace(node, rewriter.call(torch.ops.aten.reshape.default, lse, row_shape(node)))
            result = self._reduced(found, rewriter, losses, labels, weights)
        else:
            result = self._summed(found, rewriter, logits, labels, options)
        rewriter.replace(found.root, result)
        notes = [kind, logits.text().removeprefix(", ")]
        notes += ["class weights"] if weights is not None else []
        notes += [f"label smoothing {smoothing:g}"] if smoothing else []
        notes += ["logsumexp"] if found["denominators"] else []
        notes += [sizes.text()]
        return f"linear_cross_entropy over {logits.classes} classes, {', '.join(filter(None, notes))}"

    def log_probs(self, found: Match, rewriter: Rewriter) -> str:
        index = tensor_meta(found["index"])
        if index is None or index.shape[-1] != 1:
            raise Refused("it picks more than one class per row")
        logits = read(found, rewriter)
        labels = rewriter.call(torch.ops.aten.reshape.default, found["index"], [-1])
        sizes = self._sizes(logits)
        options = (logits.bias, _NO_LABEL, logits.scale, logits.softcap, sizes.rows, sizes.columns)
        (picked,) = rewriter.results(
            torch.ops.moec.token_log_probs.default, logits.hidden, logits.weight, labels, *options, count=1
        )
        rewriter.replace(found.root, rewriter.call(torch.ops.aten.reshape.default, picked, row_shape(found.root)))
        return f"token_log_probs over {logits.classes} classes{logits.text()}, {sizes.text()}"

    def _sizes(self, logits: Logits) -> ChunkSizes:
        tensor = tensor_meta(logits.hidden)
        assert tensor is not None
        plan, rows = self.plan, tensor.shape[0]
        found = head_sizes(tensor, logits.classes, plan.rows, plan.columns, plan.memory_bytes)
        return replace(found, rows=max(1, min(found.rows, rows))) if isinstance(rows, int) else found

    def _labels(self, found: Match, rewriter: Rewriter) -> fx.Node:
        labels = tensor_meta(found["labels"])
        wanted = 2 if "classes_second" in found else 1
        if labels is None or labels.is_floating_point() or labels.dim() != wanted:
            raise Refused("the labels are not one class per row")
        if wanted == 1:
            return found["labels"]
        return rewriter.call(torch.ops.aten.reshape.default, found["labels"], [-1])

    def _summed(
        self, found: Match, rewriter: Rewriter, logits: Logits, labels: fx.Node, options: tuple[Any, ...]
    ) -> fx.Node:
        hidden = tensor_meta(logits.hidden)
        assert hidden is not None
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        valid = rewriter.call(torch.ops.aten.ne.Scalar, labels, found["ignored"])
        tokens = rewriter.call(torch.ops.aten.to.dtype, valid, dtype)
        wanted = (found["hidden"] in self.trainable, logits.weight in self.trainable or logits.bias in self.trainable)
        total, *_ = rewriter.results(
            torch.ops.moec.linear_cross_entropy_sum.default,
            *(logits.hidden, logits.weight, labels, tokens, None, *options, *wanted, hidden.dtype),
            count=1,
        )
        if found["reduction"] == _SUM:
            return total
        return rewriter.call(torch.ops.aten.div.Tensor, total, _count(rewriter, valid, labels, options[1]))

    def _reduced(
        self, found: Match, rewriter: Rewriter, losses: fx.Node, labels: fx.Node, weights: fx.Node | None
    ) -> fx.Node:
        if found["reduction"] == _NONE:
            wanted = row_shape(found.root)
            return losses if len(wanted) == 1 else rewriter.call(torch.ops.aten.reshape.default, losses, wanted)
        total = rewriter.call(torch.ops.aten.sum.default, losses)
        if found["reduction"] == _SUM:
            return total
        valid = rewriter.call(torch.ops.aten.ne.Scalar, labels, found["ignored"])
        return rewriter.call(torch.ops.aten.div.Tensor, total, _count(rewriter, valid, labels, weights))


def _count(rewriter: Rewriter, valid: fx.Node, labels: fx.Node, weights: fx.Node | None) -> fx.Node:
    """What a mean divides by: the rows with a loss, or the class weights of their labels."""
    if weights is None:
        return rewriter.call(torch.ops.aten.sum.default, valid)
    place = rewriter.call(torch.ops.aten.clamp.default, labels, 0)
    own = rewriter.call(torch.ops.aten.index_select.default, weights, 0, place)
    return rewriter.call(torch.ops.aten.sum.default, rewriter.call(torch.ops.aten.mul.Tensor, own, valid))


def _lift(inputs: list[fx.Node], found: Match) -> None:
    """Compute the labels as early as the logits: a logsumexp is often used before they are shifted."""
    first, stack = min(found.nodes), list(inputs)
    needed: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node > first and node not in needed:
            needed.add(node)
            stack += node.all_input_nodes
    if not needed & set(found.nodes) and not any(node.is_impure() for node in needed):
        for node in sorted(needed):
            first.prepend(node)


def _tensors(found: Match) -> list[fx.Node | None]:
    bias = bound_args(found["head"])[2] if found["head"].target in aten("linear.default") else None
    return [found["labels"], bias, bound_args(found.root)[2]]


SIGNS = (
    Sign("linear_cross_entropy", op(_CROSS_ENTROPY, *[anything()] * 6), "its logits do not come from a linear head"),
    Sign("linear_cross_entropy", op(_NLL, *[anything()] * 5), "its input is not the log softmax of a linear head"),
    Sign(
        "token_log_probs",
        op(_GATHER, op(_LOG_SOFTMAX, *[anything()] * 3), *[anything()] * 3),
        "its logits do not come from a linear head",
    ),
)
